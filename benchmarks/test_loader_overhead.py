"""The loading loop's own cost, on the shapes of Qwen3-235B-A22B with 32 redundant experts.

The real loops of upstream and of the generated file run over all names of such a checkpoint. What a
parameter's weight loader does is left out (it does nothing here), and what both would need for
calling it is subtracted: what remains is the search for the parameters that a tensor goes to.
"""

from __future__ import annotations
import __future__

import ast
import statistics
import time
import typing
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from eplb_codegen.families import family
from eplb_codegen.generate import Generator
from eplb_codegen.source import find_source

LAYERS, EXPERTS, REDUNDANT = 94, 128, 32
PROJECTIONS = {"gate_proj": ("w13", "w1"), "down_proj": ("w2", "w2"), "up_proj": ("w13", "w3")}
ROUNDS = 5


def mapping(redundant: int) -> list[tuple[str, str, int, str]]:
    """What make_expert_params_mapping gives."""
    return [
        (f"experts.{param}_", f"experts.{slot % EXPERTS}.{name}.", slot, shard)
        for slot in range(EXPERTS + redundant)
        for name, (param, shard) in PROJECTIONS.items()
    ]


def checkpoint() -> Iterator[tuple[str, object]]:
    tensor = object()
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        for name in "qkvo":
            yield f"{at}.self_attn.{name}_proj.weight", tensor
        for name in ("self_attn.q_norm", "self_attn.k_norm", "input_layernorm", "mlp.gate"):
            yield f"{at}.{name}.weight", tensor
        for expert in range(EXPERTS):
            for name in PROJECTIONS:
                yield f"{at}.mlp.experts.{expert}.{name}.weight", tensor


def parameters() -> dict[str, Any]:
    def load(*_: object, **keywords: object) -> bool:
        # half of the slots are on this rank
        return int(str(keywords.get("expert_id", 0))) % 2 == 0

    parameter = SimpleNamespace(weight_loader=load)
    found: dict[str, Any] = {}
    for layer in range(LAYERS):
        at = f"layers.{layer}"
        names = ["self_attn.qkv_proj", "self_attn.o_proj", "self_attn.q_norm", "self_attn.k_norm"]
        names += ["input_layernorm", "mlp.gate", "mlp.experts.w13", "mlp.experts.w2"]
        for name in names:
            joint = "_" if "experts" in name else "."
            found[f"{at}.{name}{joint}weight"] = parameter
    return found


def loop_of(source: str, redundant: int) -> Callable[[], float]:
    """The load_weights of the backbone in a model file, with everything around it left out."""
    tree = ast.parse(source)
    backbone = next(
        n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == "Qwen3MoeModel"
    )
    method = next(
        n for n in backbone.body if isinstance(n, ast.FunctionDef) and n.name == "load_weights"
    )
    helpers: list[ast.stmt] = [n for n in tree.body if isinstance(n, ast.FunctionDef)]
    module = ast.Module([*helpers, method], [])
    scope: dict[str, Any] = {
        "typing": typing,
        "Callable": Callable,
        "default_weight_loader": lambda *_: None,
        "is_pp_missing_parameter": lambda *_: False,
        "maybe_remap_kv_scale_name": lambda name, _: name,
    }
    flags = __future__.annotations.compiler_flag
    exec(compile(module, "loop", "exec", flags=flags, dont_inherit=True), scope)
    held = parameters()
    model = SimpleNamespace(
        named_parameters=lambda: held.items(), get_expert_mapping=lambda: mapping(redundant)
    )
    names = list(checkpoint())

    def seconds() -> float:
        start = time.perf_counter()
        loaded = scope["load_weights"](model, names)
        taken = time.perf_counter() - start
        assert len(loaded) == len(held)
        return taken

    return seconds


def bare(redundant: int) -> Callable[[], float]:
    """What any loop has to do: rename and call the weight loader of every replica."""
    held = parameters()
    slots = {e: range(e, EXPERTS + redundant, EXPERTS) for e in range(EXPERTS)}
    work: list[tuple[str, str, range]] = []
    for name, _ in checkpoint():
        _, found, rest = name.partition("experts.")
        work.append(
            (
                name,
                rest.partition(".")[2],
                slots[int(rest.partition(".")[0])] if found else range(0),
            )
        )

    def seconds() -> float:
        start = time.perf_counter()
        for name, _, replicas in work:
            parameter = next(iter(held.values()))
            name.replace("experts.", "experts.")
            for slot in replicas or (0,):
                parameter.weight_loader(parameter, None, name, shard_id="w1", expert_id=slot)
        return time.perf_counter() - start

    return seconds


@pytest.mark.parametrize("upstream", ["0.10.0", "0.10.1"], ids=["without EPLB", "native EPLB"])
def test_overhead_against_upstream(
    upstream: str, record_property: Callable[[str, object], None]
) -> None:
    """Upstream's own loop: of 0.10.0 with no redundant experts, and of 0.10.1, which knows them."""
    path = "vllm/model_executor/models/qwen3_moe.py"
    theirs_redundant = 0 if upstream == "0.10.0" else REDUNDANT
    theirs = loop_of(find_source(version=upstream).read(path), theirs_redundant)
    result = Generator(find_source(version="0.10.0")).generate(family("qwen3_moe"))
    ours = loop_of(result.files[0].patched, REDUNDANT)
    floors = bare(theirs_redundant), bare(REDUNDANT)
    ratios = []
    for _ in range(ROUNDS):
        taken = theirs() - floors[0](), ours() - floors[1]()
        ratios.append(taken[0] / taken[1])
    ratio = statistics.median(ratios)
    record_property("ratio", round(ratio, 1))
    print(f"\nupstream {upstream} has {ratio:.1f} times the overhead")
    assert ratio >= 5
