"""Weight loading: the mapping's redundant experts, and every slot filled from every layout."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy
from ..analysis.capabilities import Capabilities
from ..analysis.loading import ExpertLoop, MappingCall, Method, Stop, TensorLoop
from ..analysis.modules import ClassRef, Module
from ..analysis.syntax import (
    Function,
    assigned,
    calls,
    dotted,
    keyword,
    parameters,
    self_attribute,
    statements,
)
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddArguments, Insert, Replace, ReplaceArgument, SetLoop
from .names import check_free, parallel_config
from .plan import Draft


def plan_loader(draft: Draft, anatomy: Anatomy, offered: Capabilities) -> None:
    """Fill every physical slot from the tensors of its logical expert.

    Raises:
        Refusal: what loads the experts was not found, or stands in a file that is not patched.
    """
    loading = anatomy.loading
    per_expert = [call for call in loading.mappings if not call.is_fused]
    if not per_expert and not loading.loops:
        _plan_layer_loading(draft, anatomy, offered)
        return
    if not per_expert or not loading.loops:
        what = "a loop over the expert mapping" if per_expert else "the expert mapping"
        raise Refusal(f"{what} was not found", anatomy.backbone.where)
    for call in per_expert:
        if not call.has_redundant:
            _plan_mapping(draft, anatomy, call, offered)
    for loop in loading.loops:
        _editable(draft, loop.method, loop.loop)
        if loop.stop is Stop.NEVER:
            _plan_exhaustive_loop(draft, anatomy, loop)
        else:
            _plan_stopping_loop(draft, anatomy, loop)
    _plan_fused(draft, anatomy, per_expert[0])


def _editable(draft: Draft, method: Method, node: ast.AST) -> Module:
    if not draft.can_edit(method.owner):
        raise Refusal(
            f"{method.owner.name}.{method.function.name} loads experts "
            "in a file that the family does not list",
            method.where(node),
        )
    return method.owner.module


def _plan_mapping(
    draft: Draft, anatomy: Anatomy, found: MappingCall, offered: Capabilities
) -> None:
    """num_redundant_experts= in the mapping call, and the attribute it is read from."""
    module = _editable(draft, found.method, found.call)
    if keyword(found.call, "num_redundant_experts") is not None:
        raise Refusal("num_redundant_experts is a constant here", module.where(found.call))
    draft.add(
        module,
        AddArguments(
            module.paths[found.statement],
            module.text(found.call.func),
            (("num_redundant_experts", "self.num_redundant_experts"),),
        ),
    )
    owner = found.method.owner
    if owner.name in (anatomy.causal.name, anatomy.served.name):
        return  # they have the attribute as members of the protocol
    _plan_redundant_attribute(draft, owner, offered)


def _plan_redundant_attribute(draft: Draft, owner: ClassRef, offered: Capabilities) -> None:
    init = owner.methods.get("__init__")
    if init is None or "vllm_config" not in parameters(init):
        raise Refusal(f"{owner.name} has no constructor that takes vllm_config", owner.where)
    for statement, _ in statements(init):
        if any(self_attribute(t) == "num_redundant_experts" for t in assigned(statement)[0]):
            raise Refusal(
                f"{owner.name} already sets num_redundant_experts", owner.module.where(statement)
            )
    anchor = next(
        (s for s in init.body if any(self_attribute(t) == "config" for t in assigned(s)[0])),
        init.body[-1],
    )
    if isinstance(anchor, ast.Return):
        raise Refusal(f"the constructor of {owner.name} ends early", owner.module.where(anchor))
    following = init.body[init.body.index(anchor) + 1 :]
    known = parallel_config(owner.module, init, following[0] if following else anchor)
    code = render(
        "backbone_settings.py",
        has_parallel_config=known,
        in_eplb_config=offered.in_eplb_config,
    )
    check_free(owner.module, init, code, known={"parallel_config"} if known else ())
    draft.add(owner.module, Insert(owner.module.paths[anchor], code, behind=True))


def _plan_stopping_loop(draft: Draft, anatomy: Anatomy, found: ExpertLoop) -> None:
    """A loop that ends at the first match: let that match load all replicas."""
    module = found.method.owner.module
    _plan_candidates(draft, anatomy, found)
    targets, value = assigned(found.load)
    if value is None and isinstance(found.load, ast.Expr):
        value = found.load.value
    if value is None or bool(targets) != (found.stop is Stop.SUCCESS):
        raise Refusal(
            "the weight loader is called in a way that is not known", module.where(found.load)
        )
    code = render(
        "replica_loads.py",
        success=dotted(targets[0]) if targets else "",
        expert_id=found.entry[2],
        load=_flat(module, value),
    )
    draft.add(module, Replace(module.paths[found.load], code))


def _plan_exhaustive_loop(draft: Draft, anatomy: Anatomy, found: ExpertLoop) -> None:
    """A loop that visits every entry fills every slot; let it visit those of one expert only."""
    if found.mapping not in parameters(found.method.function):
        _plan_candidates(draft, anatomy, found)
        return
    for hand in anatomy.loading.hands(found):
        module = _editable(draft, hand.tensors.method, hand.call)
        _plan_grouping(draft, anatomy, hand.tensors, hand.argument)
        path = module.paths[hand.statement]
        draft.add(
            module,
            Insert(path, _candidates(anatomy, hand.tensors, hand.argument)),
            ReplaceArgument(path, module.text(hand.call.func), hand.argument, "candidates"),
        )


def _plan_candidates(draft: Draft, anatomy: Anatomy, found: ExpertLoop) -> None:
    module = found.method.owner.module
    tensors = anatomy.loading.tensors_around(found)
    if tensors is None:
        raise Refusal(
            "no loop over the checkpoint's tensors around this one", module.where(found.loop)
        )
    _plan_grouping(draft, anatomy, tensors, found.mapping)
    path = module.paths[found.loop]
    draft.add(
        module,
        Insert(path, _candidates(anatomy, tensors, found.mapping)),
        SetLoop(path, "candidates"),
    )


def _candidates(anatomy: Anatomy, tensors: TensorLoop, mapping: str) -> str:
    switch = anatomy.loading.switch(tensors.method, mapping)
    return render(
        "candidates.py",
        mapping=mapping,
        name=tensors.name,
        fused_flag=switch.flag if switch else "",
    )


def _plan_grouping(draft: Draft, anatomy: Anatomy, tensors: TensorLoop, mapping: str) -> None:
    """The mapping grouped by expert, before the loop over the tensors."""
    module = tensors.method.owner.module
    anatomy.loading.check_mapping(tensors.method, mapping)
    check_free(module, tensors.method.function, "expert_params = candidates = None")
    first = next(
        node for node in module.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    )
    draft.add(
        module,
        Insert(module.paths[first], render("expert_params.py")),
        Insert(module.paths[tensors.loop], f"expert_params = group_by_expert({mapping})\n"),
    )


def _plan_fused(draft: Draft, anatomy: Anatomy, per_expert: MappingCall) -> None:
    """A physical expert takes its logical expert's part of a fused tensor."""
    for found in anatomy.loading.ranges:
        module = _editable(draft, found.method, found.loop)
        count = module.text(found.num_experts)
        if not _has_redundant_attribute(anatomy, found.method):
            raise Refusal(
                f"{found.method.owner.name} does not know the number of redundant experts",
                module.where(found.loop),
            )
        draft.add(
            module,
            SetLoop(module.paths[found.loop], f"range({count} + self.num_redundant_experts)"),
            Replace(
                module.paths[found.part],
                render(
                    "fused_part.py",
                    part=dotted(assigned(found.part)[0][0]),
                    tensor=module.text(found.tensor.value),
                    index=found.expert_id,
                    num_experts=count,
                ),
            ),
        )
    num_experts = keyword(per_expert.call, "num_experts")
    for piece in anatomy.loading.slices:
        module = _editable(draft, piece.method, piece.statement)
        if num_experts is None or not dotted(num_experts).startswith("self."):
            raise Refusal(
                "the number of experts is not an attribute", module.where(per_expert.call)
            )
        draft.add(
            module,
            Replace(
                module.paths[piece.statement],
                render(
                    "local_part.py",
                    part=dotted(assigned(piece.statement)[0][0]),
                    tensor=module.text(piece.subscript.value),
                    indices=dotted(piece.subscript.slice),
                    num_experts=dotted(num_experts),
                ),
            ),
        )


