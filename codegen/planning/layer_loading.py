"""Models whose experts are loaded by vLLM's layer code, as from 0.25.0 on."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities
from ..analysis.layers import constant_argument
from ..analysis.modules import Modules
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
from ..rewrite.edits import AddImport, Insert
from .plan import Draft

_LAYER_LOADING_ARGUMENTS = (
    "routed_experts_cls",
    "ckpt_names",
    "ckpt_gate_proj_name",
    "ckpt_down_proj_name",
    "ckpt_up_proj_name",
)


def plan_layer_loading(
    draft: Draft, anatomy: Anatomy, modules: Modules, builds: Builds, offered: Capabilities
) -> None:
    """The layer code loads the experts: mend what it leaves out for fused tensors.

    It loads a tensor of one expert into all replicas of it, so the model hands it such tensors.
    Views of the fused ones cost no memory, and nothing of the layer code is overridden.
    """
    fused = offered.fused_loading
    if fused is None:
        raise Refusal("neither the model nor the layer code loads experts", anatomy.backbone.where)
    _check_layer_loading(anatomy)
    if fused.fills_replicas:
        return
    causal = anatomy.causal
    reached = modules.method(causal, "load_weights")
    if reached is None:
        raise Refusal(f"{causal.name} has no load_weights", causal.where)
    owner, method = reached
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
        raise Refusal("load_weights makes no AutoWeightsLoader", owner.module.where(method))
    transposed = constant_argument(builds, anatomy, "is_fused_checkpoint_transposed")
    if transposed is ...:
        raise Refusal(
            "whether fused tensors are transposed is not written in the constructors",
            anatomy.block.ref.module.where(anatomy.block.experts.call),
        )
    before = [s for s in method.body if s.lineno < anchor.lineno and not isinstance(s, Function)]
    behind = [c for s in method.body if s.lineno >= anchor.lineno for c in calls(s)]
    if any(
        isinstance(n, ast.Name) and n.id == names[0] for s in before for n in ast.walk(s)
    ) or not any(
        dotted(c.func).endswith(".load_weights") and names[0] in ast.unparse(c) for c in behind
    ):
        raise Refusal(f"what becomes of {names[0]} was not found", owner.module.where(method))
    module = causal.module
    init = causal.methods.get("__init__")
    inherited = owner != causal
    if not draft.can_edit(causal) or init is None:
        raise Refusal(f"{causal.name} has no constructor in a file of the family", causal.where)
    values = {
        "layer": fused.layer,
        "by_shape": fused.by_shape,
        "transposed": bool(transposed),
        "weights": "weights" if inherited else names[0],
        "redundant": _redundant(anatomy, builds),
    }
    draft.add(module, Insert(module.first_definition, render("split_fused_experts.py", **values)))
    if inherited:
        code = render("split_fused_method.py", **values)
        draft.add(
            module,
            Insert(module.paths[init], code, behind=True),
            AddImport("collections.abc", "Iterable"),
        )
    else:
        draft.add(module, Insert(module.paths[anchor], render("split_fused_call.py", **values)))


def _redundant(anatomy: Anatomy, builds: Builds) -> str:
    """R, where the causal-LM class can read it: a backbone of upstream's may know it."""
    name = "num_redundant_experts"
    for constructor in builds.constructors(anatomy.backbone):
        for statement, _ in statements(constructor.function):
            if any(self_attribute(t) == name for t in assigned(statement)[0]):
                return f"self.{anatomy.model}.{name}"
    return f"self.{name}"


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
