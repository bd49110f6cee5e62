"""Loops over an expert mapping: they visit one expert's entries, and load all of its replicas."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy
from ..analysis.modules import Module
from ..analysis.syntax import assigned, dotted, parameters, source_lines, statements
from ..analysis.weights import ExpertLoop, Stop, TensorLoop
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import Insert, Replace, ReplaceArgument, SetLoop
from .names import check_free
from .plan import Draft


def plan_loop(draft: Draft, anatomy: Anatomy, found: ExpertLoop) -> None:
    """Make one loop fill every slot, at a cost that does not grow with the number of experts.

    Raises:
        Refusal: the loop, or what hands it the mapping, has a form that is not known.
    """
    draft.editable(found.method, found.loop)
    if found.stop is Stop.NEVER:
        _plan_exhaustive_loop(draft, anatomy, found)
    else:
        _plan_stopping_loop(draft, anatomy, found)


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
        module = draft.editable(hand.tensors.method, hand.call)
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
    made = [
        s
        for s, _ in statements(tensors.method.function)
        if any(dotted(t) == mapping for t in assigned(s)[0])
    ]
    if made and made[0].lineno > tensors.loop.lineno:
        raise Refusal(f"{mapping} is made inside the loop over the tensors", module.where(made[0]))
    check_free(module, tensors.method.function, "expert_params = candidates = None")
    draft.add(
        module,
        Insert(module.first_definition, render("expert_params.py")),
        Insert(module.paths[tensors.loop], f"expert_params = group_by_expert({mapping})\n"),
    )


def _flat(module: Module, node: ast.expr) -> str:
    """The source of an expression, its continuation lines indented as if it stood at the margin."""
    margin = " " * node.col_offset
    lines = [line.rstrip("\r\n") for line in source_lines(module.text(node))]
    return "\n".join([lines[0], *(line.removeprefix(margin) for line in lines[1:])])
