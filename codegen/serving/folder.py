"""What would be served from a folder, or the reason why nothing is. Needs no vLLM."""

from __future__ import annotations

import os
import re
import shlex
import stat
from pathlib import Path
from typing import NamedTuple

from packaging.version import Version

from ..errors import EnvironmentFault
from ..output import manifest
from ..output.writer import digest
from ..plugin import FOLDER
from ..source import SourceTree

PACKAGE = "eplb_codegen_generated"
"""Not below `vllm.model_executor.models`: what vLLM remembers of a model there it finds by the
upstream file of that name (`_LazyRegisteredModel.inspect_model_cls`, from 0.11.0)."""
_MODEL_FILES = "vllm/model_executor/models"
_OTHER_FILES = "vllm/model_executor/layers/quantization/"


class NotServed(EnvironmentFault):
    """Something is not as the manifest says; nothing is served then."""


class Served(NamedTuple):
    """One generated file that was checked: these very bytes are executed."""

    module: str
    """Where it is imported: a model in our own package, another file in the place of upstream's."""
    path: Path
    source: bytes
    architectures: dict[str, str]
    """Architecture -> class; none for a quantisation method."""

    @property
    def replaces(self) -> str | None:
        """The path of upstream's file in whose place it is imported; None for a model."""
        if self.module.startswith(f"{PACKAGE}."):
            return None
        return f"{self.module.replace('.', '/')}.py"


def served(folder: Path, tree: SourceTree) -> list[Served]:
    """The files of `folder`/<version> for the vLLM in `tree`, each of them checked.

    Args:
        folder: what EPLB_CODEGEN_DIR names, absolute.
        tree: the vLLM that would serve them.

    Raises:
        NotServed: there is no such folder, or none for this release; others may write to it; an
            upstream file is not the one that the patch was made from; a generated file is not the
            one that was written.
        EnvironmentFault: the manifest cannot be read, or is for another release.
    """
    if not folder.is_dir():
        raise NotServed(
            f"{FOLDER}={folder}: there is no such folder",
            f"{_apply('FAMILY', folder)} Or unset {FOLDER}.",
        )
    _check_private(folder)
    release = _release_folder(folder, tree)
    _check_private(release)
    _check_private(release / manifest.NAME)
    # a build's own version (0.32.0+cu129) may be served from the folder of its release
    content = manifest.load(release, release.name)
    if not content.families:
        raise NotServed(
            f"{release / manifest.NAME} lists no family: nothing of this vLLM needs a patch",
            f"Unset {FOLDER}.",
        )
    for family, entry in content.families.items():
        _check_upstream(tree, family, entry, folder)
    return [
        _read(release, name, family, entry.files[name], folder)
        for family, entry in content.families.items()
        for name in entry.files
    ]


def _release_folder(folder: Path, tree: SourceTree) -> Path:
    versions = dict.fromkeys((tree.version, Version(tree.version).public))
    for version in versions:
        if (folder / version / manifest.NAME).is_file():
            return folder / version
    others = sorted(p.parent.name for p in folder.glob(f"*/{manifest.NAME}"))
    there = f"; what is there is for {', '.join(others)}" if others else ""
    raise NotServed(
        f"{folder} holds no files for vLLM {tree.version}{there}",
        f"{_apply('FAMILY', folder)} `eplb-codegen check` tells what changed.",
    )


def _check_upstream(
    tree: SourceTree, family: str, entry: manifest.FamilyEntry, folder: Path
) -> None:
    wanted = {file.upstream: file.upstream_sha256 for file in entry.files.values()}
    for path, sha256 in {**entry.depends, **wanted}.items():
        if digest(tree.read(path)) != sha256:
            raise NotServed(
                f"{tree.root / path} is not the file that {family} was made from",
                f"vLLM was changed since. {_apply(family, folder)}",
            )


def _read(release: Path, name: str, family: str, entry: manifest.FileEntry, folder: Path) -> Served:
    if not re.fullmatch(r"[A-Za-z_]\w*\.py", name):
        raise NotServed(f"{release / manifest.NAME} lists {name!r}, which is no module of its own")
    path = release / name
    _check_private(path)
    try:
        source = path.read_bytes()
    except OSError as error:
        raise NotServed(
            f"{path} cannot be read: {error.strerror or error}", _apply(family, folder)
        ) from None
    if digest(source) != entry.sha256:
        raise NotServed(
            f"{path} is not the file that was written: somebody changed it",
            _apply(f"{family} --force", folder),
        )
    return Served(_module(entry.upstream, name, release), path, source, entry.architectures)


def _module(upstream: str, name: str, release: Path) -> str:
    folder, _, file = upstream.rpartition("/")
    stem = name.removesuffix(".py")
    if file == name and folder == _MODEL_FILES:
        return f"{PACKAGE}.{stem}"
    if file == name and upstream.startswith(_OTHER_FILES):
        return upstream.removesuffix(".py").replace("/", ".")
    raise NotServed(f"{release / manifest.NAME}: {name} cannot stand for {upstream!r}")


def _check_private(path: Path) -> None:
    """Refuse what somebody else could change while a server starts: it is code that would run."""
    if os.name != "posix":
        return
    try:
        found = path.stat()
        if os.statvfs(path).f_flag & os.ST_RDONLY:
            return  # as a container's configuration is mounted, whatever its mode says
    except OSError:
        return  # whoever reads it tells
    if found.st_uid not in (0, os.geteuid()):
        raise NotServed(
            f"{path} belongs to another user (uid {found.st_uid}), who may change what is served",
            f"Copy it to a folder of your own, or `chown -R {os.geteuid()} {_quoted(path)}`.",
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise NotServed(
            f"{path} can be written by others, who may change what is served",
            f"Close it: `chmod -R go-w {_quoted(path)}`",
        )


def _apply(family: str, folder: Path) -> str:
    return f"Run `eplb-codegen apply {family} --out {_quoted(folder)}`."


def _quoted(path: Path) -> str:
    return shlex.quote(str(path))