def _has_redundant_attribute(anatomy: Anatomy, method: Method) -> bool:
    """Whether the backbone has `num_redundant_experts`, set by us or by upstream."""
    return any(
        dotted(value) == "self.num_redundant_experts"
        for call in anatomy.loading.mappings
        if (value := keyword(call.call, "num_redundant_experts")) is not None
    ) or any(not c.has_redundant and not c.is_fused for c in anatomy.loading.mappings)


def _plan_layer_loading(draft: Draft, anatomy: Anatomy, offered: Capabilities) -> None:
    """The layer code loads the experts: mend what it leaves out for fused tensors.

    It loads a tensor of one expert into all replicas of it, so the model hands it such tensors.
    Views of the fused ones cost no memory, and nothing of the layer code is overridden.
    """
    fused = offered.fused_loading
    if fused is None:
        raise Refusal("neither the model nor the layer code loads experts", anatomy.backbone.where)
    if fused.fills_replicas:
        return
    _check_layer_loading(anatomy)
    causal = anatomy.causal
    method = causal.methods.get("load_weights")
    if method is None:
        raise Refusal(f"{causal.name} has no load_weights", causal.where)
    anchor = next(
        (
            s
            for s, _ in statements(method)
            if any(dotted(c.func) == "AutoWeightsLoader" for c in calls(s))
        ),
        None,
    )
    names = [n for n in parameters(method) if n != "self"]
    if anchor is None or not names:
        raise Refusal("load_weights makes no AutoWeightsLoader", causal.module.where(method))
    transposed = keyword(anatomy.block.experts.call, "is_fused_checkpoint_transposed")
    if transposed is not None and not isinstance(transposed, ast.Constant):
        raise Refusal(
            "whether fused tensors are transposed is not written at the call",
            anatomy.block.ref.module.where(transposed),
        )
    before = [s for s in method.body if s.lineno < anchor.lineno and not isinstance(s, Function)]
    behind = [c for s in method.body if s.lineno >= anchor.lineno for c in calls(s)]
    if any(
        isinstance(n, ast.Name) and n.id == names[0] for s in before for n in ast.walk(s)
    ) or not any(
        dotted(c.func).endswith(".load_weights") and names[0] in ast.unparse(c) for c in behind
    ):
        raise Refusal(f"what becomes of {names[0]} was not found", causal.module.where(method))
    module = causal.module
    values = {
        "layer": fused.layer,
        "by_shape": fused.by_shape,
        "transposed": bool(transposed and transposed.value),
        "weights": names[0],
    }
    first = next(
        node for node in module.tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)
    )
    draft.add(
        module,
        Insert(module.paths[first], render("split_fused_experts.py", **values)),
        Insert(module.paths[anchor], render("split_fused_call.py", **values)),
    )


