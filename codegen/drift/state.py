"""The states that a generated target can be in, and what is reported of it."""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ..errors import Exit
from ..families import Family
from ..generate import Result
from .folders import Folder


class Drift(Enum):
    """What has become of a target, worst first. Several may hold; the first is its state."""

    EDITED = "edited by hand"
    UNRECOGNISED = "upstream changed, not recognised"
    UNREADABLE = "upstream not readable"
    SOUND = "upstream now sound, retire the patch"
    MISSING = "not all there"
    CHANGED = "upstream changed, still patches"
    DEPENDS = "a file the patch depends on changed"
    TOOL = "made by another version of this tool"
    IN_SYNC = "in sync"

    @property
    def exit(self) -> Exit:
        """3 needs a person, 1 can be made anew or retired, 2 is about the source, 0 is well."""
        needs_a_person = (Drift.EDITED, Drift.UNRECOGNISED)
        special = {Drift.UNREADABLE: Exit.USAGE, Drift.IN_SYNC: Exit.OK}
        return special.get(self, Exit.REFUSED if self in needs_a_person else Exit.DIFFERENCE)


class Finding(NamedTuple):
    """A state that holds, and what is to be said about it."""

    drift: Drift
    message: str


class FileReport(NamedTuple):
    """A file of the folder that a target is compared with.

    Attributes:
        path: the file.
        upstream: the file of vLLM it was made from.
        line: of `path`, from 1, where the difference begins.
        upstream_diff: from the vLLM it was made from to the one at hand; None where nothing
            changed, or the former is not at hand.
        result_diff: from the file to what would be written now; None where that is the same, or
            nothing would be written.
    """

    path: str
    upstream: str
    line: int
    upstream_diff: str | None
    result_diff: str | None


class Report(NamedTuple):
    """What has become of a target."""

    family: Family
    result: Result
    """What it is in the vLLM at hand."""
    folder: Folder | None
    """Where it was compared; None if no folder lists it."""
    findings: tuple[Finding, ...]
    files: tuple[FileReport, ...] = ()

    @property
    def state(self) -> Drift:
        return self.findings[0].drift
