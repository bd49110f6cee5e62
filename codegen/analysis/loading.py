"""How a model loads its experts: mapping calls, loops over a mapping, and fused tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import NamedTuple

from ..errors import Refusal
from .modules import ClassRef
from .syntax import (
    Function,
    assigned,
    calls,
    dotted,
    keyword,
    parameters,
    self_attribute,
    statements,
)

_MAPPING_FUNCTION = "make_expert_params_mapping"
"""`FusedMoE.make_expert_params_mapping` to 0.19, `fused_moe_make_...` from 0.20."""


class Method(NamedTuple):
    """A method that takes part in loading, and the class that defines it."""

    owner: ClassRef
    function: Function

    def where(self, node: ast.AST) -> str:
        return self.owner.module.where(node)


class MappingCall(NamedTuple):
    """A call that makes the expert mapping.

    Its entries are (parameter name, weight name, physical expert id, shard id).
    """

    method: Method
    statement: ast.stmt
    call: ast.Call

    @property
    def is_fused(self) -> bool:
        """A mapping for fused tensors names the same checkpoint projection for gate and up."""
        gate, up = (keyword(self.call, f"ckpt_{p}_proj_name") for p in ("gate", "up"))
        return gate is not None and up is not None and ast.dump(gate) == ast.dump(up)

    @property
    def has_redundant(self) -> bool:
        """Whether it maps redundant experts. A constant number of them is none that is right."""
        value = keyword(self.call, "num_redundant_experts")
        return value is not None and not isinstance(value, ast.Constant)


class Stop(Enum):
    """When a loop over the mapping ends."""

    FIRST = "at the first entry that matches"
    SUCCESS = "at the first entry that this rank could load"
    NEVER = "never: every entry is visited"


class ExpertLoop(NamedTuple):
    """A loop over an expert mapping that hands a tensor to the expert's weight loader."""

    method: Method
    loop: ast.For
    mapping: str
    """The name that the loop iterates over."""
    entry: tuple[str, str, str, str]
    """Names of the entry's parts; the third is the physical expert id."""
    unpacking: ast.stmt
    """What takes an entry apart: a statement of the loop, or the loop itself."""
    load: ast.stmt
    """The statement that calls the weight loader."""
    stop: Stop


class TensorLoop(NamedTuple):
    """The loop over a checkpoint's tensors around, or calling into, an expert loop."""

    method: Method
    loop: ast.For
    name: str
    """The variable that holds the tensor's name."""


class Hand(NamedTuple):
    """Where a tensor loop hands the mapping on to the method that has the expert loop."""

    tensors: TensorLoop
    statement: ast.stmt
    call: ast.Call
    argument: str


class FusedSwitch(NamedTuple):
    """`flag = True; mapping = other`: from here on the checkpoint's tensors are fused."""

    flag: str
    mapping: str


class FusedRange(NamedTuple):
    """`for expert_id in range(n): part = tensor[expert_id]`: logical experts of a fused tensor."""

    method: Method
    loop: ast.For
    expert_id: str
    num_experts: ast.expr
    part: ast.stmt
    tensor: ast.Subscript


class LocalSlice(NamedTuple):
    """`weight = weight[indices]`, the indices taken from the expert map: physical ids."""

    method: Method
    statement: ast.stmt
    subscript: ast.Subscript


class Loading(NamedTuple):
    """All of it. Empty where the layer code loads the experts (from 0.25.0 on)."""

    mappings: tuple[MappingCall, ...]
    loops: tuple[ExpertLoop, ...]
    ranges: tuple[FusedRange, ...]
    slices: tuple[LocalSlice, ...]
    methods: tuple[Method, ...]

    def tensors_around(self, loop: ExpertLoop) -> TensorLoop | None:
        """The loop over the checkpoint's tensors that encloses an expert loop."""
        return _tensor_loop(loop.method, loop.loop)

    def hands(self, loop: ExpertLoop) -> list[Hand]:
        """The calls that pass the mapping to the method of an expert loop."""
        names = [n for n in parameters(loop.method.function) if n != "self"]
        found = []
        for method in self.methods:
            for statement, _ in statements(method.function):
                for call in _own_calls(statement):
                    if self_attribute(call.func) != loop.method.function.name:
                        continue
                    argument = keyword(call, loop.mapping)
                    if argument is None and names.index(loop.mapping) < len(call.args):
                        argument = call.args[names.index(loop.mapping)]
                    tensors = _tensor_loop(method, statement)
                    if tensors is None or argument is None or not dotted(argument):
                        raise Refusal(
                            f"the mapping that {loop.method.function.name} gets was not found",
                            method.where(call),
                        )
                    found.append(Hand(tensors, statement, call, dotted(argument)))
        return found

    def check_mapping(self, method: Method, mapping: str) -> None:
        """Refuse a mapping that is not just what a mapping call gave, or the fused one's switch."""
        for statement, _ in statements(method.function):
            targets, value = assigned(statement)
            changed = isinstance(statement, ast.AugAssign) and dotted(statement.target) == mapping
            for call in _own_calls(statement):
                changed |= dotted(call.func).startswith(f"{mapping}.")
            if any(dotted(t) == mapping for t in targets):
                made = isinstance(value, ast.Call) and dotted(value.func).endswith(
                    (_MAPPING_FUNCTION, ".get_expert_mapping")
                )
                switched = value is not None and dotted(value) and self.switch(method, mapping)
                changed |= not (made or switched)
            if changed:
                raise Refusal(f"{mapping} is changed here", method.where(statement))

    def switch(self, method: Method, mapping: str) -> FusedSwitch | None:
        """The switch to fused tensors in a method, if it has one."""
        for statement, _ in statements(method.function):
            if not isinstance(statement, ast.If):
                continue
            flag = replaced = ""
            for inner in statement.body:
                targets, value = assigned(inner)
                if not targets or value is None:
                    continue
                if isinstance(value, ast.Constant) and value.value is True:
                    flag = dotted(targets[0])
                elif dotted(targets[0]) == mapping and dotted(value):
                    replaced = mapping
            if flag and replaced:
                return FusedSwitch(flag, mapping)
        return None


