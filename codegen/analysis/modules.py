"""The modules of a vLLM tree, parsed when asked for, and the names in them."""

from __future__ import annotations

import ast
import hashlib
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import Refusal
from ..source.tree import SourceTree
from .syntax import Function, StatementPath, dotted, functions, statements

MODELS = "vllm.model_executor.models"


@dataclass(frozen=True)
class Module:
    """One parsed file. `path` is POSIX, below the root of the tree."""

    name: str
    path: str
    source: str

    @cached_property
    def tree(self) -> ast.Module:
        try:
            return ast.parse(self.source)
        except (SyntaxError, ValueError, RecursionError, MemoryError) as error:
            line = getattr(error, "lineno", None) or 1
            raise Refusal(
                f"not valid Python: {getattr(error, 'msg', error)}",
                f"{self.path}:{line}",
                "Restore the file from its release.",
            ) from None

    @cached_property
    def sha256(self) -> str:
        return hashlib.sha256(self.source.encode()).hexdigest()

    @cached_property
    def paths(self) -> dict[ast.stmt, StatementPath]:
        """Where each statement stands, those of nested functions and classes included."""
        found: dict[ast.stmt, StatementPath] = {}

        def walk(owner: ast.AST, path: StatementPath) -> None:
            for statement, here in statements(owner, path):
                found[statement] = here
                if isinstance(statement, Function | ast.ClassDef):
                    walk(statement, here)

        walk(self.tree, ())
        return found

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    @cached_property
    def classes(self) -> dict[str, ast.ClassDef]:
        return {node.name: node for node in self.tree.body if isinstance(node, ast.ClassDef)}

    @cached_property
    def definitions(self) -> dict[str, ast.ClassDef | Function]:
        return {**functions(self.tree), **self.classes}

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name in it); the second is "" where the module itself is imported."""
        found: dict[str, tuple[str, str]] = {}
        for node, _ in statements(self.tree):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or target] = (target, "")
            elif isinstance(node, ast.ImportFrom):
                module = absolute(self, node)
                for alias in node.names:
                    found[alias.asname or alias.name] = (module, alias.name)
        return found

    def where(self, node: ast.AST) -> str:
        """`file:line`, for messages."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def text(self, node: ast.AST) -> str:
        """The source text of a node."""
        return ast.get_source_segment(self.source, node) or ast.unparse(node)


def absolute(module: Module, node: ast.ImportFrom) -> str:
    """The absolute name of the module that a `from` import names."""
    if not node.level:
        return node.module or ""
    parts = module.package.split(".")
    base = ".".join(parts[: len(parts) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


@dataclass(frozen=True)
class ClassRef:
    """A class and the module that defines it."""

    module: Module = field(repr=False, compare=False)
    node: ast.ClassDef = field(repr=False, compare=False)
    name: str
    path: str

    @classmethod
    def of(cls, module: Module, node: ast.ClassDef) -> ClassRef:
        return cls(module, node, node.name, module.path)

    @property
    def where(self) -> str:
        return self.module.where(self.node)

    @cached_property
    def methods(self) -> dict[str, Function]:
        return functions(self.node)


class Modules:
    """The modules of one tree. Remembers which files were read: a patch depends on them."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._by_name: dict[str, Module | None] = {}

    def get(self, name: str) -> Module | None:
        """The module of that name, None where the tree has none."""
        if name not in self._by_name:
            path = self.tree.module_path(name) if name.partition(".")[0] == "vllm" else None
            self._by_name[name] = Module(name, path, self.tree.read(path)) if path else None
        return self._by_name[name]

    @property
    def read(self) -> dict[str, str]:
        """Path -> SHA-256 of every file read so far."""
        found = (m for m in self._by_name.values() if m)
        return {m.path: m.sha256 for m in sorted(found, key=lambda m: m.path)}

    def definition(
        self, module: Module, name: str
    ) -> tuple[Module, ast.ClassDef | Function] | None:
        """Where a name used in `module` is defined in the tree, imports followed."""
        seen: set[tuple[str, str]] = set()
        at: Module | None = module
        while at and (at.name, name) not in seen:
            seen.add((at.name, name))
            if found := at.definitions.get(name):
                return at, found
            target, name = at.imports.get(name, ("", ""))
            at = self.get(target) if name else None
        return None

    def class_of(self, module: Module, name: str) -> ClassRef | None:
        """The class a name used in `module` stands for."""
        found = self.definition(module, name)
        if found and isinstance(found[1], ast.ClassDef):
            return ClassRef.of(found[0], found[1])
        return None

    def lineage(self, ref: ClassRef) -> list[ClassRef]:
        """The class and its bases as far as the tree defines them, in method resolution order.

        Depth first with repeats dropped from the front, which is Python's order for the hierarchies
        that models form.
        """
        found = [ref]
        for base in ref.node.bases:
            name = dotted(base.value if isinstance(base, ast.Subscript) else base)
            if name and (parent := self.class_of(ref.module, name)):
                found += self.lineage(parent)
        return [r for i, r in enumerate(found) if r not in found[i + 1 :]]

    def method(self, ref: ClassRef, name: str) -> tuple[ClassRef, Function] | None:
        """The method that a call on an instance reaches, with the class that defines it."""
        for owner in self.lineage(ref):
            if name in owner.methods:
                return owner, owner.methods[name]
        return None
