"""The answer as one page of HTML that needs nothing else: no script, no font, no network."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template

from ..source import SourceTree
from .outcome import Outcome
from .request import Check, Loads, Slot
from .run import CHECKS

MARKS = {"passed": "✓", "failed": "✗", "not run": "?", "skipped": "·"}
STATES = ("wrong", "partly written", "never written", "right")
"""Of a slot. It is shown as the first of these that one of its parameters is."""


def page(outcomes: Sequence[Outcome], tree: SourceTree, python: str) -> str:
    """The whole page."""
    passed = bool(outcomes) and all(one.report.passed for one in outcomes)
    return _template().render(
        passed=passed,
        version=tree.version,
        origin=tree.origin,
        python=python,
        columns=sorted({check for kind in CHECKS.values() for check in kind}),
        marks=MARKS,
        sections=[_section(one) for one in outcomes],
    )


@cache
def _template() -> Template:
    here = Path(__file__).parent.parent
    # Beside the package in an installation, beside its folder in a checkout.
    folders = [f for f in (here / "templates", here.parent / "templates") if f.is_dir()]
    environment = Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        autoescape=True,
    )
    return environment.get_template("report.html.j2")


def _section(one: Outcome) -> dict[str, Any]:
    cases = one.by_case()
    return {
        "one": one,
        "cases": cases,
        "open": [c for cs in cases.values() for c in cs if c.status in ("failed", "not run")],
        "matrix": {name: _row(checks) for name, checks in cases.items()},
        "maps": _maps(one.report.slots),
        "loads": _by_case(one.report.loads),
    }


def _row(checks: Sequence[Check]) -> dict[str, str]:
    """Check -> its worst status in one case."""
    found: dict[str, list[str]] = {}
    for check in checks:
        found.setdefault(check.check, []).append(check.status)
    return {name: _worst(statuses) for name, statuses in found.items()}


def _worst(statuses: Sequence[str]) -> str:
    order = ("failed", "not run", "passed", "skipped")
    return next(status for status in order if status in statuses)


class Cell(NamedTuple):
    """A slot, all its parameters taken together."""

    slot: int
    logical: int
    state: str
    title: str


class Map(NamedTuple):
    """The slots of one moment: layer -> rank -> its cells."""

    case: str
    when: str
    rows: dict[int, dict[int, list[Cell]]]
    counts: dict[str, int]

    @property
    def ranks(self) -> list[int]:
        return sorted({rank for row in self.rows.values() for rank in row})


def _maps(slots: Sequence[Slot]) -> list[Map]:
    moments: dict[tuple[str, str], dict[tuple[int, int, int], list[Slot]]] = {}
    for slot in slots:
        place = (slot.layer, slot.rank, slot.slot)
        moments.setdefault((slot.case, slot.when), {}).setdefault(place, []).append(slot)
    return [_map(case, when, places) for (case, when), places in moments.items()]


def _map(case: str, when: str, places: dict[tuple[int, int, int], list[Slot]]) -> Map:
    rows: dict[int, dict[int, list[Cell]]] = {}
    counts = dict.fromkeys(STATES, 0)
    for (layer, rank, number), slots in sorted(places.items()):
        states = {slot.state for slot in slots}
        worst = next(state for state in STATES if state in states)
        title = f"layer {layer}, rank {rank}, slot {number} (physical {slots[0].physical}), "
        title += f"logical expert {slots[0].logical}"
        title += "".join(f"\n{slot.parameter}: {slot.state}{slot.detail}" for slot in slots)
        cell = Cell(number, slots[0].logical, worst, title)
        rows.setdefault(layer, {}).setdefault(rank, []).append(cell)
        counts[worst] += 1
    return Map(case, when, rows, {state: n for state, n in counts.items() if n})


class Bar(NamedTuple):
    """Tokens of one rank, and how wide their bar is, in percent of the widest."""

    rank: int
    tokens: int
    width: float


class Side(NamedTuple):
    """The load of one batch before or after a rearrangement."""

    name: str
    bars: list[Bar]
    mean: float
    """Where the mean is, in percent of the widest bar."""
    balancedness: float
    layers: tuple[tuple[int, ...], ...]
    """[MoE layer, rank] -> tokens."""


def _by_case(loads: Sequence[Loads]) -> dict[str, list[tuple[int, Side, Side]]]:
    """Case -> (number, before, after) of each of its rearrangements."""
    out: dict[str, list[tuple[int, Side, Side]]] = {}
    for load in loads:
        totals = [[sum(rank) for rank in zip(*side, strict=True)] for side in _sides(load)]
        widest = max(1, *(tokens for total in totals for tokens in total))
        before, after = (
            _side(name, side, total, widest)
            for name, side, total in zip(("before", "after"), _sides(load), totals, strict=True)
        )
        rounds = out.setdefault(load.case, [])
        rounds.append((len(rounds) + 1, before, after))
    return out


def _sides(load: Loads) -> tuple[tuple[tuple[int, ...], ...], ...]:
    return load.before, load.after


def _side(name: str, layers: tuple[tuple[int, ...], ...], total: list[int], widest: int) -> Side:
    bars = [Bar(rank, tokens, 100 * tokens / widest) for rank, tokens in enumerate(total)]
    mean = 100 * sum(total) / len(total) / widest
    most = sum(max(layer) for layer in layers)
    balance = sum(sum(layer) / len(layer) for layer in layers) / most if most else 0.0
    return Side(name, bars, mean, balance, layers)
