"""Repairs of a model that has EPLB by itself: each fault mended where it stands."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..analysis.anatomy import Anatomy
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities
from ..analysis.modules import Modules
from ..analysis.placeholders import layer_name
from ..analysis.soundness import Fault, Kind
from ..analysis.syntax import assigned, self_attribute
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddImport, Insert, Replace
from .block import plan_even_spread
from .loader import plan_loader
from .plan import Draft

_LOADING = {Kind.FUSED, Kind.PHYSICAL_INDEX, Kind.SECOND_REPLICA}


def plan_repairs(
    draft: Draft,
    found: Anatomy,
    modules: Modules,
    builds: Builds,
    offered: Capabilities,
    faults: Iterable[Fault],
) -> None:
    """Mend the faults of one served class.

    Raises:
        Refusal: a fault stands in a file that is not patched, or where its repair does not fit.
    """
    known = tuple(faults)
    if any(f.kind in _LOADING for f in known):
        plan_loader(draft, found, modules, builds, offered)
    for fault in known:
        if fault.kind not in _LOADING:
            _plan_protocol_repair(draft, found, fault)
    plan_even_spread(draft, found, builds, offered)


def _plan_protocol_repair(draft: Draft, found: Anatomy, fault: Fault) -> None:
    method = fault.method
    module = method.owner.module
    if not draft.can_edit(method.owner):
        raise Refusal(f"{fault.kind.what}, in a file that the family does not list", fault.where)
    path = module.paths[fault.node]
    if fault.kind is Kind.REACH and not isinstance(fault.node, ast.For):
        loop = next(
            s
            for s in method.function.body
            if layer_name(s, found.layers) and s.lineno > fault.node.lineno
        )
        code = "self.num_moe_layers = len(self.moe_layers)\n"
        draft.add(module, Insert(module.paths[loop], code, behind=True))
    elif fault.kind is Kind.REACH:
        assert isinstance(fault.node, ast.For)
        first = module.paths[fault.node.body[0]]
        layer = layer_name(fault.node, found.layers)
        draft.add(
            module,
            Insert(first, render("missing_layer.py", layer=layer)),
            AddImport(".utils", "PPMissingLayer"),
        )
    elif fault.kind is Kind.STAGE and isinstance(fault.node, ast.Raise):
        _check_only_members_follow(fault)
        draft.add(module, Replace(path, render("empty_stage.py")))
    elif fault.kind is Kind.STAGE:
        draft.add(module, Insert(path, render("empty_stage_update.py")))
    elif fault.kind is Kind.STALE:
        assert found.wrapper is not None
        code = render("wrapper_counts.py", language_model=found.wrapper.attribute)
        draft.add(module, Insert(path, code, behind=True))
    elif fault.node is method.function:
        # the protocol's own method appends: another one before the method that is there
        code = render("moe_methods.py", state_setting="appends", updates_metadata=False, experts="")
        draft.add(module, Insert(path, code))
    else:
        first = module.paths[method.function.body[0]]
        draft.add(module, Insert(first, render("clear_expert_weights.py")))


def _check_only_members_follow(fault: Fault) -> None:
    """Where a constructor ends early, nothing else may be left undone."""
    function = fault.method.function
    behind = [s for s in function.body if s.lineno > fault.node.lineno]
    for statement in behind:
        targets = assigned(statement)[0]
        if not targets or not all(self_attribute(t).startswith("num_") for t in targets):
            raise Refusal(
                f"more than its numbers of experts is set behind this in {function.name}",
                fault.method.where(statement),
            )
    if not any(isinstance(s, ast.If) and fault.node in s.body for s in function.body):
        raise Refusal(f"{function.name} raises this in some cases only", fault.where)
