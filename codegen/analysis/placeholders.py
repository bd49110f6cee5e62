"""Loops over all layers, and what they ask of those that stand for other pipeline stages.

Such a layer is a `PPMissingLayer`: it has none of a decoder layer's attributes. A loop is followed
with one in its hands, as far as its tests can be told.
"""

from __future__ import annotations

import ast
from typing import NamedTuple

from .syntax import assigned, dotted


def layer_name(loop: ast.stmt, layers: str) -> str:
    """The variable that holds each layer in turn; "" if it is no loop over all `layers`."""
    if not isinstance(loop, ast.For):
        return ""
    target, over = loop.target, loop.iter
    if isinstance(over, ast.Call) and dotted(over.func) == "enumerate" and over.args:
        target = target.elts[-1] if isinstance(target, ast.Tuple) else target
        over = over.args[0]
    return dotted(target) if dotted(over).endswith(f".{layers}") else ""


def asks_placeholder(body: list[ast.stmt], layer: str) -> bool:
    """Whether a loop's body takes an attribute of a placeholder, or asserts that it is none."""
    return _Turn(layer, {layer}).run(body).asks


class _Outcome(NamedTuple):
    asks: bool
    ends: bool
    """Whether the loop goes on to the next layer."""


class _Turn:
    """One turn of the loop. `bare` are the names of the placeholder, and of None got from it."""

    def __init__(self, layer: str, bare: set[str]) -> None:
        self.layer = layer
        self.bare = bare

    def run(self, body: list[ast.stmt]) -> _Outcome:
        for statement in body:
            if isinstance(statement, ast.If):
                asks, truth = self.test(statement.test)
                branches = {True: statement.body, False: statement.orelse}
                taken = branches if truth is None else [truth]
                outcomes = [self.run(branches[way]) for way in taken]
                if asks or any(o.asks for o in outcomes):
                    return _Outcome(True, True)
                if all(o.ends for o in outcomes):
                    return _Outcome(False, True)
            elif isinstance(statement, ast.Assert):
                asks, truth = self.test(statement.test)
                if asks or truth is False:
                    return _Outcome(True, True)
            elif isinstance(statement, ast.Raise):
                return _Outcome(True, True)
            elif isinstance(statement, ast.Continue | ast.Break | ast.Return):
                return _Outcome(False, True)
            else:
                targets, value = assigned(statement)
                if self.asks(statement) or self.layer in map(dotted, targets):
                    return _Outcome(True, True)
                if value is not None and self.is_none(value):
                    self.bare |= {dotted(t) for t in targets}
        return _Outcome(False, False)

    def test(self, test: ast.expr) -> tuple[bool, bool | None]:
        """Whether a test asks the placeholder for something, and how it turns out if that is sure.

        The rest of an `and` or `or` is not looked at where it would not be evaluated.
        """
        if isinstance(test, ast.BoolOp):
            decides = isinstance(test.op, ast.Or)
            truths = []
            for value in test.values:
                asks, truth = self.test(value)
                if asks or truth is decides:
                    return asks, truth
                truths.append(truth)
            return False, None if None in truths else not decides
        if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
            asks, truth = self.test(test.operand)
            return asks, None if truth is None else not truth
        if isinstance(test, ast.Compare) and self.is_none(test.left):
            right = test.comparators[0]
            if isinstance(right, ast.Constant) and right.value is None:
                return False, isinstance(test.ops[0], ast.Is | ast.Eq)
        if isinstance(test, ast.Call) and len(test.args) == 2:
            of_layer = dotted(test.args[0]) == self.layer
            if dotted(test.func) == "hasattr" and of_layer:
                return False, False
            if dotted(test.func) == "isinstance" and (of_layer or self.is_none(test.args[0])):
                kinds = [n for n in ast.walk(test.args[1]) if dotted(n).endswith("MissingLayer")]
                return False, of_layer and bool(kinds)
        if self.is_none(test):
            return False, False
        return self.asks(test), None

    def asks(self, node: ast.AST) -> bool:
        return any(
            (isinstance(n, ast.Attribute) and dotted(n.value) in self.bare)
            or (
                isinstance(n, ast.Call)
                and dotted(n.func) == "getattr"
                and len(n.args) == 2
                and dotted(n.args[0]) in self.bare
            )
            for n in ast.walk(node)
        )

    def is_none(self, value: ast.expr) -> bool:
        """`getattr(layer, ..., None)`, or a name that holds that."""
        if isinstance(value, ast.NamedExpr):
            found = self.is_none(value.value)
            self.bare |= {value.target.id} if found else set()
            return found
        if isinstance(value, ast.Name):
            return value.id in self.bare - {self.layer}
        return (
            isinstance(value, ast.Call)
            and dotted(value.func) == "getattr"
            and len(value.args) == 3
            and dotted(value.args[0]) == self.layer
            and isinstance(value.args[2], ast.Constant)
            and value.args[2].value is None
        )