def loading(methods: Iterable[Method]) -> Loading:
    """Find what loads experts in these methods.

    Raises:
        Refusal: a loop over an expert mapping has a form that is not known.
    """
    known = tuple(methods)
    return Loading(
        tuple(found for m in known for found in _mapping_calls(m)),
        tuple(found for m in known for found in _expert_loops(m)),
        tuple(found for m in known for found in _fused_ranges(m)),
        tuple(found for m in known for found in _local_slices(m)),
        known,
    )


def _mapping_calls(method: Method) -> Iterator[MappingCall]:
    for statement, _ in statements(method.function):
        for call in _own_calls(statement):
            if not dotted(call.func).endswith(_MAPPING_FUNCTION):
                continue
            if any(k.arg is None for k in call.keywords) or keyword(call, "num_experts") is None:
                raise Refusal("num_experts= is not among this call's arguments", method.where(call))
            yield MappingCall(method, statement, call)


def _expert_loops(method: Method) -> Iterator[ExpertLoop]:
    for loop, _ in statements(method.function):
        if not isinstance(loop, ast.For):
            continue
        unpacking, entry = _entry(loop)
        if unpacking is None or entry is None:
            continue
        loads = [s for s in _inside(loop) if _loads(s, entry[2])]
        if not loads:
            continue
        mapping = dotted(loop.iter)
        if not mapping:
            raise Refusal("this loop over an expert mapping does not name it", method.where(loop))
        if len(loads) > 1:
            raise Refusal("this loop calls the weight loader in two places", method.where(loads[1]))
        stop = _stop(method, loop, loads[0])
        if stop is Stop.NEVER:
            _check_exhaustive(method, loop, entry)
        else:
            _check_unconditional(method, loop, loads[0], entry[2])
        yield ExpertLoop(method, loop, mapping, entry, unpacking, loads[0], stop)


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
            for name in _names(statement.test) - set(entry):
                if set_at.get(name, 0) >= statement.lineno:
                    raise Refusal(
                        f"this loop passes over entries by {name}, which it changes itself",
                        method.where(statement),
                    )


def _check_unconditional(method: Method, loop: ast.For, load: ast.stmt, expert_id: str) -> None:
    """Where one entry stands for all replicas, whether it is loaded must not depend on its id."""
    tainted = {expert_id}
    for statement in _inside(loop):
        if statement is load:
            return
        targets, value = assigned(statement)
        if value is not None and _names(value) & tainted:
            tainted |= {dotted(t) for t in targets}
        if isinstance(statement, ast.If) and _names(statement.test) & tainted:
            raise Refusal("whether a weight is loaded depends on its slot", method.where(statement))


def _names(node: ast.AST) -> set[str]:
    return {n.id for n in ast.walk(node) if isinstance(n, ast.Name)}


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
        for call in _own_calls(statement)
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


def _fused_ranges(method: Method) -> Iterator[FusedRange]:
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
            if not isinstance(value, ast.Subscript) or dotted(value.slice) != index:
                continue
            handed = {index, dotted(targets[0])}
            loads = _weight_loader_calls(method, loop.body)
            if any(handed <= _arguments(call) for call in loads):
                yield FusedRange(method, loop, index, loop.iter.args[0], part, value)


def _local_slices(method: Method) -> Iterator[LocalSlice]:
    physical: set[str] = set()
    for statement, _ in statements(method.function):
        targets, value = assigned(statement)
        if value is None or not targets:
            continue
        if isinstance(value, ast.Subscript) and dotted(value.slice) in physical - {""}:
            loads = _weight_loader_calls(method, method.function.body)
            if not any(dotted(targets[0]) in _arguments(call) for call in loads):
                continue
            yield LocalSlice(method, statement, value)
        elif "expert_map" in {n.id for n in ast.walk(value) if isinstance(n, ast.Name)} and any(
            isinstance(n, ast.Attribute) and n.attr == "nonzero" for n in ast.walk(value)
        ):
            physical.add(dotted(targets[0]))


def _own_calls(statement: ast.stmt) -> Iterator[ast.Call]:
    """The calls of a statement itself, not those of the statements in its blocks."""
    if isinstance(statement, Function | ast.ClassDef):
        return
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt | ast.ExceptHandler):
            yield from calls(child)


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


def _tensor_loop(method: Method, inside: ast.stmt) -> TensorLoop | None:
    """The innermost `for name, tensor in ...` around a statement that reads the name."""
    found = None
    for statement, _ in statements(method.function):
        if (
            isinstance(statement, ast.For)
            and isinstance(statement.target, ast.Tuple)
            and len(statement.target.elts) == 2
            and all(isinstance(e, ast.Name) for e in statement.target.elts)
            and inside is not statement
            and any(s is inside for s, _ in statements(statement))
            and dotted(statement.target.elts[0]) in _names(inside)
        ):
            found = TensorLoop(method, statement, dotted(statement.target.elts[0]))
    return found
