"""Small questions asked of Python syntax trees."""

from __future__ import annotations

import ast
import io
from collections.abc import Iterator
from typing import TypeAlias

StatementPath: TypeAlias = tuple[tuple[str, int], ...]
"""Where a statement stands: (block, index) steps from the module down.

The first statement of the `else` of the module's eighth is (("body", 7), ("orelse", 0)). Blocks are
named as in `ast`; the rewrite finds the same statement in LibCST's tree by it.
"""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef

_BLOCKS = ("body", "orelse", "finalbody")


def statements(
    owner: ast.AST, path: StatementPath = ()
) -> Iterator[tuple[ast.stmt, StatementPath]]:
    """Each statement below `owner` in source order, not entering nested functions and classes."""
    for block in _BLOCKS:
        for index, statement in enumerate(getattr(owner, block, ())):
            here = (*path, (block, index))
            yield statement, here
            if not isinstance(statement, Function | ast.ClassDef):
                yield from statements(statement, here)
    for index, handler in enumerate(getattr(owner, "handlers", ())):
        yield from statements(handler, (*path, ("handlers", index)))


def source_lines(source: str) -> list[str]:
    """The lines of a source, with their ends, as Python counts them.

    `str.splitlines` also splits at form feeds and at Unicode's separators.
    """
    return list(io.StringIO(source, newline=""))


def dotted(node: ast.AST) -> str:
    """`a.b.c` for a chain of names and attributes, "" for anything else."""
    if isinstance(node, ast.Name):
        return node.id
    if isinstance(node, ast.Attribute):
        base = dotted(node.value)
        return f"{base}.{node.attr}" if base else ""
    return ""


def self_attribute(node: ast.AST) -> str:
    """`attr` for `self.attr`, "" for anything else."""
    name = dotted(node)
    return name[5:] if name.startswith("self.") and name.count(".") == 1 else ""


def assigned(statement: ast.stmt) -> tuple[list[ast.expr], ast.expr | None]:
    """Targets (tuples taken apart) and value of an assignment; no targets for anything else."""
    if isinstance(statement, ast.AnnAssign):
        return [statement.target], statement.value
    if not isinstance(statement, ast.Assign):
        return [], None
    targets: list[ast.expr] = []
    for target in statement.targets:
        targets += target.elts if isinstance(target, ast.Tuple) else [target]
    return targets, statement.value


def calls(node: ast.AST) -> Iterator[ast.Call]:
    """Every call in `node`, itself included."""
    return (child for child in ast.walk(node) if isinstance(child, ast.Call))


def imports(node: ast.AST) -> Iterator[ast.Import | ast.ImportFrom]:
    """Every import below `node` in source order, those in functions and branches included."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            yield child
        elif not isinstance(child, ast.expr):  # an expression holds no statement
            yield from imports(child)


def keyword(call: ast.Call, name: str) -> ast.expr | None:
    """The value of a keyword argument."""
    return next((k.value for k in call.keywords if k.arg == name), None)


def parameters(function: Function) -> dict[str, ast.expr | None]:
    """Parameter names and their defaults, in order, `self` included."""
    arguments = function.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing: list[ast.expr | None] = [None] * (len(positional) - len(arguments.defaults))
    found = dict(zip((a.arg for a in positional), missing + list(arguments.defaults), strict=True))
    found.update(zip((a.arg for a in arguments.kwonlyargs), arguments.kw_defaults, strict=True))
    return found


def functions(owner: ast.ClassDef | ast.Module) -> dict[str, Function]:
    """The functions defined directly in a class or module; of overloads the last."""
    return {node.name: node for node in owner.body if isinstance(node, Function)}


def is_empty(function: Function) -> bool:
    """Whether a function has no body but a docstring, `...`, `pass` or a raise."""
    return all(
        isinstance(node, ast.Pass | ast.Raise)
        or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant))
        for node in function.body
    )


def own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """The calls of a statement itself, not those of the statements in its blocks."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from calls(child)


def names(node: ast.AST) -> set[str]:
    """Every name that is read or set in `node`."""
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}
