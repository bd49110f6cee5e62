"""The edits that a plan consists of. Every path is one into the original file."""

from __future__ import annotations

from typing import NamedTuple, TypeAlias

from ..analysis.syntax import StatementPath


class Insert(NamedTuple):
    """New statements before or behind one that stays. A blank first line of `code` is kept."""

    path: StatementPath
    code: str
    behind: bool = False


class Replace(NamedTuple):
    """New statements in the place of one; comments above it stay."""

    path: StatementPath
    code: str


class Remove(NamedTuple):
    """A statement less; the next one stands in its place."""

    path: StatementPath


class AddArguments(NamedTuple):
    """Keyword arguments at the end of a call in a statement."""

    path: StatementPath
    callee: str
    arguments: tuple[tuple[str, str], ...]


class ReplaceArgument(NamedTuple):
    """Another name in the place of one that a call in a statement gets as an argument."""

    path: StatementPath
    callee: str
    old: str
    new: str


class SetLoop(NamedTuple):
    """What a `for` goes over, and its target where that changes."""

    path: StatementPath
    iterable: str
    target: str | None = None


class AddBase(NamedTuple):
    """A base class behind those that a class has."""

    path: StatementPath
    base: str


class AddImport(NamedTuple):
    """`from module import name`, the module as the file writes it (".utils", "vllm.config")."""

    module: str
    name: str


NewCode: TypeAlias = Insert | Replace
Edit: TypeAlias = (
    Insert | Replace | Remove | AddArguments | ReplaceArgument | SetLoop | AddBase | AddImport
)
