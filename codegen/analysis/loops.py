"""Finds loops over an expert mapping, and the loops over tensors around them."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..errors import Refusal
from .syntax import Function, assigned, dotted, keyword, names, own_calls, statements
from .weights import ExpertLoop, Method, Stop, TensorLoop


def expert_loops(method: Method) -> Iterator[ExpertLoop]:
    for loop, _ in statements(method.function):
        if not isinstance(loop, ast.For):
            continue
        unpacking, entry = _entry(loop)
        if unpacking is None or entry is None:
            continue
        if _is_replica_loop(entry):
            continue
        loads = [s for s in _inside(loop) if _loads(s, entry[2])]
        replicas = [] if loads else list(_replica_loads(loop))
        if not loads and not replicas:
            continue
        mapping = dotted(loop.iter)
        if not mapping:
            raise Refusal("this loop over an expert mapping does not name it", method.where(loop))
        name = tested_name(method, loop, entry[1])
        if replicas:
            load, stop = replicas[0], Stop.REPLICAS
            yield ExpertLoop(method, loop, mapping, entry, name, unpacking, load, stop)
            continue
        if len(loads) > 1:
            raise Refusal("this loop calls the weight loader in two places", method.where(loads[1]))
        stop = _stop(method, loop, loads[0])
        if stop is Stop.NEVER:
            _check_exhaustive(method, loop, entry)
        else:
            _check_unconditional(method, loop, loads[0], entry[2])
        yield ExpertLoop(method, loop, mapping, entry, name, unpacking, loads[0], stop)


def _is_replica_loop(entry: tuple[str, ...]) -> bool:
    """`for _, _, expert_id, _ in candidates`: only the slot differs from turn to turn."""
    return entry[0] == entry[1] == entry[3] == "_"


def _replica_loads(loop: ast.For) -> Iterator[ast.stmt]:
    """The loads in loops over the same entries that stand inside a loop over the mapping."""
    for inner in _inside(loop):
        if isinstance(inner, ast.For) and dotted(inner.iter) == dotted(loop.iter):
            entry = _four_names(inner.target)
            if entry and _is_replica_loop(entry):
                yield from (s for s in inner.body if _loads(s, entry[2]))


def _check_exhaustive(method: Method, loop: ast.For, entry: tuple[str, ...]) -> None:
    """A loop without a break may still end in effect: by a return, or by what it has changed."""
    set_at: dict[str, int] = {}
    for statement in _inside(loop):
        if isinstance(statement, ast.Return | ast.Raise):
            raise Refusal("this loop over an expert mapping may end early", method.where(statement))
        for target in assigned(statement)[0]:
            set_at.setdefault(dotted(target), statement.lineno)
    for statement in _inside(loop):
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Continue):
            for name in names(statement.test) - set(entry):
                if set_at.get(name, 0) >= statement.lineno:
                    raise Refusal(
                        f"this loop passes over entries by {name}, which it changes itself",
                        method.where(statement),
                    )


def _check_unconditional(method: Method, loop: ast.For, load: ast.stmt, expert_id: str) -> None:
    """One entry stands for all replicas: nothing but the call itself may depend on its id."""
    tainted = {expert_id}
    for statement in _inside(loop):
        if statement.lineno > load.lineno and expert_id in names(statement):
            raise Refusal(f"{expert_id} is read behind the load", method.where(statement))
        targets, value = assigned(statement)
        if statement is load:
            if names(load) & (tainted - {expert_id}):
                raise Refusal("how a weight is loaded depends on its slot", method.where(load))
        elif value is not None and names(value) & tainted:
            tainted |= {dotted(t) for t in targets}
        if isinstance(statement, ast.If) and names(statement.test) & tainted:
            raise Refusal("whether a weight is loaded depends on its slot", method.where(statement))


def _entry(loop: ast.For) -> tuple[ast.stmt | None, tuple[str, str, str, str] | None]:
    """How a loop takes its entries apart: in its head, or in a statement `a, b, c, d = mapping`."""
    if names := _four_names(loop.target):
        return loop, names
    for statement in loop.body:
        if (
            isinstance(statement, ast.Assign)
            and dotted(statement.value) == dotted(loop.target) != ""
            and (names := _four_names(statement.targets[0]))
        ):
            return statement, names
    return None, None


def _four_names(node: ast.expr) -> tuple[str, str, str, str] | None:
    if isinstance(node, ast.Tuple) and len(node.elts) == 4 and all(map(dotted, node.elts)):
        first, second, third, fourth = map(dotted, node.elts)
        return first, second, third, fourth
    return None


def _loads(statement: ast.stmt, expert_id: str) -> bool:
    return any(
        (value := keyword(call, "expert_id")) is not None and dotted(value) == expert_id
        for call in own_calls(statement)
    )


def _stop(method: Method, loop: ast.For, load: ast.stmt) -> Stop:
    breaks = [s for s in _inside(loop) if isinstance(s, ast.Break)]
    if not breaks:
        return Stop.NEVER
    if breaks == loop.body[-1:]:
        return Stop.FIRST
    succeeded = [dotted(t) for t in assigned(load)[0]]
    for statement in loop.body:
        if (
            isinstance(statement, ast.If)
            and statement.body[-1:] == breaks
            and dotted(statement.test) in succeeded
        ):
            return Stop.SUCCESS
    raise Refusal(
        "this loop over an expert mapping ends in a way that is not known", method.where(breaks[0])
    )


def _inside(loop: ast.For) -> Iterator[ast.stmt]:
    """The statements of a loop's body, not those of loops inside it nor of its `else`."""
    pending = list(loop.body)
    while pending:
        statement = pending.pop(0)
        yield statement
        if not isinstance(statement, ast.For | ast.While | ast.ClassDef | Function):
            pending = [s for s, path in statements(statement) if len(path) == 1] + pending


def tested_name(method: Method, loop: ast.For, weight_name: str) -> str:
    """The variable with the tensor's name: what an entry's weight name is looked for in.

    Raises:
        Refusal: the loop has no such test.
    """
    for node in ast.walk(loop):
        if (
            isinstance(node, ast.Compare)
            and dotted(node.left) == weight_name
            and isinstance(node.ops[0], ast.NotIn | ast.In)
            and isinstance(node.comparators[0], ast.Name)
        ):
            return node.comparators[0].id
    raise Refusal(f"{weight_name} is not looked for in a tensor's name", method.where(loop))


def tensor_loop(method: Method, inside: ast.stmt, name: str) -> TensorLoop | None:
    """The innermost `for name, tensor in ...` around a statement."""
    found = None
    for statement, _ in statements(method.function):
        if (
            isinstance(statement, ast.For)
            and isinstance(statement.target, ast.Tuple)
            and len(statement.target.elts) == 2
            and all(isinstance(e, ast.Name) for e in statement.target.elts)
            and inside is not statement
            and any(s is inside for s, _ in statements(statement))
        ):
            set_here = {dotted(t) for s, _ in statements(statement) for t in assigned(s)[0]}
            if name in set_here | {dotted(statement.target.elts[0])}:
                found = TensorLoop(method, statement, name)
    return found
