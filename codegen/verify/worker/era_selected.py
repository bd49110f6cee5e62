"""Releases whose MoE method is given the experts that a router selected (from 0.16)."""

from __future__ import annotations

from typing import Any

from . import reference, tree


def applies(method: Any) -> bool:
    return tree.takes(method.apply, "topk_ids")


def adapt(method: Any) -> None:
    def apply(
        self: Any, layer: Any, x: Any, topk_weights: Any, topk_ids: Any, *_: Any, **__: Any
    ) -> Any:
        return reference.layer_experts(
            layer,
            x,
            topk_weights,
            topk_ids,
            layer.expert_map,
            bool(layer.apply_router_weight_on_input),
        )

    method.apply = apply
    # The CPU's own method is monolithic in some releases: it would route past EPLB.
    method.is_monolithic = property(lambda self: False)
