"""What takes part in loading experts, as it is found in a model's methods."""

from __future__ import annotations

import ast
from enum import Enum
from typing import NamedTuple

from .modules import ClassRef
from .syntax import Function, keyword


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
    def where(self) -> str:
        return self.method.where(self.call)

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
    REPLICAS = "at the first entry that matches, whose replicas were all loaded"
    NEVER = "never: every entry is visited"


class ExpertLoop(NamedTuple):
    """A loop over an expert mapping that hands a tensor to the expert's weight loader."""

    method: Method
    loop: ast.For
    mapping: str
    """The name that the loop iterates over."""
    entry: tuple[str, str, str, str]
    """Names of the entry's parts; the third is the physical expert id."""
    name: str
    """The variable with the tensor's name."""
    unpacking: ast.stmt
    """What takes an entry apart: a statement of the loop, or the loop itself."""
    load: ast.stmt
    """The statement that calls the weight loader."""
    stop: Stop

    @property
    def where(self) -> str:
        return self.method.where(self.loop)


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
    """`for expert_id in range(n): part = tensor[expert_id]`: experts of a fused tensor."""

    method: Method
    loop: ast.For
    expert_id: str
    num_experts: ast.expr
    part: ast.stmt
    tensor: ast.Subscript
    wraps: bool
    """Whether it is `tensor[expert_id % n]`: the ids are physical, and replicas find their part."""

    @property
    def where(self) -> str:
        return self.method.where(self.loop)


class LocalSlice(NamedTuple):
    """`weight = weight[indices]`, the indices taken from the expert map: physical ids."""

    method: Method
    statement: ast.stmt
    subscript: ast.Subscript
    wraps: bool
    """Whether it is `weight[indices % n]`, which is right for replicas too."""
