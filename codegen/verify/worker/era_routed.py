"""Releases whose MoE method is given router logits, and has experts selected itself (to 0.15)."""

from __future__ import annotations

import inspect
from typing import Any

import torch

from . import reference, tree


def applies(method: Any) -> bool:
    return tree.takes(method.apply, "router_logits") and not tree.takes(method.apply, "topk_ids")


def adapt(method: Any) -> None:
    signature = inspect.signature(method.apply)

    def apply(*positional: Any, **named: Any) -> Any:
        given = signature.bind(*positional, **named).arguments
        self, layer, x = given["self"], given["layer"], given["x"]
        # The release's own selection: its replica choice, its recording of loads.
        chooser = given.get("router") or layer
        selects = chooser.select_experts
        options = {name: value for name, value in given.items() if tree.takes(selects, name)}
        if tree.takes(selects, "num_fused_shared_experts"):
            options["num_fused_shared_experts"] = getattr(layer, "num_fused_shared_experts", 0)
        if given.get("enable_eplb") and tree.takes(selects, "indices_type"):
            options["indices_type"] = getattr(self, "topk_indices_dtype", None) or torch.int64
        weights, ids = selects(hidden_states=x, **options)[:2]
        return reference.layer_experts(
            layer,
            x,
            weights,
            ids,
            layer.expert_map,
            bool(getattr(layer, "apply_router_weight_on_input", False)),
        )

    method.apply = apply
