"""What is asked of `verify`, and what it answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from ..errors import EnvironmentFault

Status = Literal["passed", "failed", "not run", "skipped"]
"""`not run`: should have been checked and was not, so nothing is proven. `skipped`: has no meaning
in this release or for this request; the detail says why."""


class Unusable(EnvironmentFault):
    """The interpreter's vLLM cannot be run here."""


@dataclass(frozen=True)
class Request:
    """One class to judge."""

    python: Path
    """The interpreter whose vLLM is used."""
    family: str
    """The key of the family's tiny model."""
    module: Path | None = None
    """The generated file; None judges upstream's own class."""
    ranks: int = 2
    redundant: tuple[int, ...] = (0, 2)
    layouts: tuple[str, ...] = ("per-expert",)
    skip_unknown_layouts: bool = False
    """Skip, instead of failing, a layout that upstream's own class does not load with EPLB off."""
    experts: int = 8
    """E of the tiny model."""
    quantization: Literal["fp8", "wna16", "wna16-marlin"] | None = None
    """Of the tiny model's experts, per-expert layout only: fp8 with a scale for each block, or 4
    bits with one for each group, for either of the classes that vLLM has for them."""
    methods: Mapping[str, Path] = field(default_factory=dict)
    """Generated files of quantisation methods, by the module that each replaces."""
    checkpoint: Path | None = None
    """A real checkpoint instead of a tiny random one."""
    seed: int = 0
    device: Literal["cpu", "cuda"] = "cpu"
    timeout: float = 300.0
    """Seconds that one case may take."""
    tolerance: float = 1e-5
    """How far float32 logits may be apart, relative to the largest."""


@dataclass(frozen=True)
class Check:
    """One line of the report."""

    check: str
    case: str
    status: Status
    what: str
    """What was compared."""
    figure: str = ""
    detail: str = ""


@dataclass(frozen=True)
class Slot:
    """One expert parameter of one slot, as judged in one case."""

    case: str
    when: str
    layer: int
    rank: int
    slot: int
    physical: int
    logical: int
    parameter: str
    state: str
    """right, wrong, never written or partly written."""
    detail: str = ""


@dataclass(frozen=True)
class Loads:
    """Tokens per MoE layer and rank on one skewed batch, around one rearrangement."""

    case: str
    batch: int
    before: tuple[tuple[int, ...], ...]
    after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True)
class Report:
    vllm: str
    torch: str
    checks: tuple[Check, ...]
    slots: tuple[Slot, ...]
    loads: tuple[Loads, ...]
    seconds: float

    @property
    def passed(self) -> bool:
        """Every check that applies ran and passed, and there was at least one."""
        return {check.status for check in self.checks} - {"skipped"} == {"passed"}
