"""Only what was proven passes: whatever is missing from a report makes it fail."""

from __future__ import annotations

from pathlib import Path

import pytest
from eplb_codegen.verify import Report, Request
from eplb_codegen.verify.run import CHECKS, _cases, _Gathered

REQUEST = Request(
    Path("python"), "qwen2_moe", Path("qwen2_moe.py"), layouts=("per-expert", "fused")
)


def report(leave_out: str = "", skip: tuple[str, ...] = (), status: str = "passed") -> Report:
    """The report of a run in which all checks passed, but for what is asked otherwise."""
    gathered = _Gathered(lambda _: None)
    cases = list(_cases(REQUEST))
    for case in cases:
        skipped = case["layout"] in skip and case["kind"] != "errors"
        if skipped and case["kind"] != "reference":
            continue
        for check in ["layout"] if skipped else CHECKS[case["kind"]]:
            if f"{case['name']}: {check}" == leave_out:
                continue
            told = {"check": check, "what": "", "figure": "", "detail": ""}
            told["status"] = "skipped" if skipped else status
            gathered.take({"event": "check", "case": case["name"], **told})
    gathered.complete(cases)
    return gathered.report(1.0)


def test_all_passed() -> None:
    assert report().passed


def test_one_layout_skipped() -> None:
    assert report(skip=("fused",)).passed


def test_every_layout_skipped() -> None:
    found = report(skip=("per-expert", "fused"))
    assert not found.passed
    assert [c.case for c in found.checks if c.status == "not run"] == ["every layout"]


@pytest.mark.parametrize("status", ["failed", "not run", "skipped"])
def test_nothing_passed(status: str) -> None:
    assert not report(status=status).passed


@pytest.mark.parametrize(
    "missing",
    [f"{case['name']}: {check}" for case in _cases(REQUEST) for check in CHECKS[case["kind"]]],
)
def test_a_check_that_no_rank_spoke_of(missing: str) -> None:
    found = report(leave_out=missing)
    assert not found.passed
    (check,) = [c for c in found.checks if c.status == "not run"]
    assert f"{check.case}: {check.check}" == missing
