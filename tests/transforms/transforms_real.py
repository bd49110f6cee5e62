"""Real sources: releases from the index (cached), changed in memory, patched, and run."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from types import SimpleNamespace
from typing import Any, NamedTuple

import transforms_oracle as oracle
from eplb_codegen.families import family
from eplb_codegen.generate import Generator, Result
from eplb_codegen.source import SourceTree, find_source

FOLDER = "vllm/model_executor/models/"

Tensors = Callable[[oracle.World], list[Any]]


@dataclass(frozen=True)
class Changed(SourceTree):
    """A tree with other text in some files."""

    texts: Mapping[str, str] = field(default_factory=dict, hash=False)

    def read(self, path: str) -> str:
        return self.texts[path] if path in self.texts else super().read(path)


class Case(NamedTuple):
    """What to run of a family: the class, and the model files that it builds on."""

    family: str
    cls: str
    attribute: str = "mlp"
    beside: tuple[str, ...] = ()
    module: str = ""
    root: str = "model."
    """What the names of a checkpoint's tensors begin with."""


QWEN2 = Case("qwen2_moe", "Qwen2MoeForCausalLM")
QWEN3 = Case("qwen3_moe", "Qwen3MoeForCausalLM")
LLAMA4 = Case("llama4", "Llama4ForCausalLM", "feed_forward", ("llama",), "llama4")
QWEN3_VL = Case("qwen3_vl_moe", "Qwen3MoeLLMForCausalLM", "mlp", ("qwen3_moe",))
LLAMA4_SERVED = LLAMA4._replace(
    cls="Llama4ForConditionalGeneration", module="mllama4", root="language_model.model."
)
QWEN3_VL_SERVED = QWEN3_VL._replace(
    cls="Qwen3VLMoeForConditionalGeneration", root="language_model.model."
)


@cache
def release(version: str) -> SourceTree:
    return find_source(version=version)


def changed(version: str, texts: Mapping[str, str]) -> SourceTree:
    tree = release(version)
    return Changed(tree.root, tree.version, tree.origin, texts)


@cache
def of_release(version: str, name: str) -> Result:
    return generate(release(version), name)


def generate(tree: SourceTree, name: str) -> Result:
    return Generator(tree).generate(family(name))


def machine(tree: SourceTree, case: Case, texts: Mapping[str, str]) -> oracle.Machine:
    """A fake installation of a release that runs these texts (model file -> text)."""
    config = "".join(
        tree.read(p)
        for p in ("vllm/config.py", "vllm/config/__init__.py", "vllm/config/parallel.py")
        if tree.exists(p)
    )
    layers = "vllm/model_executor/layers/fused_moe"
    layer = tree.read(f"{layers}/layer.py")
    routed = f"{layers}/routed_experts.py"
    told = tree.exists(routed) and "is_fused_checkpoint_transposed" in tree.read(routed)
    function = layer.partition("def fused_moe_make_expert_params_mapping(")[2][:900]
    hf = {}
    if "self.language_model.start_layer" in texts.get("qwen3_vl_moe.py", ""):
        # 0.17 to 0.21: behind the first stage they ask for an attribute that is not there, with
        # EPLB off too, unless the config has no deepstack_visual_indexes
        hf["vision_config"] = SimpleNamespace(out_hidden_size=oracle.HIDDEN)
    return oracle.Machine(
        hf=hf,
        protocol_source=tree.read(f"{FOLDER}interfaces.py"),
        in_eplb_config="class EPLBConfig" in config,
        routed_prefix="routed_experts" if "routed_experts_prefix" in function else "",
        told_by_shape=not told,
        layer_loads="def load_weights" in tree.read(f"{layers}/runner/moe_runner.py")
        if tree.exists(f"{layers}/runner/moe_runner.py")
        else False,
        sources={
            **{stem: tree.read(f"{FOLDER}{stem}.py") for stem in case.beside},
            **{name.removesuffix(".py"): text for name, text in texts.items()},
        },
    )


def upstream(version: str, case: Case) -> oracle.Machine:
    """A release with its own files."""
    tree = release(version)
    return machine(tree, case, {n: tree.read(FOLDER + n) for n in family(case.family).files})


def run(
    fake: oracle.Machine,
    case: Case,
    tensors: Tensors,
    shapes: Iterable[tuple[int, int, int]] = oracle.SHAPES,
) -> list[str]:
    """Load on every rank; which slots are wrong."""
    module = fake.load(case.module or case.family)
    wrong: list[str] = []
    with fake.installed():
        for world in oracle.worlds(shapes):
            model = fake.build(getattr(module, case.cls), world)
            model.load_weights(oracle.shuffled(tensors(world)))
            assert len(fake.recorder.layers) == world.layers
            wrong += oracle.faults(fake)
    return wrong


def tensors_of(case: Case, kind: str = "per_expert", out: int = 2) -> Tensors:
    if kind == "fused":
        return lambda world: oracle.fused(world, case.attribute, case.root, out)
    if kind == "fused fp8":
        return lambda world: oracle.fused(world, case.attribute, case.root, out, oracle.FP8)
    return lambda world: oracle.per_expert(world, case.attribute, case.root)


def rename(source: str, old: str, new: str) -> str:
    """A name replaced as a word, everywhere."""
    return re.sub(rf"\b{re.escape(old)}\b", new, source)
