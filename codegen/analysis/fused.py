"""Finds where a model's own loader takes experts out of fused tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

from ..errors import Refusal
from .syntax import assigned, calls, dotted, statements
from .weights import FusedRange, LocalSlice, Method


def fused_ranges(method: Method) -> Iterator[FusedRange]:
    for loop, _ in statements(method.function):
        if not (
            isinstance(loop, ast.For)
            and isinstance(loop.target, ast.Name)
            and isinstance(loop.iter, ast.Call)
            and dotted(loop.iter.func) == "range"
            and len(loop.iter.args) == 1
        ):
            continue
        index = loop.target.id
        for part in loop.body:
            targets, value = assigned(part)
            if not isinstance(value, ast.Subscript) or _index(value) != index:
                continue
            handed = {index, dotted(targets[0])}
            loads = _weight_loader_calls(method, loop.body)
            if any(handed <= _arguments(call) for call in loads):
                count = loop.iter.args[0]
                # beyond the logical experts, or no replica has its turn
                modulus = _modulus(value)
                wraps = modulus is not None and ast.dump(modulus) != ast.dump(count)
                yield FusedRange(method, loop, index, count, part, value, wraps)


def local_slices(method: Method) -> Iterator[LocalSlice]:
    physical: set[str] = set()
    for statement, _ in statements(method.function):
        targets, value = assigned(statement)
        if value is None or not targets:
            continue
        pieces = [
            n
            for n in ast.walk(value)
            if isinstance(n, ast.Subscript) and _index(n) in physical - {""}
        ]
        if pieces:
            loads = _weight_loader_calls(method, method.function.body)
            if not any(dotted(targets[0]) in _arguments(call) for call in loads):
                continue
            if len(pieces) > 1:
                raise Refusal("experts are taken out of a tensor twice", method.where(statement))
            yield LocalSlice(method, statement, pieces[0], _modulus(pieces[0]) is not None)
        elif "expert_map" in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} and any(
            isinstance(n, ast.Attribute) and n.attr == "nonzero" for n in ast.walk(value)
        ):
            physical.add(dotted(targets[0]))


def _modulus(subscript: ast.Subscript) -> ast.expr | None:
    """The `n` of `tensor[name % n]`."""
    index = subscript.slice
    return index.right if isinstance(index, ast.BinOp) and isinstance(index.op, ast.Mod) else None


def _index(subscript: ast.Subscript) -> str:
    """The name that stands in `tensor[name]` or in `tensor[name % n]`."""
    index = subscript.slice
    if isinstance(index, ast.BinOp) and _modulus(subscript):
        index = index.left
    return dotted(index)


def _weight_loader_calls(method: Method, body: Iterable[ast.stmt]) -> list[ast.Call]:
    """The calls in some statements that reach a parameter's weight loader."""
    loaders = {
        dotted(target)
        for statement, _ in statements(method.function)
        for targets, value in [assigned(statement)]
        if value is not None and _reads_weight_loader(value)
        for target in targets
    }
    return [
        call
        for statement in body
        for call in calls(statement)
        if dotted(call.func) in loaders or dotted(call.func).endswith(".weight_loader")
    ]


def _reads_weight_loader(value: ast.expr) -> bool:
    return any(
        (isinstance(n, ast.Attribute) and n.attr == "weight_loader")
        or (isinstance(n, ast.Constant) and n.value == "weight_loader")
        for n in ast.walk(value)
    )


def _arguments(call: ast.Call) -> set[str]:
    return {dotted(a) for a in [*call.args, *(k.value for k in call.keywords)]}
