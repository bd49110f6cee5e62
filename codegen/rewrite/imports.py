"""Names added to a file's imports, in the order that isort and ruff keep."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Iterable

import libcst as cst

from ..analysis.modules import MODELS
from ..errors import Refusal
from .style import fill

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement
ParseStatement = Callable[[str], cst.SimpleStatementLine]


def add_imports(
    body: list[Statement], wanted: Iterable[tuple[str, str]], aligned: bool, parse: ParseStatement
) -> list[Statement]:
    """The module's statements with each (module, name) imported.

    Args:
        body: the statements of the module.
        wanted: (module as written in the file, name) pairs.
        aligned: wrap as isort did for yapf's files; otherwise a formatter will wrap.
        parse: parses one statement with the file's newlines.

    Raises:
        Refusal: the module has no imports to put them with.
    """
    result = list(body)
    for module, name in sorted(wanted):
        # a file may write `.utils` as vllm.model_executor.models.utils
        spelled = {module, f"{MODELS}{module}"} if module.startswith(".") else {module}
        written = {index: found for index, found in _modules(result) if found in spelled}
        if not written:
            result = _insert(result, module, name, parse)
            continue
        at = max(written)
        module = written[at]
        line = result[at]
        assert isinstance(line, cst.SimpleStatementLine)
        statement = line.body[0]
        assert isinstance(statement, cst.ImportFrom) and not isinstance(
            statement.names, cst.ImportStar
        )
        names = [_alias(alias) for alias in statement.names]
        if name in names:
            continue
        names = _with(names, name)
        keep = isinstance(statement.rpar, cst.RightParen)
        new = parse(_text(module, names, aligned, keep, exploded=_has_comma(statement)))
        result[at] = line.with_changes(body=new.body)
    return result


def _text(module: str, names: list[str], aligned: bool, parenthesised: bool, exploded: bool) -> str:
    head = f"from {module} import "
    flat = head + ", ".join(names)
    if aligned:
        if not parenthesised and len(flat) <= 79:
            return flat
        return fill(head + "(", names, ")")
    return f"{head}({', '.join(names)}{',' if exploded else ''})"


def _has_comma(statement: cst.ImportFrom) -> bool:
    names = statement.names
    return not isinstance(names, cst.ImportStar) and isinstance(names[-1].comma, cst.Comma)


def _with(names: list[str], name: str) -> list[str]:
    """The name at the place that isort would give it; the others are left in their order."""
    at = next((i for i, other in enumerate(names) if _key(other) > _key(name)), len(names))
    return [*names[:at], name, *names[at:]]


def _key(name: str) -> tuple[int, list[object]]:
    """isort's default order: CONSTANTS, Classes, functions; numbers by value."""
    bare = name.split(" as ")[0]
    rank = 0 if bare.isupper() and len(bare) > 1 else 1 if bare[:1].isupper() else 2
    parts = re.split(r"(\d+)", bare)
    return rank, [int(p) if p.isdigit() else p for p in parts]


def _modules(body: list[Statement]) -> Iterable[tuple[int, str]]:
    for index, line in enumerate(body):
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) == 1:
            statement = line.body[0]
            if isinstance(statement, cst.ImportFrom) and not isinstance(
                statement.names, cst.ImportStar
            ):
                dots = "." * len(statement.relative)
                yield index, dots + (_dotted(statement.module) if statement.module else "")


def _insert(
    body: list[Statement], module: str, name: str, parse: ParseStatement
) -> list[Statement]:
    """A new import among its own kind."""
    same = [(index, other) for index, other in _modules(body) if _kind(other) == _kind(module)]
    if not same:
        raise Refusal(f"no import to put `from {module} import {name}` with")
    line = parse(f"from {module} import {name}")
    later = next((index for index, other in same if other > module), None)
    if later is None:
        at = same[-1][0] + 1
    else:
        at = later
        first = body[at]
        # the blank line above a block of imports stays above it
        line = line.with_changes(leading_lines=first.leading_lines)
        body = [*body[:at], first.with_changes(leading_lines=()), *body[at + 1 :]]
    return [*body[:at], line, *body[at:]]


def _kind(module: str) -> str:
    """Relative imports stand together, so do the standard library's and those of a package."""
    package = module.partition(".")[0]
    return "the standard library" if package in sys.stdlib_module_names else package


def _dotted(node: cst.CSTNode) -> str:
    if isinstance(node, cst.Attribute):
        return f"{_dotted(node.value)}.{node.attr.value}"
    return node.value if isinstance(node, cst.Name) else ""


def _alias(alias: cst.ImportAlias) -> str:
    name = _dotted(alias.name)
    return f"{name} as {_dotted(alias.asname.name)}" if alias.asname else name
