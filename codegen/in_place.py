"""Patches the model files of a checkout themselves, and undoes that to the byte.

What the files were like is kept in the user's state folder, one file for each checkout, so that
`git status` shows the patch and nothing else.
"""

from __future__ import annotations

import json
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from .analysis.syntax import source_lines
from .errors import EnvironmentFault
from .families import Family
from .generate import Generator, Result
from .output.writer import EditedByHand, clear, digest, replace_files
from .source import Overlay, SourceTree

FORMAT = 1


class Kept(NamedTuple):
    """A file before it was patched, and after; of a patch that was made anew the last two."""

    family: str
    version: str
    """That of the checkout when it was patched."""
    original: str
    patched: tuple[str, ...]


class _Is(Enum):
    """What a file is that has been patched once."""

    ORIGINAL = "as it was"
    PATCHED = "as the patch left it"
    OTHER = "something else, without any of the patch"
    EDITED = "edited since it was patched"


class Record:
    """What was patched in one checkout."""

    def __init__(self, tree: SourceTree) -> None:
        """Reads the record, empty if nothing was patched; the checkout has to be locked.

        Raises:
            EnvironmentFault: it cannot be read.
        """
        from platformdirs import user_state_dir

        self._root = str(tree.root.resolve())
        folder = Path(user_state_dir("eplb-codegen", appauthor=False), "in-place")
        self._path = folder / f"{digest(self._root)[:32]}.json"
        self.files: dict[str, Kept] = {}
        try:
            document: dict[str, Any] = json.loads(self._path.read_text(encoding="utf-8"))
            if document["format"] != FORMAT:
                raise ValueError(f"it has format {document['format']}, not {FORMAT}")
            for path, (family, version, original, patched) in document["files"].items():
                self.files[path] = Kept(family, version, original, tuple(patched))
            if not all(isinstance(text, str) for k in self.files.values() for text in k[:3]):
                raise ValueError("it holds something else than texts")
        except FileNotFoundError:
            pass
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise EnvironmentFault(
                f"what was patched in {self._root} cannot be read from {self._path}: {error}",
                "Restore the files with `git checkout`, and delete that file.",
            ) from None

        for path in map(tree.root.joinpath, self.files):
            clear(path.parent, [path.name])

    @property
    def families(self) -> list[str]:
        """The families of which something was patched."""
        return list(dict.fromkeys(kept.family for kept in self.files.values()))

    def replace(self, files: dict[str, Kept]) -> None:
        """Put another content on the disk, whole or not at all.

        Raises:
            EnvironmentFault: it cannot be written.
        """
        document = {"format": FORMAT, "root": self._root, "files": files}
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            if files:
                replace_files(self._path.parent, {self._path.name: json.dumps(document).encode()})
            else:
                self._path.unlink(missing_ok=True)
        except OSError as error:
            raise EnvironmentFault(f"{self._path} cannot be written: {error.strerror}") from None
        self.files = files


def patch(tree: SourceTree, record: Record, family: Family, force: bool) -> tuple[Result, bool]:
    """Patch the files of a family; what it came to, and whether a file changed.

    A file that was patched before is patched anew from what it was.

    Args:
        force: give up what was edited since.

    Raises:
        EditedByHand: a file was edited since it was patched.
        EnvironmentFault: a file or the record cannot be written.
    """
    texts: dict[str, str] = {}
    # of all families, so that a patch is the same whatever else is patched
    for path, kept in record.files.items():
        if tree.exists(path):
            state = _state(kept, tree.read(path), tree.version)
            if kept.family == family.name and state is _Is.EDITED and not force:
                raise EditedByHand(
                    f"{tree.root / path} was edited since it was patched",
                    "--force gives up the edit.",
                )
            if state in (_Is.PATCHED, _Is.EDITED):
                texts[path] = kept.original
    result = Generator(Overlay.of(tree, texts)).generate(family)
    wanted = {f.upstream: f for f in result.files if f.patched != f.original}
    present = {path: tree.read(path) for path in wanted}
    changed = {p: f.patched for p, f in wanted.items() if present[p] != f.patched}
    if changed:
        before = dict(record.files)
        kept_now = {
            p: Kept(
                family.name,
                tree.version,
                f.original,
                (*(before[p].patched[-1:] if p in before else ()), f.patched),
            )
            for p, f in wanted.items()
        }
        # first, so that a run that is killed can be undone
        record.replace({**before, **kept_now})
        try:
            _write(tree, changed)
        except BaseException:
            record.replace(before)
            raise
    return result, bool(changed)


def revert(tree: SourceTree, record: Record, name: str, force: bool) -> list[str]:
    """Put back the files of a family as they were; the paths of those that changed.

    Args:
        force: give up what was edited since.

    Raises:
        EditedByHand: a file was edited since it was patched, or deleted.
        EnvironmentFault: a file or the record cannot be written.
    """
    before: dict[str, str] = {}
    for path, kept in record.files.items():
        if kept.family != name:
            continue
        there = tree.exists(path)
        state = _state(kept, tree.read(path), tree.version) if there else _Is.EDITED
        if state is _Is.EDITED and not force:
            raise EditedByHand(
                f"{tree.root / path} was {'edited since it was patched' if there else 'deleted'}",
                "--force puts back what it was before the patch.",
            )
        if state in (_Is.PATCHED, _Is.EDITED):
            before[path] = kept.original
    _write(tree, before)
    record.replace({p: kept for p, kept in record.files.items() if kept.family != name})
    return list(before)


def _state(kept: Kept, found: str, version: str) -> _Is:
    """What a file of a checkout, which is of this version now, is beside what was patched.

    Upstream's support of a later version has many lines of a patch, but not nearly all.
    """
    plain = _lines(found)
    if plain == _lines(kept.original):
        return _Is.ORIGINAL
    if plain in map(_lines, kept.patched):
        return _Is.PATCHED
    added = set(_lines(kept.patched[-1])) - set(_lines(kept.original))
    most = 0.0 if version == kept.version else 0.9
    return _Is.EDITED if len(added & set(plain)) > most * len(added) else _Is.OTHER


def _lines(text: str) -> list[str]:
    """Without their ends, which git or an editor may have changed."""
    return [line.rstrip("\r\n") for line in source_lines(text)]


def _write(tree: SourceTree, texts: dict[str, str]) -> None:
    """The files of a target, which all stand in one folder."""
    contents = {tree.root / path: text.encode() for path, text in texts.items()}
    for path in contents:
        if path.is_symlink():
            raise EnvironmentFault(f"{path} is a link", "Patch the checkout that holds the file.")
    for folder in {path.parent for path in contents}:
        try:
            replace_files(folder, {p.name: data for p, data in contents.items()})
        except OSError as error:
            raise EnvironmentFault(
                f"cannot write to {folder}: {error.strerror or error}",
                "Give a checkout of your own with --source.",
            ) from None
