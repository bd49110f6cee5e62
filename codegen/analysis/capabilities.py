"""What a vLLM tree offers to a model that supports EPLB, read from the tree itself.

Release numbers appear in comments only, to say where a shape was seen.
"""

from __future__ import annotations

import ast
from enum import Enum
from typing import NamedTuple

from ..errors import Refusal
from .modules import MODELS, ClassRef, Module, Modules
from .syntax import (
    Function,
    assigned,
    calls,
    dotted,
    is_empty,
    keyword,
    names,
    self_attribute,
    statements,
)

INTERFACES = f"{MODELS}.interfaces"
PROTOCOL = "MixtureOfExperts"


class StateSetting(Enum):
    """What the protocol's own `set_eplb_state` does."""

    ABSTRACT = "abstract"
    """Nothing: the model writes it (0.9.2 to 0.11.0)."""
    APPENDS = "appends"
    """Appends to `expert_weights`, so that a second call doubles them (0.11.1 to 0.24.0)."""
    RESETS = "resets"
    """Starts from an empty `expert_weights` (from 0.25.0)."""


class Protocol(NamedTuple):
    """The MixtureOfExperts of a tree."""

    members: frozenset[str]
    methods: frozenset[str]
    state_setting: StateSetting
    unwrapped: bool
    """Whether the runner finds the MoE model inside a multimodal wrapper (0.22.0 and later)."""


class FusedLoading(NamedTuple):
    """How the layer code puts a fused tensor [E, ...] into the slots (0.18.0 and later)."""

    layer: str
    """The class whose `load_weights` does it."""
    fills_replicas: bool
    by_shape: bool
    """Whether a transposed tensor is told by its shape (0.25 to 0.27), not by a flag."""


class Capabilities(NamedTuple):
    """What generated code may rely on in a tree."""

    protocol: Protocol
    in_eplb_config: bool
    """Whether R is in `ParallelConfig.eplb_config` (from 0.10.2), or in ParallelConfig itself."""
    updates_expert_map: bool
    """Whether the expert layer has `update_expert_map` (from 0.10.0)."""
    fused_loading: FusedLoading | None
    """How the layer code loads fused tensors; None where it does not take experts out of them."""


def capabilities(modules: Modules, layer: ClassRef) -> Capabilities:
    """Read a tree's capabilities; `layer` is the class of what a MoE block keeps as experts.

    Raises:
        Refusal: the tree is no vLLM that has EPLB, or none that this tool knows.
    """
    config = _parallel_config(modules)
    fields = _fields(config.node)
    if "enable_eplb" not in fields:
        raise Refusal(
            "ParallelConfig has no enable_eplb", config.where, "EPLB came with vLLM 0.9.2."
        )
    return Capabilities(
        protocol=_protocol(modules),
        in_eplb_config=_in_eplb_config(modules, config, fields),
        updates_expert_map="update_expert_map" in layer.methods,
        fused_loading=_fused_loading(modules, layer),
    )


def expert_layer_class(modules: Modules, module: Module, builder: str) -> ClassRef:
    """The class of what a block keeps as its experts: the builder, or what that function returns.

    It is the first one in the lineage with `get_expert_weights`, which is what EPLB calls.
    """
    found = modules.definition(module, builder)
    if found is None:
        raise Refusal(f"{builder} is not defined in this tree", module.path)
    home, node = found
    name = node.name
    if isinstance(node, Function):
        # FusedMoE (0.24) and FusedMoEFactory (0.27) are functions annotated with what they return.
        name = dotted(node.returns) if node.returns else ""
        if isinstance(node.returns, ast.Constant):
            name = str(node.returns.value)
    ref = modules.class_of(home, name)
    for owner in modules.lineage(ref) if ref else ():
        if "get_expert_weights" in owner.methods:
            return owner
    raise Refusal(f"what {builder} returns has no get_expert_weights", home.where(node))


def _protocol(modules: Modules) -> Protocol:
    module = _required(modules, INTERFACES)
    node = module.definition(PROTOCOL)
    if not isinstance(node, ast.ClassDef):
        raise Refusal(f"class {PROTOCOL} not found", module.path, "EPLB came with vLLM 0.9.2.")
    methods = ClassRef.of(module, node).methods
    setter = methods.get("set_eplb_state")
    if setter is None:
        raise Refusal(f"{PROTOCOL} has no set_eplb_state", module.where(node))
    return Protocol(
        members=frozenset(_fields(node)),
        methods=frozenset(methods),
        state_setting=_state_setting(setter),
        unwrapped=_unwraps(modules, module),
    )


