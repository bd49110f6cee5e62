"""The modules of a vLLM tree, parsed when asked for, and the names in them."""

from __future__ import annotations

import ast
import hashlib
import re
from dataclasses import dataclass, field
from functools import cached_property

from ..errors import Refusal
from ..source.tree import SourceTree
from .syntax import Function, StatementPath, dotted, functions, source_lines, statements

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
    def _lines(self) -> list[bytes]:
        # columns of syntax trees count bytes
        return self.source.encode().splitlines(keepends=True)

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
    def first_definition(self) -> StatementPath:
        """Where the first class or function stands: new functions go before it."""
        body = self.tree.body
        first = next(n for n in body if isinstance(n, Function | ast.ClassDef))
        return self.paths[first]

    @property
    def package(self) -> str:
        return self.name if self.path.endswith("__init__.py") else self.name.rpartition(".")[0]

    def definition(self, name: str) -> ast.ClassDef | Function | None:
        """The class or function of that name at the top of the module."""
        if "tree" in self.__dict__:
            return self._definitions.get(name)
        if name not in self._sliced:
            self._sliced[name] = self._slice(name)
        return self._sliced[name]

    @cached_property
    def imports(self) -> dict[str, tuple[str, str]]:
        """Local name -> (module, name in it); that name is "" for an imported module."""
        found: dict[str, tuple[str, str]] = {}
        for node, _ in statements(self._import_statements()):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    target = alias.name if alias.asname else alias.name.partition(".")[0]
                    found[alias.asname or target] = (target, "")
            elif isinstance(node, ast.ImportFrom):
                module = absolute(self, node)
                for alias in node.names:
                    found[alias.asname or alias.name] = (module, alias.name)
        return found

    @cached_property
    def _definitions(self) -> dict[str, ast.ClassDef | Function]:
        found: dict[str, ast.ClassDef | Function] = {**functions(self.tree)}
        found.update((n.name, n) for n in self.tree.body if isinstance(n, ast.ClassDef))
        return found

    @cached_property
    def _sliced(self) -> dict[str, ast.ClassDef | Function | None]:
        return {}

    @cached_property
    def _blocks(self) -> list[tuple[int, str]]:
        """Each top-level statement as (line number, text), as far as indentation tells.

        Of a large module only a class or two is wanted, and parsing it whole would take most of
        the time that a run takes. What does not parse as a slice is looked up in the whole.
        """
        lines = source_lines(self.source)
        starts: list[int] = []
        quotes = 0
        for index, line in enumerate(lines):
            # what stands at the margin within a string is no statement
            if quotes % 2 == 0 and line[0] not in " \t\f\r\n#)]}\"'":
                starts.append(index)
            quotes += line.count('"""') + line.count("'''")
        ends = [*starts[1:], len(lines)][: len(starts)]
        return [(s + 1, "".join(lines[s:e])) for s, e in zip(starts, ends, strict=True)]

    def _slice(self, name: str) -> ast.ClassDef | Function | None:
        head = re.compile(rf"(class|def|async def) {re.escape(name)}\b")
        found = [block for block in self._blocks if head.match(block[1])]
        if not found:
            return None
        if len(found) > 1:  # overloads, or a string that looks like code
            _ = self.tree
            return self._definitions.get(name)
        line, text = found[0]
        try:
            # the empty lines give every node the line number that it has in the file
            node = ast.parse("\n" * (line - 1) + text).body[0]
        except SyntaxError:
            _ = self.tree
            return self._definitions.get(name)
        return node if isinstance(node, Function | ast.ClassDef) else None

    def _import_statements(self) -> ast.Module:
        if "tree" in self.__dict__:
            return self.tree
        heads = ("from ", "import ", "if ", "try:", "else:", "elif ", "except", "finally:")
        try:
            return ast.parse("".join(t for _, t in self._blocks if t.startswith(heads)))
        except SyntaxError:
            return self.tree

    def where(self, node: ast.AST) -> str:
        """`file:line`, for messages."""
        return f"{self.path}:{getattr(node, 'lineno', 1)}"

    def text(self, node: ast.AST) -> str:
        """The source text of a node."""
        # ast.get_source_segment splits the whole source at every call
        assert isinstance(node, ast.expr | ast.stmt)
        assert node.end_lineno is not None and node.end_col_offset is not None
        lines = self._lines[node.lineno - 1 : node.end_lineno]
        lines[-1] = lines[-1][: node.end_col_offset]
        lines[0] = lines[0][node.col_offset :]
        return b"".join(lines).decode()


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

    def __init__(self, tree: SourceTree, parsed: dict[str, Module | None] | None = None) -> None:
        """`parsed` is shared by those who work on the same tree; what each has read is its own."""
        self.tree = tree
        self._parsed = {} if parsed is None else parsed
        self._read: dict[str, str] = {}

    def get(self, name: str) -> Module | None:
        """The module of that name, None where the tree has none."""
        if name not in self._parsed:
            path = self.tree.module_path(name) if name.partition(".")[0] == "vllm" else None
            self._parsed[name] = Module(name, path, self.tree.read(path)) if path else None
        module = self._parsed[name]
        if module and module.path not in self._read:
            self._read[module.path] = module.sha256
        return module

    @property
    def read(self) -> dict[str, str]:
        """Path -> SHA-256 of every file read so far."""
        return dict(sorted(self._read.items()))

    def definition(
        self, module: Module, name: str
    ) -> tuple[Module, ast.ClassDef | Function] | None:
        """Where a name used in `module` is defined in the tree, imports followed."""
        if not name.isidentifier():
            return None
        seen: set[tuple[str, str]] = set()
        at: Module | None = module
        while at and (at.name, name) not in seen:
            seen.add((at.name, name))
            if found := at.definition(name):
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
