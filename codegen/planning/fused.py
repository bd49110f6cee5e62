"""Fused tensors in the model's own loader: they hold logical experts, slots are physical ones."""

from __future__ import annotations

import ast
import copy

from ..analysis.anatomy import Anatomy
from ..analysis.syntax import assigned, dotted, keyword
from ..analysis.weights import LocalSlice, MappingCall
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import Replace, SetLoop
from .plan import Draft


def plan_fused(draft: Draft, anatomy: Anatomy, per_expert: MappingCall) -> None:
    """A physical expert takes its logical expert's part of a fused tensor."""
    for found in anatomy.loading.ranges:
        if found.wraps:
            continue
        module = draft.editable(found.method, found.loop)
        count = module.text(found.num_experts)
        if not dotted(found.num_experts):
            raise Refusal(f"{count} is not the number of experts by name", found.where)
        if not _has_redundant_attribute(anatomy):
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
        if piece.wraps:
            continue
        module = draft.editable(piece.method, piece.statement)
        if num_experts is None or not dotted(num_experts).startswith("self."):
            raise Refusal(
                "the number of experts is not an attribute", module.where(per_expert.call)
            )
        targets, value = assigned(piece.statement)
        assert value is not None
        plain = value is piece.subscript
        code = render(
            "local_part.py",
            part=dotted(targets[0]),
            tensor=module.text(piece.subscript.value) if plain else "",
            indices=dotted(piece.subscript.slice),
            num_experts=dotted(num_experts),
            value="" if plain else _logical(value, piece, dotted(num_experts)),
        )
        draft.add(module, Replace(module.paths[piece.statement], code))


def _logical(value: ast.expr, piece: LocalSlice, num_experts: str) -> str:
    """An expression that takes experts out of a tensor on its way, by logical ids."""

    class ToLogical(ast.NodeTransformer):
        def visit_Subscript(self, node: ast.Subscript) -> ast.AST:
            if ast.dump(node) != ast.dump(piece.subscript):
                return self.generic_visit(node)
            ids = ast.parse(f"{dotted(node.slice)} % {num_experts}", mode="eval").body
            return ast.Subscript(node.value, ids, node.ctx)

    return ast.unparse(ToLogical().visit(copy.deepcopy(value)))


def _has_redundant_attribute(anatomy: Anatomy) -> bool:
    """Whether the backbone has `num_redundant_experts`, set by us or by upstream."""
    return any(
        dotted(value) == "self.num_redundant_experts"
        for call in anatomy.loading.mappings
        if (value := keyword(call.call, "num_redundant_experts")) is not None
    ) or any(not c.has_redundant and not c.is_fused for c in anatomy.loading.mappings)
