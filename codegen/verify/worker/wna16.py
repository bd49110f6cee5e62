"""4-bit experts with a scale for each group of inputs, as compressed-tensors packs them.

vLLM has two classes for them, which are tried apart: one for a Triton kernel, which repacks what
was loaded to bytes, and one for Marlin, whose order of weights only its kernel knows. All that the
first does runs as it is; with the second weights stay in the order they were loaded in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from . import fp8_blocks, reference, tree

GROUPS = {"wna16": 16, "wna16-marlin": 32}
"""Inputs of a group: Marlin takes no groups of 16 (`check_moe_marlin_supports_layer`)."""
PACK = 8
"""Numbers in an int32, the first in its lowest bits, each with 8 added to it."""
NAMES = ("CompressedTensorsWNA16MoEMethod", "CompressedTensorsWNA16MarlinMoEMethod")
MODULE = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors_moe"

Tensors = dict[str, torch.Tensor]


def config(
    tensors: Mapping[str, torch.Tensor], chosen: Callable[[str], bool], group: int
) -> dict[str, Any]:
    """quantization_config for a checkpoint of which only the chosen weights are quantised."""
    weights = {
        "num_bits": 4,
        "type": "int",
        "symmetric": True,
        "strategy": "group",
        "group_size": group,
        "dynamic": False,
        "actorder": None,
        "observer": "minmax",
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "ignore": [name for name in fp8_blocks.others(tensors, chosen) if name],
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


def quantised(
    tensors: Mapping[str, torch.Tensor], chosen: Callable[[str], bool], group: int
) -> Tensors:
    """The tensors with every chosen weight [rows, columns] packed, its scales and shape beside."""
    out: Tensors = {}
    for name, tensor in tensors.items():
        if not chosen(name):
            out[name] = tensor
            continue
        rows, columns = tensor.shape
        groups = tensor.reshape(rows, columns // group, group)
        scale = groups.abs().amax(dim=2) / 7
        whole = (groups / scale.unsqueeze(2)).round().clamp(-8, 7).reshape(rows, -1, PACK)
        shifts = torch.arange(PACK) * 4
        packed = ((whole.to(torch.int64) + 8) << shifts).sum(dim=2)
        # as the int32 of the same bits
        packed = torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)
        out[f"{name}_packed"], out[f"{name}_scale"] = packed, scale
        out[f"{name}_shape"] = torch.tensor([rows, columns])
    return out


def loaded(experts: Mapping[str, torch.Tensor]) -> Tensors:
    """What a layer holds once it is loaded: [E, in, out], where a checkpoint has [E, out, in]."""
    if "w13_weight_packed" not in experts:
        return dict(experts)
    return {
        name: tensor if name.endswith("_shape") else tensor.transpose(1, 2).contiguous()
        for name, tensor in experts.items()
    }


def kept(module: Any, experts: Mapping[str, torch.Tensor]) -> Tensors:
    """What a layer holds of that once it is processed: the Triton kernel reads [E, out, in]."""
    if "w13_weight_packed" not in experts or type(module.quant_method).__name__ != NAMES[0]:
        return dict(experts)
    out = dict(experts)
    for part in ("w13", "w2"):
        packed, scale = (experts[f"{part}_weight_{kind}"] for kind in ("packed", "scale"))
        out[f"{part}_weight_packed"] = packed.transpose(1, 2).contiguous().view(torch.uint8)
        out[f"{part}_weight_scale"] = scale.transpose(1, 2).contiguous()
    return out


def numbers(packed: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """float32 [E, out, in] of bytes [E, out, in / 2] by scales [E, out, groups]."""
    halves = torch.stack([packed & 15, packed >> 4], dim=-1).flatten(2).float() - 8
    return halves * scale.float().repeat_interleave(halves.shape[2] // scale.shape[2], 2)


def adapt() -> None:
    """The methods' own code runs, and in the end a kernel that turns weights into numbers."""
    module = tree.module(MODULE)
    methods = [method for name in NAMES if (method := getattr(module, name, None))]
    if not methods or not tree.takes(methods[0].apply, "router_logits"):
        raise LookupError("this vLLM has no WNA16 experts that verify has a reference for")
    for method in methods:
        _note_layer(method)
    tree.replace([f"{tree.MOE}:fused_experts"], _fused_experts)
    tree.replace([f"{MODULE}:fused_marlin_moe"], _fused_marlin_moe)
    tree.replace([f"{MODULE}:marlin_moe_permute_scales"], lambda s, *_, **__: s.clone())
    tree.replace([f"{MODULE}:marlin_make_workspace_new"], lambda *_, **__: torch.empty(0))
    # an attribute of vllm._custom_ops, which every quantisation shares
    tree.need(f"{MODULE}:ops").gptq_marlin_moe_repack = lambda w, *_, **__: w.clone()


_layers: list[Any] = []


def _note_layer(method: Any) -> None:
    real = method.apply

    def apply(self: Any, layer: Any, *given: Any, **named: Any) -> Any:
        _layers.append(layer)
        try:
            return real(self, layer, *given, **named)
        finally:
            _layers.pop()

    method.apply = apply


def _fused_experts(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    topk_weights: Any,
    topk_ids: Any,
    apply_router_weight_on_input: bool = False,
    expert_map: Any = None,
    quant_config: Any = None,
    **_: Any,
) -> Any:
    numbers_of = (numbers(w1, quant_config.w1_scale), numbers(w2, quant_config.w2_scale))
    chosen = (topk_weights, topk_ids)
    return _answer(hidden_states, numbers_of, chosen, expert_map, apply_router_weight_on_input)


def _fused_marlin_moe(
    hidden_states: Any,
    w1: Any,
    w2: Any,
    bias1: Any,
    bias2: Any,
    w1_scale: Any,
    w2_scale: Any,
    gating_output: Any,
    topk_weights: Any,
    topk_ids: Any,
    apply_router_weight_on_input: bool = False,
    expert_map: Any = None,
    g_idx1: Any = None,
    g_idx2: Any = None,
    sort_indices1: Any = None,
    sort_indices2: Any = None,
    **_: Any,
) -> Any:
    order = (g_idx1, g_idx2, sort_indices1, sort_indices2)
    if any(index.shape != (w1.shape[0], 0) for index in order):
        raise NotImplementedError("no reference for experts in the order of their activations")
    numbers_of = [
        numbers(w.transpose(1, 2).contiguous().view(torch.uint8), scale.transpose(1, 2))
        for w, scale in ((w1, w1_scale), (w2, w2_scale))
    ]
    chosen = (topk_weights, topk_ids)
    return _answer(hidden_states, numbers_of, chosen, expert_map, apply_router_weight_on_input)


def _answer(
    hidden: torch.Tensor,
    numbers_of: Sequence[torch.Tensor],
    chosen: tuple[torch.Tensor, torch.Tensor],
    expert_map: torch.Tensor | None,
    weight_on_input: bool,
) -> torch.Tensor:
    """`numbers_of` w13 and w2; `chosen` are weights and ids, [tokens, top-k] each."""
    w13, w2 = numbers_of
    weights, ids = chosen
    reference.observed(_layers[-1], ids)
    return reference.experts(hidden, w13, w2, weights, ids, expert_map, weight_on_input)