def _state_setting(setter: Function) -> StateSetting:
    if is_empty(setter):
        return StateSetting.ABSTRACT
    for statement, _ in statements(setter):
        if any(self_attribute(t) == "expert_weights" for t in assigned(statement)[0]):
            return StateSetting.RESETS
    return StateSetting.APPENDS


def _unwraps(modules: Modules, interfaces: Module) -> bool:
    """0.28 has a function for it beside the protocol, 0.22 code in the runner's EPLB utilities."""
    if interfaces.definition("get_mixture_of_experts_model"):
        return True
    utilities = modules.get("vllm.v1.worker.gpu.eplb_utils")
    return utilities is not None and "get_language_model" in utilities.source


def _fused_loading(modules: Modules, layer: ClassRef) -> FusedLoading | None:
    loader = layer.methods.get("load_weights")
    if loader is None:
        return None
    owner = layer
    for call in calls(loader):
        # MoERunner.load_weights hands on to self.routed_experts (from 0.24)
        name = dotted(call.func).split(".")
        if len(name) == 3 and name[0] == "self" and name[2] == "load_weights":
            inner = _annotated(modules, layer, name[1])
            if inner and "load_weights" in inner.methods:
                owner, loader = inner, inner.methods["load_weights"]
    mentioned = {dotted(n).rpartition(".")[2] for n in ast.walk(loader)}
    loops = [
        s
        for s, _ in statements(loader)
        if isinstance(s, ast.For)
        and isinstance(s.iter, ast.Call)
        and dotted(s.iter.func) == "enumerate"
        and keyword(s.iter, "start")
    ]
    if not loops:
        # up to 0.17 it copies a fused tensor whole, which no rank of several can use
        return None
    return FusedLoading(
        layer=owner.name,
        fills_replicas=all(_fills_replicas(loader, loop) for loop in loops),
        by_shape="is_fused_checkpoint_transposed" not in mentioned,
    )


_KNOWS_REPLICAS = {"num_logical_experts", "num_redundant_experts", "physical_to_logical_map"}
"""Names of which a loader that fills replicas from fused tensors needs one at least."""


def _fills_replicas(loader: Function, loop: ast.For) -> bool:
    """Whether what the loop goes over, or the expert id it loads, comes from one of these names.

    That a name stands elsewhere in the loader, in an assertion for one, says nothing.
    """
    known: dict[str, list[ast.expr]] = {}
    for statement, _ in statements(loader):
        targets, value = assigned(statement)
        if isinstance(statement, ast.AugAssign):
            targets, value = [statement.target], statement.value
        elif isinstance(statement, ast.For) and statement is not loop:
            targets, value = [statement.target], statement.iter
        if value is not None:
            for name in {n for t in targets for n in names(t)}:
                known.setdefault(name, []).append(value)
    pending = [loop.iter]
    pending += [e for c in calls(loop) if (e := keyword(c, "expert_id"))]
    seen: set[str] = set()
    while pending:
        for node in ast.walk(pending.pop()):
            name = dotted(node).rpartition(".")[2]
            if name in _KNOWS_REPLICAS:
                return True
            if name not in seen:
                seen.add(name)
                pending += known.get(name, [])
    return False


def _annotated(modules: Modules, ref: ClassRef, attribute: str) -> ClassRef | None:
    """The class of a constructor's parameter, by its annotation."""
    init = ref.methods.get("__init__")
    for argument in [*init.args.args, *init.args.kwonlyargs] if init else ():
        if argument.arg == attribute and argument.annotation is not None:
            annotation = argument.annotation
            name = (
                str(annotation.value)
                if isinstance(annotation, ast.Constant)
                else dotted(annotation)
            )
            return modules.class_of(ref.module, name)
    return None


def _parallel_config(modules: Modules) -> ClassRef:
    ref = modules.class_of(_required(modules, "vllm.config"), "ParallelConfig")
    if ref is None:
        raise Refusal("class ParallelConfig not found in vllm.config", "vllm/config")
    return ref


def _in_eplb_config(modules: Modules, config: ClassRef, fields: dict[str, ast.AnnAssign]) -> bool:
    name = "num_redundant_experts"
    if annotation := fields.get("eplb_config"):
        # ParallelConfig's own field stays until 0.11.2, but is None then
        inner = modules.class_of(config.module, dotted(annotation.annotation))
        if inner and name in _fields(inner.node):
            return True
    elif name in fields:
        return False
    raise Refusal(f"ParallelConfig has no {name}", config.where)


def _fields(node: ast.ClassDef) -> dict[str, ast.AnnAssign]:
    return {
        statement.target.id: statement
        for statement in node.body
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name)
    }


def _required(modules: Modules, name: str) -> Module:
    module = modules.get(name)
    if module is None:
        raise Refusal(f"module {name} not found", "", "Is this a vLLM of 0.9.2 or later?")
    return module
