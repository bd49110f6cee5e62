"""The plan for a quantisation method: experts in it that EPLB may move."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..analysis.modules import ClassRef, Modules
from ..analysis.moe_methods import (
    LAYERS,
    PROPERTY,
    MoEMethod,
    MoEMethods,
    Supports,
    alike,
    refusals,
)
from ..analysis.syntax import (
    Function,
    assigned,
    calls,
    dotted,
    keyword,
    parameters,
    statements,
)
from ..errors import Refusal
from ..families import Family
from ..render import render
from ..rewrite.edits import AddArguments, Insert, Remove, Replace
from .plan import Draft, FilePlan, Plan, State

SELECT = "select_experts"
STATE = (
    "enable_eplb",
    "expert_load_view",
    "logical_to_physical_map",
    "logical_replica_count",
)
"""What `FusedMoE.select_experts` needs to choose replicas, and `apply` is given: up to 0.11.2."""
_MAKES = ("torch.empty", "torch.ones", "torch.zeros", "torch.full")


def plan_method(modules: Modules, family: Family) -> Plan:
    """What is to be done for a quantisation method.

    Raises:
        Refusal: a part that a patch needs was not found.
    """
    methods = MoEMethods(modules)
    refs = [ref for name in family.methods if (ref := methods.find(name))]
    if not refs or refs[0].name != family.methods[0]:
        where = f"{LAYERS}/quantization"
        return Plan(family, State.ABSENT, f"{family.methods[0]} is not in {where}")
    judged = {ref: methods.judge(ref) for ref in refs}
    patched = [ref for ref in refs if _can_be_patched(methods, ref, judged[ref])]
    if not patched:
        state = State.REFUSES if judged[refs[0]].supports is Supports.NO else State.NATIVE
        return Plan(family, state, "; ".join(alike(judged.values())))
    if len({ref.path for ref in patched}) > 1:
        raise Refusal("the methods stand in several files", patched[1].where)
    module = patched[0].module
    _ = module.tree  # edits are placed in the whole file
    draft = Draft([module.path])
    for name in (ref.name for ref in patched):
        ref = modules.class_of(module, name)
        assert ref is not None
        _plan(draft, modules, ref)
    reason = f"vLLM refuses EPLB with it: {', '.join(ref.name for ref in patched)}"
    edits = tuple(draft.edits[module.path])
    return Plan(family, State.ADDED, reason, (FilePlan(module, edits, ()),))


def _can_be_patched(methods: MoEMethods, ref: ClassRef, judged: MoEMethod) -> bool:
    """Whether nothing but the method itself refuses EPLB, where it is given what EPLB needs."""
    apply = ref.methods.get("apply")
    return (
        judged.supports is Supports.NO
        and methods.admission.classes is None
        and apply is not None
        and any(refusals(apply))
    )


def _plan(draft: Draft, modules: Modules, ref: ClassRef) -> None:
    module, apply = ref.module, ref.methods["apply"]
    if PROPERTY in ref.methods:
        raise Refusal(
            f"{ref.name} has a {PROPERTY} of its own", module.where(ref.methods[PROPERTY])
        )
    missing = [name for name in STATE if name not in parameters(apply)]
    if missing:
        raise Refusal(f"{ref.name}.apply gets no {missing[0]}", module.where(apply))
    selecting = [
        (statement, path, call)
        for statement, path in statements(apply)
        if not isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try)
        for call in calls(statement)
        if dotted(call.func).rpartition(".")[2] == SELECT
    ]
    if len(selecting) != 1:
        raise Refusal(
            f"{ref.name}.apply calls {SELECT} {len(selecting)} times", module.where(apply)
        )
    statement, place, call = selecting[0]
    for other, _ in statements(apply):
        before = other.lineno < statement.lineno
        if len(place) > 1 or (before and isinstance(other, ast.Return)):
            raise Refusal(f"{ref.name}.apply chooses in some cases only", module.where(call))
        if set(map(dotted, assigned(other)[0])) & set(STATE):
            raise Refusal(f"{ref.name}.apply sets what it is given", module.where(other))
    given = [name for name in STATE if keyword(call, name) is not None]
    if given or any(k.arg is None for k in call.keywords):
        raise Refusal(f"{SELECT} is given {', '.join(given) or '**'}", module.where(call))
    _check_accepts(modules, ref, call)
    for refusal, path in refusals(apply):
        own = isinstance(refusal, ast.If) and (refusal.orelse or len(refusal.body) > 1)
        if len(path) > 1 or own:
            raise Refusal(f"{ref.name}.apply refuses EPLB in some cases", module.where(refusal))
        draft.add(module, Remove(module.paths[refusal]))
    draft.add(
        module,
        AddArguments(module.paths[statement], dotted(call.func), tuple((n, n) for n in STATE)),
    )
    _plan_tensors(draft, ref)
    last = module.paths[ref.node.body[-1]]
    draft.add(module, Insert(last, render("supports_eplb.py"), behind=True))


def _check_accepts(modules: Modules, ref: ClassRef, call: ast.Call) -> None:
    """The expert layer's function that chooses must take the state of EPLB."""
    layer = dotted(call.func).rpartition(".")[0]
    owner = modules.class_of(ref.module, layer)
    function = modules.method(owner, SELECT) if owner else None
    if function is None:
        raise Refusal(f"{layer}.{SELECT} not found", ref.module.where(call))
    missing = [name for name in STATE if name not in parameters(function[1])]
    if missing:
        raise Refusal(f"{SELECT} takes no {missing[0]}", function[0].module.where(function[1]))


