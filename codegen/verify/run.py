"""The cases of a request, run to their end: a case that breaks its ranks does not end the rest."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from .launch import Ranks, Workplace
from .request import Check, Loads, Report, Request, Slot, Unusable

CHECKS = {
    "reference": ("3 slots",),
    "off": ("2 off", "3 slots"),
    "on": (
        "1 protocol",
        "3 slots",
        "4 logits",
        "5 rearrangement",
        "6 load",
        "7 handed out",
        "8 errors",
    ),
    "errors": ("8 errors",),
}
"""What each kind of case must answer for."""


LAYOUT = "layout"
"""The line that says that a layout was skipped."""


def verify(request: Request, progress: Callable[[str], None] = lambda _: None) -> Report:
    """Judge one class; `progress` is given the name of every case that begins.

    Raises `Unusable` where its vLLM cannot be run at all.
    """
    start = time.monotonic()
    gathered = _Gathered(progress)
    cases = every = list(_cases(request))
    with Workplace() as place:
        while cases:
            finished = _run(place, request, cases, gathered)
            cases = cases[finished:]
    gathered.complete(every)
    return gathered.report(time.monotonic() - start)


def _cases(request: Request) -> Iterable[dict[str, Any]]:
    subject = "upstream" if request.module is None else "generated"
    for layout in request.layouts:
        here = {"layout": layout, "subject": subject}
        if subject == "generated":
            name = f"{layout}, EPLB off, upstream's class"
            yield {**here, "kind": "reference", "subject": "upstream", "name": name}
        yield {**here, "kind": "off", "name": f"{layout}, EPLB off"}
        for redundant in request.redundant:
            name = f"{layout}, R = {redundant}"
            yield {**here, "kind": "on", "redundant": redundant, "name": name}
    # In the first layout that is known.
    yield {
        "layout": request.layouts[0],
        "subject": subject,
        "kind": "errors",
        "name": "errors",
    }


def _run(
    place: Workplace, request: Request, cases: list[dict[str, Any]], gathered: _Gathered
) -> int:
    """Run cases on one set of ranks; returns how many are done with."""
    job = {
        "family": request.family,
        "module": str(request.module.resolve()) if request.module else None,
        "ranks": request.ranks,
        "experts": request.experts,
        "layouts": request.layouts,
        "quantization": request.quantization,
        "methods": {name: str(path.resolve()) for name, path in request.methods.items()},
        "skip_unknown_layouts": request.skip_unknown_layouts,
        "checkpoint": str(request.checkpoint.resolve()) if request.checkpoint else None,
        "seed": request.seed,
        "device": request.device,
        "tolerance": request.tolerance,
        "cases": cases,
    }
    ended = [0] * request.ranks
    with Ranks(place, request.python, job) as ranks:
        deadline = time.monotonic() + request.timeout
        while True:
            progress = False
            for rank, event in ranks.events():
                progress = True
                kind = event["event"]
                if kind == "unusable":
                    raise Unusable(
                        f"the vLLM of {request.python} cannot be run here: {event['error']}",
                        ranks.tail(rank),
                    )
                if kind == "end":
                    ended[rank] += 1
                    deadline = time.monotonic() + request.timeout
                elif kind == "broken":
                    what = f"{event['what']} (rank {event['rank']})"
                    gathered.fail(cases[min(ended)], what, f"{event['error']}\n{ranks.tail(rank)}")
                    return min(ended) + 1
                else:
                    gathered.take(event)
            if min(ended) == len(cases):
                return len(cases)
            gone = ranks.gone()
            if gone and not progress:
                rank, code = gone[0]
                if not gathered.vllm:
                    raise Unusable(
                        f"rank {rank} ended with code {code} while it started", ranks.tail(rank)
                    )
                what = f"rank {rank} ended with code {code}"
                gathered.fail(cases[min(ended)], what, ranks.tail(rank))
                return min(ended) + 1
            if time.monotonic() > deadline:
                waiting = [r for r, n in enumerate(ended) if n == min(ended)]
                what = f"no answer from rank {', '.join(map(str, waiting))}"
                what += f" within {request.timeout:g} s"
                if not gathered.vllm:
                    raise Unusable(f"{what}, while it started", ranks.tail(waiting[0]))
                gathered.fail(cases[min(ended)], what, ranks.tail(waiting[0]))
                return min(ended) + 1
            if not progress:
                time.sleep(0.05)


class _Gathered:
    """What the ranks of all attempts told."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self.progress = progress
        self.vllm = self.torch = ""
        self.checks: list[Check] = []
        self.slots: list[Slot] = []
        self.loads: list[Loads] = []

    def take(self, event: Mapping[str, Any]) -> None:
        kind, case = event["event"], event["case"]
        if kind == "ready":
            self.vllm, self.torch = event["vllm"], event["torch"]
        elif kind == "begin" and event["rank"] == 0:
            self.progress(case)
        elif kind == "check":
            names = ("check", "status", "what", "figure", "detail")
            self.checks.append(Check(case=case, **{n: event[n] for n in names}))
        elif kind == "slots":
            self.slots += [Slot(case=case, when=event["when"], **s) for s in event["slots"]]
        elif kind == "loads":
            before, after = (tuple(tuple(r) for r in event[k]) for k in ("before", "after"))
            self.loads.append(Loads(case, event["batch"], before, after))

    def fail(self, case: Mapping[str, Any], what: str, detail: str) -> None:
        """A case that ended its ranks; what it had not come to is told as not run."""
        self.checks.append(Check("ranks", case["name"], "failed", what, detail=detail))
        self._missing(case, f"the ranks were ended before: {what}")

    def complete(self, cases: Iterable[Mapping[str, Any]]) -> None:
        """What no rank spoke of, although its case ended well, is told as not run."""
        names = {c.case for c in self.checks if (c.check, c.status) == (LAYOUT, "skipped")}
        cases = list(cases)
        skipped = {case["layout"] for case in cases if case["name"] in names}
        for case in cases:
            if case["layout"] not in skipped or case["kind"] == "errors":
                self._missing(case, "the case ended without a word on it")
        if skipped == {case["layout"] for case in cases}:
            why = "upstream's own class loads none of these layouts"
            self.checks.append(Check(LAYOUT, "every layout", "not run", "", detail=why))

    def _missing(self, case: Mapping[str, Any], why: str) -> None:
        told = {check.check for check in self.checks if check.case == case["name"]}
        for check in CHECKS[case["kind"]]:
            if check not in told:
                self.checks.append(Check(check, case["name"], "not run", "", detail=why))

    def report(self, seconds: float) -> Report:
        parts = tuple(self.checks), tuple(self.slots), tuple(self.loads)
        return Report(self.vllm, self.torch, *parts, seconds)
