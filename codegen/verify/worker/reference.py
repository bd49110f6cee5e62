"""The kernels that a CPU needs a stand-in for, in plain torch: written here and nowhere else."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.nn.functional import scaled_dot_product_attention, silu

from . import fp8_blocks


def attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    heads: int,
    kv_heads: int,
    scale: float,
) -> torch.Tensor:
    """Causal attention over one sequence; [tokens, heads * size] in and out."""
    tokens = query.shape[0]

    def split(x: torch.Tensor, count: int) -> torch.Tensor:
        return x.reshape(tokens, count, -1).transpose(0, 1)

    groups = heads // kv_heads
    out = scaled_dot_product_attention(
        split(query, heads),
        split(key, kv_heads).repeat_interleave(groups, 0),
        split(value, kv_heads).repeat_interleave(groups, 0),
        is_causal=True,
        scale=scale,
    )
    return out.transpose(0, 1).reshape(tokens, -1)


_observers: list[Callable[[Any, torch.Tensor], None]] = []


@contextlib.contextmanager
def observing(observer: Callable[[Any, torch.Tensor], None]) -> Iterator[None]:
    """Have each MoE layer tell which physical experts its tokens go to, past what EPLB records."""
    _observers.append(observer)
    try:
        yield
    finally:
        _observers.remove(observer)


def observed(layer: Any, ids: torch.Tensor) -> None:
    """Tell the observers what a layer's experts are given."""
    for observer in _observers:
        observer(layer, ids)


def layer_experts(
    layer: Any,
    hidden: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
) -> torch.Tensor:
    observed(layer, ids)
    if hasattr(layer, "w13_weight_scale"):
        raise NotImplementedError("no reference for experts whose scales are not those of blocks")
    scales = [getattr(layer, f"{name}_{fp8_blocks.SCALE}", None) for name in ("w13", "w2")]
    return experts(
        hidden, layer.w13_weight, layer.w2_weight, weights, ids, expert_map, weight_on_input, scales
    )


def experts(
    hidden: torch.Tensor,
    w13: torch.Tensor,
    w2: torch.Tensor,
    weights: torch.Tensor,
    ids: torch.Tensor,
    expert_map: torch.Tensor | None,
    weight_on_input: bool = False,
    scales: Sequence[torch.Tensor | None] = (None, None),
) -> torch.Tensor:
    """This rank's share of the MoE output: experts without a slot here add nothing.

    `scales` are those of the blocks of w13 and w2, where these are fp8.
    """
    local = ids.long() if expert_map is None else expert_map[ids.long()].long()
    total = torch.zeros(hidden.shape[0], w2.shape[1], dtype=torch.float32, device=hidden.device)
    for slot in range(w13.shape[0]):
        token, column = (local == slot).nonzero(as_tuple=True)
        if not token.numel():
            continue
        up_weight, down_weight = (
            fp8_blocks.numbers(held[slot], None if scale is None else scale[slot])
            for held, scale in zip((w13, w2), scales, strict=True)
        )
        weight = weights[token, column].float().unsqueeze(1)
        x = hidden[token].float()
        gate, up = ((x * weight if weight_on_input else x) @ up_weight.t()).chunk(2, dim=-1)
        value = (silu(gate) * up) @ down_weight.t()
        total.index_add_(0, token, value if weight_on_input else value * weight)
    return total.to(hidden.dtype)


def topk_softmax(
    logits: torch.Tensor, k: int, renormalize: bool, scoring: str = "softmax"
) -> tuple[torch.Tensor, torch.Tensor]:
    if scoring not in ("softmax", "sigmoid"):
        raise NotImplementedError(f"no reference for the scoring function {scoring!r}")
    scores = logits.float().softmax(-1) if scoring == "softmax" else logits.float().sigmoid()
    weights, ids = scores.topk(k, dim=-1)
    if renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights, ids


def to_physical(
    ids: torch.Tensor,
    load: torch.Tensor,
    logical_to_physical: torch.Tensor,
    replicas: torch.Tensor,
    record: bool = True,
    real_tokens: int | None = None,
) -> torch.Tensor:
    """Choose a replica of every logical id by its token's number, and count tokens per replica.

    The choice depends on nothing but the token's position: every tensor-parallel rank, which routes
    the same tokens, must choose alike.
    """
    flat = ids.long().flatten()
    token = torch.arange(flat.numel(), device=ids.device) // ids.shape[-1]
    # Knuth's multiplicative hash, so that neighbouring tokens take different replicas.
    choice = ((token * 2654435769) & 0xFFFFFFFF) % replicas[flat].clamp(min=1)
    physical = logical_to_physical[flat, choice]
    if record:
        counted = physical if real_tokens is None else physical[: real_tokens * ids.shape[-1]]
        load.scatter_add_(0, counted.long(), torch.ones_like(counted).to(load.dtype))
    return physical.reshape(ids.shape).to(ids.dtype)
