"""Upstream's files as they were when something was generated from them."""

from __future__ import annotations

from collections.abc import Callable

from packaging.version import Version

from ..errors import EnvironmentFault
from ..output.manifest import FileEntry
from ..output.writer import digest
from ..source import SourceTree, find_source


class OldTexts:
    """The texts that manifests tell the hashes of, from releases in the cache or on the index."""

    def __init__(self, progress: Callable[[str], None]) -> None:
        self._progress = progress
        self._trees: dict[str, SourceTree | None] = {}

    def __call__(self, vllm: str, entry: FileEntry) -> str | None:
        """Upstream's text of a generated file; None if no release has it."""
        if vllm not in self._trees:
            self._trees[vllm] = self._release(vllm)
        tree = self._trees[vllm]
        try:
            text = tree.read(entry.upstream) if tree else None
        except EnvironmentFault:
            return None
        return text if text is not None and digest(text) == entry.upstream_sha256 else None

    def _release(self, vllm: str) -> SourceTree | None:
        version = Version(vllm)
        if version.local or version.is_devrelease:  # of a checkout or a build of one's own
            return None
        try:
            return find_source(version=vllm, progress=self._progress)
        except EnvironmentFault:
            return None
