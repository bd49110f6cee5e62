"""A subject, what was asked about it, and the answer."""

from __future__ import annotations

from typing import NamedTuple

from .request import Check, Report, Request
from .subjects import Subject


class Outcome(NamedTuple):
    """One class that was judged."""

    subject: Subject
    request: Request
    report: Report

    @property
    def what(self) -> str:
        """Which class this is, for a heading."""
        file = self.subject.file
        return f"{self.subject.architecture} ({file or 'upstream, as vLLM has it'})"

    @property
    def counts(self) -> dict[str, int]:
        """Status -> how many checks ended so; those that none did left out."""
        order = ("passed", "failed", "not run", "skipped")
        found = [c.status for c in self.report.checks]
        return {status: found.count(status) for status in order if status in found}

    @property
    def verdict(self) -> str:
        """One line: proven or not, and the counts."""
        counts = ", ".join(f"{n} {status}" for status, n in self.counts.items())
        word = "PASSED" if self.report.passed else "FAILED"
        if not self.report.passed and "failed" not in self.counts:
            word = "NOT PROVEN"
        return f"{word}: {counts}"

    def by_case(self) -> dict[str, list[Check]]:
        """Case -> its checks by their number; those of the same number as they ran."""
        out: dict[str, list[Check]] = {}
        for check in self.report.checks:
            out.setdefault(check.case, []).append(check)
        return {case: sorted(checks, key=lambda check: check.check) for case, checks in out.items()}
