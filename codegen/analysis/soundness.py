"""What is wrong with a model that supports EPLB by itself: each fault, and where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from enum import Enum
from typing import NamedTuple

from ..errors import Refusal
from .anatomy import Anatomy, is_native
from .builds import Builds
from .capabilities import Capabilities, StateSetting
from .layers import splits_fused
from .modules import MODELS, ClassRef, Modules
from .placeholders import asks_placeholder, layer_name
from .syntax import (
    Function,
    assigned,
    calls,
    dotted,
    is_empty,
    names,
    own_calls,
    parameters,
    self_attribute,
    statements,
)
from .weights import Method, Stop

_UPDATE = "update_physical_experts_metadata"
_SET_STATE = "set_eplb_state"


class Kind(Enum):
    """A kind of fault: its name, what is wrong, and what that does to the user."""

    FUSED = (
        "fused-replicas",
        "redundant experts are not filled from fused tensors",
        "their slots hold whatever memory held, and tokens are routed there from the first step on",
    )
    PHYSICAL_INDEX = (
        "physical-index",
        "physical ids index a fused tensor of logical experts",
        "loading ends in an IndexError on the rank that holds the redundant experts",
    )
    SECOND_REPLICA = (
        "second-replica",
        "loading an expert ends at its first replica on the rank",
        "where a rank holds an expert twice, the other slot holds whatever memory held",
    )
    STAGE = (
        "empty-stage",
        "a pipeline stage without MoE layers raises",
        "the server does not start, or ends when the number of ranks changes",
    )
    REACH = (
        "other-stages",
        "layers of other pipeline stages are taken for layers of this one",
        "under pipeline parallelism it ends in an error",
    )
    STALE = (
        "stale-counts",
        "the wrapper keeps its old numbers of experts when they change",
        "after elastic scaling the load balancer works with wrong numbers",
    )
    DOUBLED = (
        "doubled-weights",
        "set_eplb_state called again lists every layer's weights twice",
        "where nobody empties the list before elastic scaling, the next rearrangement fails",
    )

    def __init__(self, slug: str, what: str, effect: str) -> None:
        self.slug = slug
        self.what = what
        self.effect = effect


class Fault(NamedTuple):
    """One fault; `node` is the statement of `method` that has it."""

    kind: Kind
    method: Method
    node: ast.stmt

    @property
    def where(self) -> str:
        return self.method.where(self.node)


def faults(
    modules: Modules, builds: Builds, found: Anatomy, offered: Capabilities
) -> tuple[Fault, ...]:
    """The faults of a served class that is, or wraps, a MixtureOfExperts.

    Raises:
        Refusal: how experts are loaded was not understood, so that nothing can be said about it.
    """
    holders = [found.causal]
    if found.wrapper is not None and is_native(modules, found.served):
        holders = [found.served]
        if _forwards(modules, found.served, found.wrapper.attribute):
            holders.append(found.causal)
    listed = [f for h in holders for f in _protocol_faults(modules, builds, found, offered, h)]
    return (*_loading_faults(modules, found, offered), *dict.fromkeys(listed))


def _loading_faults(modules: Modules, found: Anatomy, offered: Capabilities) -> Iterator[Fault]:
    loading = found.loading
    if not loading.loops and not [c for c in loading.mappings if not c.is_fused]:
        yield from _layer_loading_faults(modules, found, offered)
        return
    unmapped = [c for c in loading.mappings if not c.is_fused and not c.has_redundant]
    if unmapped or not loading.loops:
        what = "this mapping has no redundant experts" if unmapped else "no loop over the mapping"
        raise Refusal(what, unmapped[0].where if unmapped else found.backbone.where)
    for loop in loading.loops:
        if loop.stop in (Stop.FIRST, Stop.SUCCESS):
            yield Fault(Kind.SECOND_REPLICA, loop.method, loop.loop)
        hands = loading.hands(loop) if loop.mapping in parameters(loop.method.function) else []
        switched = [
            *(loading.switch(hand.tensors.method, hand.argument) for hand in hands),
            loading.switch(loop.method, loop.mapping),
        ]
        if any(switched) and not (loading.ranges or loading.slices):
            raise Refusal("how fused tensors are taken apart was not found", loop.where)
    for part in loading.ranges:
        if not part.wraps:
            yield Fault(Kind.FUSED, part.method, part.loop)
    for piece in loading.slices:
        if not piece.wraps:
            yield Fault(Kind.PHYSICAL_INDEX, piece.method, piece.statement)


def _layer_loading_faults(
    modules: Modules, found: Anatomy, offered: Capabilities
) -> Iterator[Fault]:
    fused = offered.fused_loading
    reached = modules.method(found.causal, "load_weights")
    if fused is None or reached is None:
        raise Refusal("what loads the experts was not found", found.backbone.where)
    method = Method(*reached)
    if not fused.fills_replicas and not splits_fused(modules, found.causal):
        yield Fault(Kind.FUSED, method, method.function)


def _forwards(modules: Modules, wrapper: ClassRef, attribute: str) -> bool:
    reached = modules.method(wrapper, _UPDATE)
    return reached is not None and any(
        dotted(c.func) == f"self.{attribute}.{_UPDATE}" for c in calls(reached[1])
    )


def _protocol_faults(
    modules: Modules, builds: Builds, found: Anatomy, offered: Capabilities, holder: ClassRef
) -> Iterator[Fault]:
    setting = list(_setting(modules, builds, holder))
    _check_members(modules, offered, holder, setting)
    for method in setting:
        yield from _unguarded(method, found.layers)
        yield from _counts_all(method, found.layers)
        yield from _raises_without(method)
    update = _own_method(modules, holder, _UPDATE)
    if update is not None:
        yield from _update_faults(update, found)
    yield from _state_faults(modules, found, offered, holder, update)


def _setting(modules: Modules, builds: Builds, holder: ClassRef) -> Iterator[Method]:
    """The constructors of a class, and the methods of its own that these call."""
    seen = set()
    for constructor in builds.constructors(holder):
        yield Method(constructor.owner, constructor.function)
        for call in calls(constructor.function):
            name = self_attribute(call.func)
            reached = _own_method(modules, holder, name) if name and name not in seen else None
            seen.add(name)
            if reached is not None:
                yield reached


def _check_members(
    modules: Modules, offered: Capabilities, holder: ClassRef, setting: list[Method]
) -> None:
    """Refuse a class that says it is a MixtureOfExperts, and has not what makes it one.

    As 0.33.0's MiMo-V2: vLLM passes over it, and nothing is balanced.
    """
    known = {name for method in setting for name in _always_set(method.function.body)}
    for owner in modules.lineage(holder):
        known |= {*owner.methods}  # properties
    # set_eplb_state sets these
    if missing := sorted(offered.protocol.members - known - {"expert_weights"}):
        raise Refusal(f"{holder.name} does not set {', '.join(missing)}", holder.where)


def _always_set(body: list[ast.stmt]) -> set[str]:
    """The attributes of `self` that are set however the branches go that do not end the method."""
    found: set[str] = set()
    for statement in body:
        found |= {self_attribute(t) for t in assigned(statement)[0]}
        if isinstance(statement, ast.With):
            found |= _always_set(statement.body)
        elif isinstance(statement, ast.If):
            ways = [b for b in (statement.body, statement.orelse) if not _ends(b)]
            if ways:
                found |= set.intersection(*map(_always_set, ways))
    return found


def _ends(body: list[ast.stmt]) -> bool:
    return bool(body) and isinstance(body[-1], ast.Return | ast.Raise)


def _own_method(modules: Modules, ref: ClassRef, name: str) -> Method | None:
    """A method that stands in a model file, and not in the protocol."""
    reached = modules.method(ref, name)
    if reached is None or reached[0].module.name == f"{MODELS}.interfaces":
        return None
    return Method(*reached) if reached[0].module.name.startswith(MODELS) else None


def _unguarded(method: Method, layers: str) -> Iterator[Fault]:
    """Loops over all layers that read an attribute of those that stand for other stages."""
    for loop, _ in statements(method.function):
        name = layer_name(loop, layers)
        if not name:
            continue
        assert isinstance(loop, ast.For)
        collects = any(
            isinstance(n, ast.Attribute) and n.attr in ("moe_layers", "moe_mlp_layers", "experts")
            for statement in loop.body
            for n in ast.walk(statement)
        )
        if collects and asks_placeholder(loop.body, name):
            yield Fault(Kind.REACH, method, loop)


def _counts_all(method: Method, layers: str) -> Iterator[Fault]:
    """A number of MoE layers that is that of the whole model: the loop that finds this stage's.

    Raises:
        Refusal: there is no such loop.
    """
    body = method.function.body
    setting = [
        (s, value)
        for s in body
        for targets, value in [assigned(s)]
        if value is not None and any(self_attribute(t) == "num_moe_layers" for t in targets)
    ]
    for statement, value in setting[-1:]:
        counted = value.args[0] if isinstance(value, ast.Call) and value.args else value
        known = dotted(counted).endswith((".moe_layers", ".num_moe_layers"))
        if known or isinstance(value, ast.Constant):
            continue
        if not any(layer_name(s, layers) and s.lineno > statement.lineno for s in body):
            raise Refusal("num_moe_layers is not that of this stage", method.where(statement))
        yield Fault(Kind.REACH, method, statement)


def _raises_without(method: Method) -> Iterator[Fault]:
    """`if example is None: raise ...`, the example being one of the MoE layers.

    Raises:
        Refusal: an example that may be None is read, and what comes of it was not understood.
    """
    body = method.function.body
    maybe_none = dict.fromkeys(
        dotted(t)
        for s in body
        for targets, value in [assigned(s)]
        if isinstance(value, ast.Constant) and value.value is None
        for t in targets
    )
    for name in (n for n in maybe_none if _is_example(method.function, n)):
        tested = False
        for statement in body:
            if isinstance(statement, ast.If) and name in names(statement.test):
                if isinstance(statement.body[-1], ast.Raise):
                    if not _is_none(statement.test, name):
                        raise Refusal("this is raised in some cases only", method.where(statement))
                    yield Fault(Kind.STAGE, method, statement.body[-1])
                tested |= isinstance(statement.body[-1], ast.Raise | ast.Return)
            elif isinstance(statement, ast.Assert) and name in names(statement):
                raise Refusal("a stage without MoE layers fails here", method.where(statement))
            elif not tested and any(
                isinstance(n, ast.Attribute) and dotted(n.value) == name
                for n in ast.walk(statement)
                if not isinstance(statement, ast.For)
            ):
                raise Refusal(
                    f"{name} is read without a look whether there is one", method.where(statement)
                )


def _is_none(test: ast.expr, name: str) -> bool:
    """`name is None`, or `not name`."""
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        return dotted(test.operand) == name
    return (
        isinstance(test, ast.Compare)
        and dotted(test.left) == name
        and isinstance(test.ops[0], ast.Is)
    )


def _is_example(function: Function, name: str) -> bool:
    """Whether the numbers of experts are read from what the name stands for."""
    return any(
        self_attribute(t) == "num_logical_experts"
        and value is not None
        and dotted(value).startswith(f"{name}.")
        for s, _ in statements(function)
        for targets, value in [assigned(s)]
        for t in targets
    )


def _update_faults(update: Method, found: Anatomy) -> Iterator[Fault]:
    body = update.function.body
    wrapper = found.wrapper
    forwarded = f"self.{wrapper.attribute}.{_UPDATE}" if wrapper else ""
    for statement in body:
        if any(dotted(c.func) == forwarded for c in own_calls(statement)):
            set_here = {self_attribute(t) for s in body for t in assigned(s)[0]}
            # or it is a property, which asks the language model
            set_here |= {*update.owner.methods}
            if "num_physical_experts" not in set_here:
                yield Fault(Kind.STALE, update, statement)
            return
    for statement in body:
        if isinstance(statement, ast.If) and isinstance(statement.body[-1], ast.Return):
            break
        if isinstance(statement, ast.Assert):
            # an empty stage counts no local experts
            yield Fault(Kind.STAGE, update, statement)
            break
    yield from _unguarded(update, found.layers)


def _state_faults(
    modules: Modules,
    found: Anatomy,
    offered: Capabilities,
    holder: ClassRef,
    update: Method | None,
) -> Iterator[Fault]:
    own = _own_method(modules, holder, _SET_STATE)
    if own is None:
        if offered.protocol.state_setting is StateSetting.APPENDS:
            if update is None:
                raise Refusal(f"{holder.name} has no {_UPDATE}", holder.where)
            yield Fault(Kind.DOUBLED, update, update.function)
        return
    if is_empty(own.function):
        raise Refusal(f"{holder.name}.{_SET_STATE} does nothing", own.where(own.function))
    body = own.function.body
    appends = [
        s for s in body if any(dotted(c.func) == "self.expert_weights.append" for c in calls(s))
    ]
    resets = any(
        self_attribute(t) == "expert_weights" for s in body for t in assigned(s)[0]
    ) or any(dotted(c.func) == "self.expert_weights.clear" for s in body for c in own_calls(s))
    if appends and not resets:
        yield Fault(Kind.DOUBLED, own, appends[0])
