"""The per-user cache: one folder per release, which needs no network once it is complete."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..errors import EnvironmentFault
from ..paths import expanded

VARIABLE = "EPLB_CODEGEN_CACHE"
"""The environment variable that names another folder for the cache."""
MARKER = "complete"
"""Written last into an entry: the number and the total size (bytes) of its other files."""
LOCK_SECONDS = 900


def cache_folder() -> Path:
    """Where releases are kept: $EPLB_CODEGEN_CACHE, or the user's cache folder."""
    if folder := os.environ.get(VARIABLE):
        return expanded(folder).absolute()
    from platformdirs import user_cache_dir

    return Path(user_cache_dir("eplb-codegen", appauthor=False))


def cached_versions() -> list[str]:
    """The releases that can be used without a network, oldest first."""
    return [str(version) for version, _ in _entries()]


def cached_release(version: Version) -> Path | None:
    """The folder of a complete release in the cache, or None."""
    return next((entry for cached, entry in _entries(version) if cached == version), None)


def store(version: str, fill: Callable[[Path], None]) -> Path:
    """The cache entry of `version`, made by `fill(folder)` unless another process was faster.

    `fill` writes into a folder beside the entry that takes its place only when it is complete.
    Raises EnvironmentFault if the cache cannot be written, or another process holds it for more
    than 15 minutes (LOCK_SECONDS); what `fill` raises passes through, and leaves no entry.
    """
    from filelock import FileLock, Timeout

    folder = cache_folder()
    entry = folder / version
    prefix = f".partial-{version}-"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / f".{version}.lock", timeout=LOCK_SECONDS):
            if _is_complete(entry):
                return entry
            # We hold the lock, so whatever else is here was left by a process that was killed.
            for leftover in [entry, *folder.glob(f"{prefix}*")]:
                if leftover.exists():
                    shutil.rmtree(leftover)
            with tempfile.TemporaryDirectory(prefix=prefix, dir=folder) as temporary:
                made = Path(temporary, version)
                made.mkdir()
                fill(made)
                (made / MARKER).write_text(json.dumps(_inventory(made)))
                os.replace(made, entry)  # noqa: PTH105 - atomic: all of the entry, or none of it
        return entry
    except Timeout as error:
        raise EnvironmentFault(
            f"Another process has been working on {entry} for {LOCK_SECONDS // 60} minutes",
            "Wait for it, or end it, and try again.",
        ) from error
    except (OSError, NotImplementedError) as error:  # the latter: no locks on that file system
        raise EnvironmentFault(
            f"The cache {folder} cannot be written: {error}",
            f"Free it, or set {VARIABLE} to a folder on a local disk that can be written.",
        ) from error


def _entries(wanted: Version | None = None) -> list[tuple[Version, Path]]:
    entries = []
    try:
        folders = list(cache_folder().iterdir())
    except OSError:  # none yet
        return []
    for folder in folders:
        try:
            version = Version(folder.name)
        except InvalidVersion:
            continue
        if wanted in (None, version) and _is_complete(folder):
            entries.append((version, folder))
    return sorted(entries)


def _is_complete(entry: Path) -> bool:
    try:
        return bool(json.loads((entry / MARKER).read_bytes()) == _inventory(entry))
    except (OSError, ValueError):
        return False


def _inventory(entry: Path) -> dict[str, int]:
    """Number and bytes of the files: finds those lost or cut, without reading all of them."""
    sizes = [
        os.stat(os.path.join(folder, name)).st_size  # noqa: PTH116, PTH118 - fast: 10 ms, not 40
        for folder, _, names in os.walk(entry)
        for name in names
        if name != MARKER and name.endswith((".py", "PKG-INFO"))
    ]
    return {"files": len(sizes), "bytes": sum(sizes)}
