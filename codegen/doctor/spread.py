"""How the experts spread over the ranks, and what redundant ones take."""

from __future__ import annotations

import ast
from typing import NamedTuple

from ..analysis.modules import Modules
from ..analysis.syntax import dotted, statements
from .config import ModelConfig
from .finding import Finding, ok, problem, warning
from .memory import cost, readable

ABOUT = "experts"
MEMORY = "memory"


class Sizes(NamedTuple):
    """The sizes of the groups of ranks; None where not given."""

    tensor: int | None = None
    data: int | None = None
    stages: int = 1
    redundant: int | None = None
    """R, the redundant experts of a layer."""

    @property
    def ranks(self) -> int:
        """The EP size: vLLM's EP group spans the TP and DP ranks of one pipeline stage."""
        return (self.tensor or 1) * (self.data or 1)


def spread_findings(modules: Modules, config: ModelConfig, sizes: Sizes) -> list[Finding]:
    """Whether E + R divides by the EP size, which R would do, and the memory for R."""
    experts = config.experts
    if experts is None:
        message = f"{config.where} names no number of experts: a dense model has none to balance"
        return [problem(ABOUT, message)]
    if sizes.tensor is None and sizes.data is None:
        return [
            warning(
                ABOUT,
                f"{experts} logical experts; how they spread depends on the number of ranks",
                "Give --tensor-parallel-size and --data-parallel-size.",
            )
        ]
    ranks, redundant = sizes.ranks, sizes.redundant or 0
    if ranks == 1 and (where := _needs_ranks(modules)):
        return [
            problem(
                ABOUT,
                f"the EP size is 1 (TP x DP), and this vLLM admits EPLB from 2 on ({where})",
                "Give a larger --tensor-parallel-size or --data-parallel-size.",
            )
        ]
    below = redundant - (experts + redundant) % ranks
    above = below + ranks
    counts = f"E = {experts}, R = {redundant}, EP size {ranks}"
    if (experts + redundant) % ranks:
        choices = [above, above + ranks, above + 2 * ranks]
        nearest = f", or R = {below}" if below >= 0 else ""
        return [
            problem(
                ABOUT,
                f"E + R does not divide by the EP size ({counts}): vLLM stops with an error",
                f"Take R = {choices[0]}{nearest}; {choices[1]} and {choices[2]} fit too.",
            )
        ]
    slots = (experts + redundant) // ranks
    others = ", ".join(str(-experts % ranks + k * ranks) for k in range(4))
    found = [ok(ABOUT, f"{counts}: {slots} slots on every rank; R that fit: {others}, ...")]
    if sizes.redundant:
        found.append(_memory(config, sizes, slots, experts // ranks))
    return found


def _memory(config: ModelConfig, sizes: Sizes, slots: int, before: int) -> Finding:
    price = cost(config, sizes.stages)
    if isinstance(price, str):
        return warning(MEMORY, f"what R = {sizes.redundant} takes is not known: {price}")
    extra = slots - before
    total = extra * price.layers * price.slot_bytes
    return ok(
        MEMORY,
        f"R = {sizes.redundant} takes up to {readable(total)} a rank: {extra} "
        f"slot{'s' if extra > 1 else ''} x {price.layers} MoE layers x "
        f"{readable(price.slot_bytes)} ({price.weights.kind}, gated experts); rearranging takes a "
        f"buffer of one layer's slots as well, {readable(slots * price.slot_bytes)}",
    )


def _needs_ranks(modules: Modules) -> str:
    """Where the tree's ParallelConfig refuses EPLB on one rank; "" where it does not (0.9.2)."""
    for name in ("vllm.config.parallel", "vllm.config"):
        module = modules.get(name)
        ref = modules.class_of(module, "ParallelConfig") if module else None
        if ref is None:
            continue
        for function in ref.methods.values():
            for statement, _ in statements(function):
                if isinstance(statement, ast.If) and dotted(statement.test) == "self.enable_eplb":
                    for inner in ast.walk(statement):
                        if isinstance(inner, ast.Compare) and "tensor_parallel_size" in ast.unparse(
                            inner
                        ):
                            return ref.module.where(inner)
        return ""
    return ""
