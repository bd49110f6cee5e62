"""What was found, one thing at a time."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple


class Level(Enum):
    """How bad it is."""

    OK = "ok"
    WARNING = "warning"
    """It may go wrong, or could not be found out."""
    PROBLEM = "problem"
    """It would go wrong."""


class Finding(NamedTuple):
    """One line of the answer: what it is about, what was found, and what to do."""

    level: Level
    about: str
    message: str
    advice: str = ""


def ok(about: str, message: str) -> Finding:
    """All well."""
    return Finding(Level.OK, about, message)


def warning(about: str, message: str, advice: str = "") -> Finding:
    """It may go wrong, or could not be found out."""
    return Finding(Level.WARNING, about, message, advice)


def problem(about: str, message: str, advice: str = "") -> Finding:
    """It would go wrong."""
    return Finding(Level.PROBLEM, about, message, advice)
