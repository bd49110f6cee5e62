"""The answer for people, a line a check, and for programs."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict

from .outcome import Outcome
from .request import Check

WORDS = {"passed": "ok", "failed": "FAILED", "not run": "NOT RUN", "skipped": "skipped"}
COLOURS = {"passed": "32", "failed": "31", "not run": "33", "skipped": "2"}


def lines(outcome: Outcome, colour: bool) -> Iterator[str]:
    """The report of one class: grouped by case; details only of what did not pass."""
    report, request = outcome.report, outcome.request
    yield outcome.what
    where = f"{request.checkpoint}" if request.checkpoint else f"tiny model, E = {request.experts}"
    yield (
        f"vLLM {report.vllm}, torch {report.torch}, {request.ranks} ranks, {where}, "
        f"seed {request.seed}, {request.device}"
    )
    for case, checks in outcome.by_case().items():
        yield f"  {case}"
        for check in checks:
            yield from _check(check, colour)
    word = _painted(outcome.verdict, "32" if report.passed else "31", colour)
    yield f"{word} in {report.seconds:.0f} s"


def _check(check: Check, colour: bool) -> Iterator[str]:
    word = _painted(f"{WORDS[check.status]:<8}", COLOURS[check.status], colour)
    figure = f": {check.figure}" if check.figure else ""
    yield f"    {word} {check.check:<16} {check.what}{figure}".rstrip()
    if check.status != "passed" and check.detail:
        yield textwrap.indent(check.detail.rstrip(), " " * 13)


def _painted(text: str, code: str, colour: bool) -> str:
    return f"\033[{code}m{text}\033[0m" if colour else text


def as_json(outcomes: Sequence[Outcome], version: str, python: str) -> dict[str, object]:
    """All of it, but of the slots that are right only how many there are."""
    return {"vllm": version, "python": python, "targets": [_json(one) for one in outcomes]}


def _json(one: Outcome) -> dict[str, object]:
    report, request = one.report, one.request
    states = Counter((s.case, s.when, s.state) for s in report.slots)
    return {
        "family": one.subject.target,
        "model": one.subject.model,
        "architecture": one.subject.architecture,
        "file": str(one.subject.file) if one.subject.file else None,
        "passed": report.passed,
        "counts": one.counts,
        "vllm": report.vllm,
        "torch": report.torch,
        "ranks": request.ranks,
        "experts": request.experts,
        "redundant": list(request.redundant),
        "layouts": list(request.layouts),
        "seed": request.seed,
        "device": request.device,
        "seconds": round(report.seconds, 1),
        "checks": [asdict(check) for check in report.checks],
        "slot_counts": [
            {"case": case, "when": when, "state": state, "slots": count}
            for (case, when, state), count in states.items()
        ],
        "slots": [asdict(slot) for slot in report.slots if slot.state != "right"],
        "loads": [asdict(load) for load in report.loads],
    }
