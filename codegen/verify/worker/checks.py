"""What can be said of a built model on one rank: each function returns the problems it found."""

from __future__ import annotations

from typing import Any

import torch

from . import tree
from .slots import expert_modules, expert_parameters, number_of_slots


def protocol(model: Any, moe: Any, experts: int, redundant: int, ep: int) -> list[str]:
    """Every member that EplbState and the runner read, against E, R and ep."""
    if moe is None:
        name = type(model).__name__
        members = [m for m in _members() if not hasattr(model, m)]
        missing = f"; it lacks {', '.join(members)}" if members else ""
        return [f"{name} is not a mixture of experts by this release's own test{missing}"]
    modules = expert_modules(model)
    want = {
        "num_moe_layers": len(modules),
        "num_logical_experts": experts,
        "num_routed_experts": experts,
        "num_redundant_experts": redundant,
        "num_physical_experts": experts + redundant,
        "num_local_physical_experts": (experts + redundant) // ep,
    }
    found = [
        f"{name} is {getattr(moe, name, 'missing')}, should be {value}"
        for name, value in want.items()
        if getattr(moe, name, None) != value
    ]
    found += [f"{name} is missing" for name in _members() if not hasattr(moe, name)]
    if hasattr(moe, "moe_layers"):
        found += _order(list(moe.moe_layers), modules)
    return found


def _members() -> list[str]:
    """The protocol's members in this release; expert_weights may be made by set_eplb_state."""
    made = tree.need("vllm.model_executor.models.interfaces:MixtureOfExperts")
    names = [n for n in made.__annotations__ if n != "expert_weights"]
    methods = ["set_eplb_state", "update_physical_experts_metadata"]
    return names + [m for m in methods if hasattr(made, m)]


def _order(layers: list[Any], modules: list[Any]) -> list[str]:
    """moe_layers must hold the MoE layers in the order of the model's layers."""
    if len(layers) != len(modules):
        return [f"moe_layers has {len(layers)} layers, the model {len(modules)}"]
    out = []
    for index, (layer, (number, _, module)) in enumerate(zip(layers, modules, strict=False)):
        if all(module is not inner for inner in layer.modules()):
            out.append(f"moe_layers[{index}] is not the MoE block of layer {number}")
    return out


def handed_out(model: Any, moe: Any) -> list[str]:
    """expert_weights: for each layer in order, each expert parameter once, as rows of slots."""
    out = []
    modules = expert_modules(model)
    given = [list(layer) for layer in moe.expert_weights]
    if len(given) != len(modules):
        return [f"expert_weights has {len(given)} layers, the model {len(modules)}"]
    for weights, (number, _, module) in zip(given, modules, strict=False):
        parameters = dict(expert_parameters(module))
        slots = number_of_slots(module)
        storage = {w.data_ptr(): w for w in weights}
        for name, parameter in parameters.items():
            handed = storage.pop(parameter.data_ptr(), None)
            if handed is None:
                out.append(f"layer {number}: {name} is not handed out")
            elif handed.shape[0] != slots or handed.numel() != parameter.numel():
                out.append(
                    f"layer {number}: {name} has shape {list(handed.shape)}, should be {slots} rows"
                )
            elif not handed.is_contiguous():
                out.append(f"layer {number}: {name} is not contiguous")
        if storage:
            shapes = [list(w.shape) for w in storage.values()]
            out.append(f"layer {number}: what is no expert parameter is handed out: {shapes}")
        if len({w.data_ptr() for w in weights}) != len(weights):
            out.append(f"layer {number}: a parameter is handed out twice")
    return out


def metadata_reaches_all(model: Any, moe: Any) -> list[str]:
    """Tell the model of one more rank's experts; every MoE layer must be told to map anew.

    The model is of no use afterwards.
    """
    modules = expert_modules(model)
    told = set()

    def listen(number: int) -> Any:
        return lambda *_, **__: told.add(number)

    for number, name, _ in modules:
        for path, module in model.named_modules():
            # The block itself, what it is inside of (a runner), and what is inside of it.
            if hasattr(type(module), "update_expert_map") and (
                path.startswith(name) or name.startswith(path)
            ):
                module.update_expert_map = listen(number)
    local = moe.num_local_physical_experts
    physical = moe.num_physical_experts + local
    try:
        moe.update_physical_experts_metadata(physical, local)
    except Exception as error:
        return [f"{type(error).__name__}: {error}"]
    out = [f"layer {n} was not told" for n, _, _ in modules if n not in told]
    redundant = physical - moe.num_logical_experts
    for name, value in (("num_physical_experts", physical), ("num_redundant_experts", redundant)):
        if getattr(moe, name) != value:
            out.append(f"{name} is {getattr(moe, name)} afterwards, should be {value}")
    return out


def balancedness(per_rank: list[list[int]]) -> float:
    """Mean over max tokens per rank, each summed over the MoE layers, as the releases log it."""
    load = torch.tensor(per_rank, dtype=torch.float)
    most = float(load.max(dim=1).values.sum())
    return float(load.mean(dim=1).sum()) / most if most else 0.0
