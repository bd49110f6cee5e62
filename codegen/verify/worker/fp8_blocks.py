"""fp8 weights with one scale for each block: written, and turned back into numbers."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any

import torch

BLOCK = 64
"""Rows and columns of a block: the tiny experts are 64 x 128, and of another scale in each."""
LARGEST = torch.finfo(torch.float8_e4m3fn).max
SCALE = "weight_scale_inv"


def others(tensors: Mapping[str, torch.Tensor], chosen: Callable[[str], bool]) -> list[str]:
    """The layers of a checkpoint that are not quantised, by every name that vLLM may ask for."""
    names = [
        name.removesuffix(".weight")
        for name, tensor in tensors.items()
        if name.endswith(".weight") and tensor.dim() == 2 and not chosen(name)
    ]
    # By the names of vLLM's fused layers too: not every class says what its layers are fused of.
    fused = {re.sub(r"\b[qkv]_proj$", "qkv_proj", name) for name in names}
    fused = {re.sub(r"\b(gate|up)_proj$", "gate_up_proj", name) for name in fused}
    # "": some classes give layers no name at all.
    return [*names, "", *sorted(fused - set(names))]


def config(tensors: Mapping[str, torch.Tensor], chosen: Callable[[str], bool]) -> dict[str, Any]:
    """quantization_config for a checkpoint of which only the chosen weights are quantised."""
    ignored = others(tensors, chosen)
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [BLOCK, BLOCK],
        # Which of the names is read depends on the release.
        "ignored_layers": ignored,
        "modules_to_not_convert": ignored,
    }


def quantised(
    tensors: Mapping[str, torch.Tensor], chosen: Callable[[str], bool]
) -> dict[str, torch.Tensor]:
    """The tensors with every chosen weight [rows, columns] as fp8, and its scales beside it."""
    out: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if not chosen(name):
            out[name] = tensor
            continue
        rows, columns = (size // BLOCK for size in tensor.shape)
        blocks = tensor.reshape(rows, BLOCK, columns, BLOCK)
        scale = blocks.abs().amax(dim=(1, 3)) / LARGEST
        small = blocks / scale[:, None, :, None]
        out[name] = small.reshape(tensor.shape).to(torch.float8_e4m3fn)
        out[name.removesuffix("weight") + SCALE] = scale
    return out


def numbers(weight: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    """float32 of a weight [rows, columns], by its scales [row blocks, column blocks] if it has."""
    if scale is None:
        return weight.float()
    rows, columns = weight.shape[0] // scale.shape[0], weight.shape[1] // scale.shape[1]
    return weight.float() * scale.repeat_interleave(rows, 0).repeat_interleave(columns, 1)
