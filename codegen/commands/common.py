"""What the commands share: the source, the targets, and how to speak."""

from __future__ import annotations

import argparse
import json
import os
import sys

from ..errors import Exit
from ..families import Family, family, known_families
from ..generate import Result
from ..planning.plan import State
from ..source import SourceTree, find_source
from ..speech import say


def source_tree(options: argparse.Namespace) -> SourceTree:
    """The vLLM to work on; says so on standard error while it downloads."""
    return find_source(source=options.source, version=options.vllm, progress=progress)


def targets(names: list[str]) -> list[Family]:
    """The families named, each once; every known one if none is."""
    if not names:
        return known_families()
    found = {f.name: f for f in map(family, names)}
    return list(found.values())


def print_json(document: object) -> None:
    """One JSON document on standard output."""
    say(json.dumps(document, indent=2))


def describe(result: Result) -> dict[str, object]:
    """A result for programs."""
    return {
        "family": result.family.name,
        "state": result.state.value,
        "reason": result.reason,
        "files": [f.name for f in result.files],
        "faults": [
            {"name": f.kind.slug, "what": f.kind.what, "where": f.where, "effect": f.kind.effect}
            for f in result.faults
        ],
    }


def exit_of(result: Result) -> Exit:
    """What a state means for the exit code."""
    return {State.UNRECOGNISED: Exit.REFUSED, State.UNREADABLE: Exit.USAGE}.get(
        result.state, Exit.OK
    )


def coloured() -> bool:
    """Whether standard output is a terminal that shows colours."""
    terminal = sys.stdout is not None and sys.stdout.isatty()
    return terminal and "NO_COLOR" not in os.environ and os.environ.get("TERM") != "dumb"


def progress(line: str) -> None:
    """A line for people on standard error, while something takes its time."""
    print(line, file=sys.stderr, flush=True)
