"""Values as far as they are known, for code that is read and not run."""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from .modules import ClassRef, Module
from .syntax import Function


class _Unknown:
    def __repr__(self) -> str:
        return "UNKNOWN"

    def __deepcopy__(self, _: object) -> _Unknown:
        return self


UNKNOWN = _Unknown()


class Either(NamedTuple):
    """One of several values."""

    values: tuple[Any, ...]


class Record(dict[str, Any]):
    """An object known by its fields; those that are not there are UNKNOWN."""


class External(NamedTuple):
    """A name from outside the tree, `compressed_tensors.quantization.QuantizationType.INT`."""

    path: str

    @property
    def member(self) -> str:
        """What it would be as the member of an enumeration of names: "int"; else ""."""
        parts = self.path.removesuffix(".value").split(".")
        of_a_class = len(parts) > 1 and parts[-2][:1].isupper()
        return _plain(parts[-1]) if of_a_class else ""


class ClassValue(NamedTuple):
    """A class of the tree."""

    ref: ClassRef


class Instance:
    """An object of a class of the tree, with the attributes that are known."""

    def __init__(self, ref: ClassRef) -> None:
        self.ref = ref
        self.attributes: dict[str, Any] = {}


class Bound(NamedTuple):
    """A function of the tree, and what comes before its arguments."""

    module: Module
    function: Function
    receiver: tuple[Any, ...]


def possible(value: Any) -> tuple[Any, ...]:
    """The values that a value stands for."""
    return value.values if isinstance(value, Either) else (value,)


def either(values: Sequence[Any]) -> Any:
    """One of several values, each once."""
    found: list[Any] = []
    for value in (one for several in values for one in possible(several)):
        if not any(_same(value, other) for other in found):
            found.append(value)
    return found[0] if len(found) == 1 else Either(tuple(found))


def truth(value: Any) -> bool | None:
    """Whether a value is true; None where that is not known."""
    if isinstance(value, Either):
        known = {truth(v) for v in value.values}
        return known.pop() if len(known) == 1 else None
    if value is UNKNOWN or isinstance(value, External):
        return None
    if isinstance(value, Instance | ClassValue | Bound | Record):
        return True
    return bool(value)


def compared(op: ast.cmpop, left: Any, right: Any) -> Any:
    for value, place in ((left, 0), (right, 1)):
        if isinstance(value, Either):
            pairs = [(v, right) if place == 0 else (left, v) for v in value.values]
            return agreed([compared(op, *pair) for pair in pairs])
    if isinstance(op, ast.Is | ast.Eq):
        return _equal(left, right)
    if isinstance(op, ast.IsNot | ast.NotEq):
        same = _equal(left, right)
        return UNKNOWN if same is UNKNOWN else not same
    if isinstance(op, ast.In | ast.NotIn):
        inside = _inside(left, right)
        return UNKNOWN if inside is UNKNOWN else inside is isinstance(op, ast.In)
    order = _ORDER.get(type(op))
    if order and isinstance(left, int | float) and isinstance(right, int | float):
        return order(left, right)
    return UNKNOWN


def _equal(left: Any, right: Any) -> Any:
    if left is UNKNOWN or right is UNKNOWN:
        return UNKNOWN
    for one, other in ((left, right), (right, left)):
        if isinstance(one, External):
            if isinstance(other, str) and one.member:
                return one.member == _plain(other)
            return UNKNOWN
    # a class, an object or a record is never None, nor a number
    if isinstance(left, Instance | ClassValue | Bound) or isinstance(
        right, Instance | ClassValue | Bound
    ):
        return left is right or left == right
    return bool(left == right)


def _inside(item: Any, container: Any) -> Any:
    if isinstance(container, str):
        return item in container if isinstance(item, str) else UNKNOWN
    if isinstance(container, External | ClassValue | Instance | Bound | _Unknown | Record):
        return bool(item in container) if isinstance(container, Record) else UNKNOWN
    if not isinstance(container, dict | list | tuple | set | range):
        return UNKNOWN
    if isinstance(item, tuple) and not known_key(item):
        return UNKNOWN
    answers = [_equal(item, one) for one in container]
    return True if True in answers else UNKNOWN if UNKNOWN in answers else False


def agreed(answers: list[Any]) -> Any:
    first = answers[0]
    return first if all(a is first for a in answers) else UNKNOWN


def _same(left: Any, right: Any) -> bool:
    if isinstance(left, Instance) and isinstance(right, Instance):
        return left.ref == right.ref
    # 1 == True in Python
    return type(left) is type(right) and (left is right or bool(left == right))


def known_key(value: Any) -> bool:
    """Whether a value can be looked up."""
    if isinstance(value, Either | External | ClassValue):
        return False
    if isinstance(value, tuple):
        return all(map(known_key, value))
    return value is None or isinstance(value, str | int | float | bool)


def _plain(name: str) -> str:
    return name.lower().replace("_", "-")


_ORDER: Mapping[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
