"""Whether every local slot holds the expert it should: right, wrong, or never written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch

from .checkpoint import Experts

_ORDER = re.compile(r"_g_idx(_sort_indices)?$")
"""Of checkpoints in the order of their activations; with others it holds nothing."""
_LAYER = re.compile(r"\blayers\.(\d+)\.")


@dataclass
class Slot:
    """One parameter of one slot, judged."""

    layer: int
    rank: int
    slot: int
    physical: int
    logical: int
    parameter: str
    state: str
    """right, wrong, never written, partly written; not judged if no value is known."""
    detail: str = ""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        place = f"layer {self.layer}, rank {self.rank}, slot {self.slot}"
        return (
            f"{place} (physical {self.physical}), {self.parameter}: {self.state}, "
            f"should hold logical expert {self.logical}{self.detail}"
        )


def expert_modules(model: Any) -> list[tuple[int, str, Any]]:
    """(layer number, name, module) of every module that owns expert weights, in layer order."""
    found = []
    for name, module in model.named_modules():
        layer = _LAYER.search(name)
        if layer and any(p.startswith("w13_") for p in module._parameters):
            found.append((int(layer[1]), name, module))
    return sorted(found, key=lambda item: item[0])


def expert_parameters(module: Any) -> Iterator[tuple[str, torch.Tensor]]:
    for name, parameter in module._parameters.items():
        if parameter is not None and re.match(r"w(13|2|1|3)_", name):
            yield name, parameter


def number_of_slots(module: Any) -> int:
    """The local slots of a module that owns expert weights."""
    count: int = next(expert_parameters(module))[1].shape[0]
    return count


_NEVER = 0x5E27_1E1D
"""In whole numbers: packed weights, which are random, hardly ever come to it."""


def fill_with_sentinel(model: Any) -> None:
    """NaN: a value no checkpoint has, and one that shows in any output it reaches."""
    for _, _, module in expert_modules(model):
        for _, parameter in expert_parameters(module):
            if parameter.is_floating_point():
                parameter.data.fill_(float("nan"))
            elif parameter.dtype is torch.int32:
                parameter.data.fill_(_NEVER)


def initial_map(experts: int, redundant: int) -> list[int]:
    """Physical -> logical as every release starts: the experts, then them again as replicas."""
    return [p if p < experts else (p - experts) % experts for p in range(experts + redundant)]


def judge(
    model: Any, expected: Experts, rank: int, physical_to_logical: Mapping[int, Sequence[int]]
) -> list[Slot]:
    """Every parameter of every local slot, against `physical_to_logical` of its layer."""
    out: list[Slot] = []
    for layer, _, module in expert_modules(model):
        if layer not in expected:
            continue
        held = _physical_of_slots(module, rank)
        for name, parameter in expert_parameters(module):
            want = expected[layer].get(name)
            if want is None and _ORDER.search(name):
                continue
            for slot in range(parameter.shape[0]):
                physical = held[slot]
                logical = int(physical_to_logical[layer][physical])
                state, detail = _compare(parameter.data[slot], want, logical)
                out.append(Slot(layer, rank, slot, physical, logical, name, state, detail))
    return out


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    """fp8 as float32, which holds all of its values: torch compares few things in fp8."""
    one_byte = tensor.is_floating_point() and tensor.element_size() == 1
    return tensor.float() if one_byte else tensor


def _physical_of_slots(module: Any, rank: int) -> list[int]:
    """Slot -> physical expert, as the layer itself routes: ranks may differ in their number."""
    slots = number_of_slots(module)
    expert_map = getattr(module, "expert_map", None)
    if expert_map is None:
        return [rank * slots + slot for slot in range(slots)]
    table = expert_map.tolist()
    return [table.index(s) if s in table else rank * slots + s for s in range(slots)]


def _compare(got: torch.Tensor, want: torch.Tensor | None, logical: int) -> tuple[str, str]:
    got = _plain(got.cpu())
    if want is None:
        empty = got.is_floating_point() and bool(got.isnan().any())
        return ("never written", "") if empty else ("not judged", "")
    want = _plain(want)
    expected = want[logical].to(got.dtype)
    if got.shape != expected.shape:
        return "wrong", f", has shape {tuple(got.shape)} and not {tuple(expected.shape)}"
    if torch.equal(got, expected):
        return "right", ""
    empty = got.isnan() if got.is_floating_point() else got == _NEVER
    if bool(empty.all()):
        return "never written", ""
    if bool(empty.any()):
        return "partly written", f", {int(empty.sum())} of {got.numel()} values never written"
    for other in range(want.shape[0]):
        if torch.equal(got, want[other].to(got.dtype)):
            return "wrong", f", holds logical expert {other}"
    at = tuple(int(i) for i in (got != expected).nonzero()[0])
    return (
        "wrong",
        f", value at {list(at)} is {got[at].item():.6g} and not {expected[at].item():.6g}",
    )
