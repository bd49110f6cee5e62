"""Writes a set of files into a folder, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from pathlib import Path

from ..errors import EnvironmentFault, Exit, Fault
from .manifest import NAME, Manifest


class EditedByHand(Fault):
    """A file is not as this tool left it (exit 1): somebody's work would be lost."""

    exit = Exit.DIFFERENCE


def digest(text: str | bytes) -> str:
    """SHA-256 in hex."""
    return hashlib.sha256(text.encode() if isinstance(text, str) else text).hexdigest()


@contextlib.contextmanager
def locked(out: Path) -> Iterator[None]:
    """Keep other runs from the folders below `out`: a manifest is read, and written with more.

    The lock lies in the folder for temporary files: people commit what is in `out`.

    Raises:
        EnvironmentFault: the lock cannot be had, or another run holds it for a minute.
    """
    import tempfile

    from filelock import FileLock, Timeout

    user = os.getuid() if hasattr(os, "getuid") else ""
    name = f"eplb-codegen-{user}-{digest(str(out.resolve()))[:16]}.lock"
    try:
        with FileLock(Path(tempfile.gettempdir()) / name, timeout=60):
            yield
    except Timeout:
        raise EnvironmentFault(
            f"another run has been writing to {out} for a minute", "Wait for it, or end it."
        ) from None
    except OSError as error:
        raise _unwritable(out, error) from None


def _unwritable(folder: Path, error: OSError) -> EnvironmentFault:
    return EnvironmentFault(
        f"cannot write to {folder}: {error.strerror or error}",
        "Choose another folder with --out.",
    )


def is_current(folder: Path, files: dict[str, str], after: Manifest) -> bool:
    """Whether a folder holds these files and this manifest already; then no lock is needed."""
    wanted = {**files, NAME: after.dump()}
    try:
        return all(_read(folder / name) == text.encode() for name, text in wanted.items())
    except OSError:
        return False  # writing will tell


def write_set(
    folder: Path, files: dict[str, str], before: Manifest, after: Manifest, force: bool
) -> bool:
    """Write files and the manifest `after`; whether anything changed.

    Every file is written beside its place and moved there, the manifest last. A move that fails
    puts back what was moved before it. A process killed between two moves leaves files that the
    manifest does not vouch for; as they are what would be written, the next run completes the set.

    Args:
        folder: where the files go; made if need be.
        files: name -> content.
        before: the manifest that the folder has.
        force: overwrite files that were edited by hand.

    Raises:
        EditedByHand: a file differs from what the manifest says, and from what would be written.
        EnvironmentFault: the folder cannot be written to.
    """
    wanted = {**files, NAME: after.dump()}
    try:
        present = {name: _read(folder / name) for name in wanted}
        if not force:
            _refuse_edited(folder, files, present, before)
        changed = {n: c.encode() for n, c in wanted.items() if present[n] != c.encode()}
        for name in wanted:
            # of a run that was killed: we hold the lock
            for left in folder.glob(f".{name}.*.tmp"):
                left.unlink()
        if changed:
            folder.mkdir(parents=True, exist_ok=True)
            with _staged(folder, changed) as staged:
                _move(folder, staged, present)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return bool(changed)


def _read(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        return None


def _refuse_edited(
    folder: Path, files: dict[str, str], present: dict[str, bytes | None], before: Manifest
) -> None:
    for name, content in files.items():
        found = present[name]
        if found is None or found == content.encode() or digest(found) == before.recorded(name):
            continue
        what = "was edited by hand" if before.recorded(name) else "was not written by this tool"
        raise EditedByHand(
            f"{folder / name} {what}",
            "Move it away, or overwrite it with --force.",
        )


@contextlib.contextmanager
def _staged(folder: Path, contents: dict[str, bytes]) -> Iterator[dict[str, Path]]:
    import tempfile  # most runs change nothing

    staged: dict[str, Path] = {}
    try:
        for name, content in contents.items():
            handle, path = tempfile.mkstemp(prefix=f".{name}.", suffix=".tmp", dir=folder)
            staged[name] = Path(path)
            with os.fdopen(handle, "wb") as stream:
                stream.write(content)
                stream.flush()
                os.fsync(stream.fileno())
            # mkstemp makes files that only the owner can read; servers run as others
            Path(path).chmod(0o644)
        yield staged
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _move(folder: Path, staged: dict[str, Path], present: dict[str, bytes | None]) -> None:
    moved: list[str] = []
    try:
        # the manifest is last in the set: it vouches for files that are in their place
        for name, temporary in staged.items():
            temporary.replace(folder / name)
            moved.append(name)
    except BaseException:  # an interrupt as well
        for name in moved:
            old = present[name]
            if old is None:
                (folder / name).unlink(missing_ok=True)
            else:
                (folder / name).write_bytes(old)
        raise
