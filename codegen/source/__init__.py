"""Finds the vLLM source to work on; none of it is imported or run.

Only what a found source needs is imported: nothing here reaches for the network libraries unless
a release has to be downloaded.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..errors import EnvironmentFault
from .cache import cached_release, cached_versions, store
from .local import installed_tree, tree_at
from .tree import Overlay, SourceTree

__all__ = ["Overlay", "SourceTree", "cached_versions", "find_source"]

LATEST = "latest"


def _silent(_: str) -> None:
    pass


def find_source(
    *,
    source: Path | None = None,
    version: str | None = None,
    progress: Callable[[str], None] = _silent,
) -> SourceTree:
    """The vLLM source, from the first of these that applies.

    1. The folder `source`: a checkout, an unpacked source archive or a site-packages folder.
    2. The release `version` ("latest": the newest that is neither yanked nor a pre-release),
       from the cache or else from the package index that pip is configured for.
    3. The distribution that is installed in this interpreter and provides the module `vllm`.
    4. The newest release, as for "latest".

    `progress` receives a line for people when something is downloaded. Raises EnvironmentFault,
    and nothing else, if the source cannot be had.
    """
    if source is not None and version is not None:
        raise EnvironmentFault(
            "A source folder and a version were both given", "Give only one of them."
        )
    if source is not None:
        return tree_at(source)
    if version is None and (tree := installed_tree()):
        return tree
    if version in (None, LATEST):
        return _release(None, progress)
    try:
        return _release(Version(str(version)), progress)
    except InvalidVersion as error:
        raise EnvironmentFault(
            f"{version!r} is not a version", f'Give one such as 0.10.0, or "{LATEST}".'
        ) from error


def _release(version: Version | None, progress: Callable[[str], None]) -> SourceTree:
    root = cached_release(version) if version else None
    if root is None:
        from .index import Index

        with closing(Index(progress)) as index:
            files = index.choose(version)
            version = Version(str(files[0].version))
            root = store(str(version), lambda folder: index.fetch(files, folder))
    return SourceTree(root, root.name, f"vLLM {root.name} from the package index")
