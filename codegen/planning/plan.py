"""What a plan is made of."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable
from enum import Enum
from typing import NamedTuple

from ..analysis.modules import ClassRef, Module
from ..analysis.soundness import Fault
from ..analysis.weights import Method
from ..errors import Refusal
from ..families import Family
from ..rewrite.edits import AddImport, Edit, Insert


class State(Enum):
    """What a family is in a given tree."""

    ADDED = "added by us"
    REPAIRED = "native but faulty"
    NATIVE = "native and sound"
    ABSENT = "file absent"
    REFUSES = "refuses EPLB"
    """Of a quantisation method that vLLM has no EPLB for, and that cannot be patched."""
    UNRECOGNISED = "not recognised"
    UNREADABLE = "not readable"


class FilePlan(NamedTuple):
    """The edits of one file, and the classes that vLLM serves from it."""

    module: Module
    edits: tuple[Edit, ...]
    architectures: tuple[tuple[str, str], ...]


class Plan(NamedTuple):
    """What is to be done for a family. No files unless the state is ADDED or REPAIRED."""

    family: Family
    state: State
    reason: str
    files: tuple[FilePlan, ...] = ()
    faults: tuple[Fault, ...] = ()
    """What is wrong with vLLM's own support."""


class Draft:
    """Edits on their way to a plan, each once, kept by file."""

    def __init__(self, paths: Iterable[str]) -> None:
        self._paths = frozenset(paths)
        self.edits: dict[str, dict[Edit, None]] = {}

    def can_edit(self, ref: ClassRef) -> bool:
        """Whether a class stands in a file of the family."""
        return ref.path in self._paths

    def editable(self, method: Method, node: ast.AST) -> Module:
        """The module of a method that is to be changed.

        Raises:
            Refusal: it is none of the family's.
        """
        if not self.can_edit(method.owner):
            raise Refusal(
                f"{method.owner.name}.{method.function.name} loads experts "
                "in a file that the family does not list",
                method.where(node),
            )
        return method.owner.module

    def add(self, module: Module, *edits: Edit) -> None:
        """Plan edits of a file of the family.

        Raises:
            Refusal: a name that an edit brings into the module stands for something else there.
        """
        assert module.path in self._paths, module.path
        for edit in edits:
            if isinstance(edit, AddImport):
                wanted = edit.module.removeprefix(".")
                there = module.imports.get(edit.name, (wanted, edit.name))
                if module.definition(edit.name) or not f".{there[0]}".endswith(f".{wanted}"):
                    raise Refusal(f"{edit.name} is something else in this file", module.path)
            elif isinstance(edit, Insert) and edit.path == module.first_definition:
                for name in re.findall(r"^def (\w+)", edit.code, re.M):
                    if module.definition(name) or name in module.imports:
                        raise Refusal(f"{name} is something else in this file", module.path)
        self.edits.setdefault(module.path, {}).update(dict.fromkeys(edits))
