"""What a command ends with, and the two ways in which it can decline to work."""

from __future__ import annotations

from enum import IntEnum


class Exit(IntEnum):
    """Exit codes, the same for every command. The worst of all targets wins."""

    OK = 0
    """All well: written, unchanged, or nothing to do."""
    DIFFERENCE = 1
    """There is a difference, or a check failed."""
    USAGE = 2
    """Usage or environment: a bad option, no network, no permission."""
    REFUSED = 3
    """A target was not recognised."""


class Fault(Exception):
    """Ends a target with one message for the user: what is wrong, where, and what to do."""

    exit = Exit.USAGE

    def __init__(self, message: str, advice: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.advice = advice

    def __str__(self) -> str:
        return f"{self.message}\n  {self.advice}" if self.advice else self.message


class EnvironmentFault(Fault):
    """The machine, the network or the command line stands in the way (exit 2)."""


class Refusal(Fault):
    """The source was read, and a part that the patch needs was not found in it (exit 3)."""

    exit = Exit.REFUSED

    def __init__(self, message: str, where: str = "", advice: str = "") -> None:
        super().__init__(f"{where}: {message}" if where else message, advice)
        self.where = where
