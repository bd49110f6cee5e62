"""How a model loads its experts: mapping calls, loops over a mapping, and fused tensors."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from ..errors import Refusal
from .fused import fused_ranges, local_slices
from .loops import expert_loops, tensor_loop
from .syntax import assigned, dotted, keyword, own_calls, parameters, self_attribute, statements
from .weights import (
    ExpertLoop,
    FusedRange,
    FusedSwitch,
    Hand,
    LocalSlice,
    MappingCall,
    Method,
    TensorLoop,
)

_MAPPING_FUNCTION = "make_expert_params_mapping"
"""`FusedMoE.make_expert_params_mapping` to 0.19, `fused_moe_make_...` from 0.20."""


class Loading(NamedTuple):
    """All of it. Empty where the layer code loads the experts (from 0.25.0 on)."""

    mappings: tuple[MappingCall, ...]
    loops: tuple[ExpertLoop, ...]
    ranges: tuple[FusedRange, ...]
    slices: tuple[LocalSlice, ...]
    methods: tuple[Method, ...]

    def tensors_around(self, loop: ExpertLoop) -> TensorLoop | None:
        """The loop over the checkpoint's tensors that encloses an expert loop."""
        return tensor_loop(loop.method, loop.loop, loop.name)

    def hands(self, loop: ExpertLoop) -> list[Hand]:
        """The calls that pass the mapping to the method of an expert loop."""
        found = []
        for method in self.methods:
            for statement, _ in statements(method.function):
                for call in own_calls(statement):
                    if self_attribute(call.func) == loop.method.function.name:
                        found.append(_hand(loop, method, statement, call))
        return found

    def check_mapping(self, method: Method, mapping: str) -> None:
        """Refuse a mapping that is not just what a mapping call gave, or the fused one's switch."""
        for statement, _ in statements(method.function):
            targets, value = assigned(statement)
            changed = isinstance(statement, ast.AugAssign) and dotted(statement.target) == mapping
            for call in own_calls(statement):
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


def _hand(loop: ExpertLoop, method: Method, statement: ast.stmt, call: ast.Call) -> Hand:
    """One call of the method that has an expert loop: where its mapping and name come from."""
    order = [n for n in parameters(loop.method.function) if n != "self"]

    def given(parameter: str) -> str:
        value = keyword(call, parameter)
        if value is None and order.index(parameter) < len(call.args):
            value = call.args[order.index(parameter)]
        return dotted(value) if value is not None else ""

    name = given(loop.name) if loop.name in order else ""
    tensors = tensor_loop(method, statement, name)
    if tensors is None or not given(loop.mapping):
        raise Refusal(
            f"the mapping that {loop.method.function.name} gets was not found", method.where(call)
        )
    return Hand(tensors, statement, call, given(loop.mapping))


def loading(methods: Iterable[Method]) -> Loading:
    """Find what loads experts in these methods.

    Raises:
        Refusal: a loop over an expert mapping has a form that is not known.
    """
    known = tuple(methods)
    return Loading(
        tuple(found for m in known for found in _mapping_calls(m)),
        tuple(found for m in known for found in expert_loops(m)),
        tuple(found for m in known for found in fused_ranges(m)),
        tuple(found for m in known for found in local_slices(m)),
        known,
    )


def _mapping_calls(method: Method) -> Iterator[MappingCall]:
    for statement, _ in statements(method.function):
        for call in own_calls(statement):
            if not dotted(call.func).endswith(_MAPPING_FUNCTION):
                continue
            if any(k.arg is None for k in call.keywords) or keyword(call, "num_experts") is None:
                raise Refusal("num_experts= is not among this call's arguments", method.where(call))
            yield MappingCall(method, statement, call)