def _check_layer_loading(anatomy: Anatomy) -> None:
    """Refuse what comes between the checkpoint and the layer code, or changes that code."""
    call = anatomy.block.experts.call
    home = anatomy.block.ref.module
    for name in _LAYER_LOADING_ARGUMENTS:
        if keyword(call, name) is not None:
            raise Refusal(f"experts built with {name}= load in their own way", home.where(call))
    for method in anatomy.loading.methods:
        if method.function.name == "load_weights":
            for node in ast.walk(method.function):
                if isinstance(node, ast.Constant) and "experts" in str(node.value):
                    raise Refusal(
                        f"{method.owner.name}.load_weights treats experts' weights itself",
                        method.where(node),
                    )
            for statement, _ in statements(method.function):
                if isinstance(statement, ast.For):
                    raise Refusal(
                        f"{method.owner.name}.load_weights loops, but over no expert mapping",
                        method.where(statement),
                    )
    for owner in (anatomy.causal, anatomy.backbone):
        for node in owner.node.body:
            value = assigned(node)[1]
            if isinstance(value, ast.Call) and any(
                isinstance(new, ast.Constant) and "experts" in str(new.value)
                for table in ast.walk(value)
                if isinstance(table, ast.Dict)
                for new in table.values
            ):
                raise Refusal(f"{owner.name} renames weights to experts'", owner.module.where(node))


_LAYER_LOADING_ARGUMENTS = (
    "routed_experts_cls",
    "ckpt_names",
    "ckpt_gate_proj_name",
    "ckpt_down_proj_name",
    "ckpt_up_proj_name",
)


def _flat(module: Module, node: ast.expr) -> str:
    """The source of an expression, its continuation lines indented as if it stood at the margin."""
    margin = " " * node.col_offset
    lines = module.text(node).splitlines()
    return "\n".join([lines[0], *(line.removeprefix(margin) for line in lines[1:])])