def _plan_tensors(draft: Draft, ref: ClassRef) -> None:
    """Every parameter must be a tensor of experts, as a rearrangement moves them all.

    `FusedMoE.get_expert_weights` views each as (experts, -1). Empty ones of Marlin's are made
    attributes: whether every backend sends what has no bytes nobody need find out.
    """
    first = True
    for name in ("create_weights", "process_weights_after_loading"):
        function = ref.methods.get(name)
        if function is None and name == "create_weights":
            raise Refusal(f"{ref.name} inherits its {name}", ref.where)
        for statement, tensor in _made_parameters(function) if function else ():
            where = ref.module.where(statement)
            sizes = _sizes(tensor)
            if not sizes or dotted(sizes[0]) != "num_experts":
                raise Refusal(f"{ref.name} has a parameter that is not of experts", where)
            if not any(isinstance(s, ast.Constant) and s.value == 0 for s in sizes[1:]):
                continue
            target = next(map(dotted, assigned(statement)[0]), "")
            made = ref.module.text(tensor)
            # it is deleted before the new one is made
            if not target.startswith("layer.") or "layer." in made:
                raise Refusal(f"{ref.name} has an empty parameter", where)
            attribute = target.removeprefix("layer.")
            code = render("not_moved.py", first=first, name=attribute, tensor=made)
            draft.add(ref.module, Replace(ref.module.paths[statement], code))
            first = False


def _made_parameters(function: Function) -> Iterator[tuple[ast.stmt, ast.Call]]:
    """Each statement with a Parameter of a new tensor, and the call that makes the tensor."""
    for statement, _ in statements(function):
        if isinstance(statement, ast.If | ast.For | ast.While | ast.With | ast.Try):
            continue  # what is in it comes by itself
        for value in calls(statement):
            if not dotted(value.func).endswith("Parameter"):
                continue
            for tensor in [*value.args, *(k.value for k in value.keywords)]:
                if isinstance(tensor, ast.Call) and dotted(tensor.func) in _MAKES:
                    yield statement, tensor


def _sizes(tensor: ast.Call) -> list[ast.expr]:
    first = tensor.args[0] if tensor.args else None
    return first.elts if isinstance(first, ast.Tuple | ast.List) else tensor.args
