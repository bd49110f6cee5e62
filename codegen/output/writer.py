"""Writes a set of files into a folder, whole or not at all."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from ..errors import EnvironmentFault, Exit, Fault
from .manifest import NAME, FamilyEntry, Manifest, load


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
    name = f"eplb-codegen-{user}-{digest(os.fsencode(out.resolve()))[:16]}.lock"
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


def write_family(
    folder: Path, vllm: str, name: str, entry: FamilyEntry, files: dict[str, str], force: bool
) -> bool:
    """Write a family's files and its part of the manifest to OUT/<vllm>; whether that changed it.

    Raises:
        EditedByHand, EnvironmentFault: as `write_set`, `locked` and `manifest.load` do.
    """
    if _is_current(folder, files, load(folder, vllm).with_family(name, entry)):
        return False
    with locked(folder.parent):
        before = load(folder, vllm)
        return write_set(folder, files, before, before.with_family(name, entry), force)


def retire_family(folder: Path, vllm: str, name: str) -> None:
    """Take a family out of OUT/<vllm>: its part of the manifest, then its files.

    What is left is a manifest, maybe of no family: for this vLLM nothing is needed.

    Raises:
        EditedByHand, EnvironmentFault: as `write_family`.
    """
    with locked(folder.parent):
        before = load(folder, vllm)
        entry = before.families.get(name)
        names = list(entry.files) if entry else []
        try:
            for file in names:
                data = _read(folder / file)
                if data is not None and digest(data) != before.recorded(file):
                    raise EditedByHand(f"{folder / file} was edited by hand", "Move it away.")
            # nothing is served from a file that the manifest does not list
            write_set(folder, {}, before, before.without_family(name), force=False)
            for file in names:
                (folder / file).unlink(missing_ok=True)
        except OSError as error:
            raise _unwritable(folder, error) from None


def _is_current(folder: Path, files: dict[str, str], after: Manifest) -> bool:
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
        if changed:
            _make(folder)
        clear(folder, wanted)
        _replace(folder, changed, present, mode=0o644)
    except OSError as error:
        raise _unwritable(folder, error) from None
    return bool(changed)


def _make(folder: Path) -> None:
    """Make a folder that only its owner can write to, whatever the umask says: code is served."""
    for path in (*reversed(folder.parents), folder):
        path.mkdir(mode=0o755, exist_ok=True)


def replace_files(folder: Path, contents: dict[str, bytes]) -> None:
    """Replace files of a folder, all or none of them. They keep their permissions.

    Raises:
        OSError: one could not be written; all are as before.
    """
    clear(folder, contents)
    _replace(folder, contents, {name: _read(folder / name) for name in contents}, mode=None)


def clear(folder: Path, names: Iterable[str]) -> None:
    """Remove what a run left that was killed: we hold the lock."""
    for name in names:
        for left in folder.glob(f".{name}.*.tmp"):
            left.unlink()


def _replace(
    folder: Path, contents: dict[str, bytes], present: dict[str, bytes | None], mode: int | None
) -> None:
    if contents:
        with _staged(folder, contents, mode) as staged:
            _move(folder, staged, present)


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
def _staged(
    folder: Path, contents: dict[str, bytes], mode: int | None
) -> Iterator[dict[str, Path]]:
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
            Path(path).chmod(_mode(folder / name) if mode is None else mode)
        yield staged
    finally:
        for temporary in staged.values():
            temporary.unlink(missing_ok=True)


def _mode(path: Path) -> int:
    try:
        return path.stat().st_mode
    except FileNotFoundError:
        return 0o644


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
