"""Undefined, unused and redefined names."""

from __future__ import annotations

import json

from ..rewrite.style import ruff


def new_name_faults(upstream: str, patched: str) -> list[str]:
    """What ruff's F rules (pyflakes) find in the patched file and not in upstream's."""
    found = _faults(patched)
    if not found:
        return []
    known = [message for _, message in _faults(upstream)]
    return [f"line {line}: {message}" for line, message in found if message not in known]


def _faults(source: str) -> list[tuple[int, str]]:
    _, output = ruff(["check", "--select", "F", "--output-format", "json", "--exit-zero"], source)
    return [(f["location"]["row"], f"{f['code']} {f['message']}") for f in json.loads(output)]
