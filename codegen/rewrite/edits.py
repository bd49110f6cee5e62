"""The edits that a plan consists of. Every path is one into the original file."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from ..analysis.syntax import StatementPath


@dataclass(frozen=True)
class Insert:
    """New statements before or behind one that stays. A blank first line of `code` is kept."""

    path: StatementPath
    code: str
    behind: bool = False


@dataclass(frozen=True)
class Replace:
    """New statements in the place of one; comments above it stay."""

    path: StatementPath
    code: str


@dataclass(frozen=True)
class AddArguments:
    """Keyword arguments at the end of a call in a statement."""

    path: StatementPath
    callee: str
    arguments: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class ReplaceArgument:
    """Another name in the place of one that a call in a statement gets as an argument."""

    path: StatementPath
    callee: str
    old: str
    new: str


@dataclass(frozen=True)
class SetLoop:
    """What a `for` goes over, and its target where that changes."""

    path: StatementPath
    iterable: str
    target: str | None = None


@dataclass(frozen=True)
class AddBase:
    """A base class behind those that a class has."""

    path: StatementPath
    base: str


@dataclass(frozen=True)
class AddImport:
    """`from module import name`, the module as the file writes it (".utils", "vllm.config")."""

    module: str
    name: str


NewCode: TypeAlias = Insert | Replace
Edit: TypeAlias = Insert | Replace | AddArguments | ReplaceArgument | SetLoop | AddBase | AddImport
