"""What a rank tells the parent: lines of JSON in a file of its own."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class Reporter:
    def __init__(self, path: Path) -> None:
        self.file = path.open("a", encoding="utf-8")
        self.case = ""

    def send(self, event: str, **what: Any) -> None:
        self.file.write(json.dumps({"event": event, "case": self.case, **what}) + "\n")
        self.file.flush()

    def check(self, check: str, status: str, what: str, figure: str = "", detail: str = "") -> None:
        """One line of the report; status is "passed", "failed", "not run" or "skipped"."""
        self.send("check", check=check, status=status, what=what, figure=figure, detail=detail)
