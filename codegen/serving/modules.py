"""Generated files as modules, of which only checked bytes are run."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterable, Sequence
from importlib.abc import InspectLoader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

from .folder import PACKAGE, Served


class _Loader(InspectLoader):
    """Runs the bytes that were checked, whatever has become of the file since."""

    def __init__(self, file: Served | None) -> None:
        self.file = file

    def exec_module(self, module: ModuleType) -> None:
        if self.file is not None:
            code = compile(self.file.source, str(self.file.path), "exec", dont_inherit=True)
            exec(code, module.__dict__)

    def get_source(self, fullname: str) -> str:
        return self.file.source.decode() if self.file else ""

    def is_package(self, fullname: str) -> bool:
        return fullname == PACKAGE


class _Finder(MetaPathFinder):
    """Finds our package and the modules that the manifest lists, and no others."""

    def __init__(self) -> None:
        self.files: dict[str, Served] = {}

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if fullname == PACKAGE:
            return ModuleSpec(fullname, _Loader(None), is_package=True)
        if fullname not in self.files:
            return None
        file = self.files[fullname]
        spec = ModuleSpec(fullname, _Loader(file), origin=str(file.path))
        spec.has_location = True
        return spec


_finder = _Finder()


def importable(files: Iterable[Served]) -> None:
    """Let this process import the files; those in the place of upstream's from now on."""
    _finder.files = {file.module: file for file in files}
    if _finder not in sys.meta_path:
        sys.meta_path.insert(0, _finder)
    for file in _finder.files.values():
        there = sys.modules.get(file.module)
        if there is not None and getattr(there, "__file__", None) != str(file.path):
            # upstream's was imported before; its functions find the new classes in the same module
            importlib.reload(there)
