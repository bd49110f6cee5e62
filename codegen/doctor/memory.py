"""What the redundant experts of a model take on a rank."""

from __future__ import annotations

from typing import Any, NamedTuple

from ..analysis.quantization import quantization_of
from .config import ModelConfig

GIB = 2**30


class Weights(NamedTuple):
    """What a weight of an expert takes, scales and zero points included."""

    bytes: float
    kind: str
    """In words: "bfloat16", "4 bits, groups of 32"."""


class Cost(NamedTuple):
    """Of one slot, and how many layers have such slots on one rank."""

    slot_bytes: float
    layers: int
    weights: Weights


def cost(config: ModelConfig, stages: int) -> Cost | str:
    """What a slot takes on a rank, or what the configuration does not tell.

    An expert has three matrices of hidden x intermediate weights (gate, up and down). Of the
    pipeline stages the one with the most MoE layers counts.
    """
    hidden, inner = config.number("hidden_size"), config.intermediate_size
    if hidden is None or inner is None:
        return "the configuration names no hidden_size or no size of an expert"
    if not isinstance(hidden, int) or hidden <= 0 or inner <= 0:
        return "the sizes in the configuration are not positive"
    layers = moe_layers(config)
    if layers is None:
        return "the configuration does not tell which layers have experts"
    weights = weights_of(config)
    if weights is None:
        return "what this quantisation takes for a weight"
    size = -(-len(layers) // stages) if stages > 0 else len(layers)
    most = max(sum(layers[i : i + size]) for i in range(len(layers) - size + 1))
    return Cost(3 * hidden * inner * weights.bytes, most, weights)


def moe_layers(config: ModelConfig) -> list[bool] | None:
    """For each layer whether it has experts, as vLLM's model files decide.

    The fields: mlp_only_layers and decoder_sparse_step (Qwen), first_k_dense_replace and
    moe_layer_freq (DeepSeek), interleave_moe_layer_step (Llama 4), moe_layer_interval and
    moe_layer_start_index (Ernie). Without any of them every layer has.
    """
    count = config.number("num_hidden_layers")
    if count is None or count <= 0:
        return None
    frequency = config.text.get("moe_layer_freq", 1)
    if isinstance(frequency, list):
        return [bool(f) for f in frequency] if len(frequency) == count else None
    if not isinstance(frequency, int) or frequency <= 0:
        return None
    dense = config.text.get("mlp_only_layers") or ()
    steps = {
        name: config.number(name) if config.text.get(name) is not None else 1
        for name in ("decoder_sparse_step", "interleave_moe_layer_step", "moe_layer_interval")
    }
    if any(step is None for step in steps.values()):
        return None
    first = max(
        config.number("first_k_dense_replace") or 0, config.number("moe_layer_start_index") or 0
    )
    last = config.number("moe_layer_end_index")
    return [
        i not in dense
        and all(step and (i + 1) % step == 0 for step in steps.values())
        and i >= first
        and (last is None or last < 0 or i <= last)
        and i % frequency == 0
        for i in range(count)
    ]


def weights_of(config: ModelConfig) -> Weights | None:
    """What a weight of an expert takes; None where this is not known."""
    quantization = quantization_of(config.whole)
    if quantization is None:
        # vLLM serves checkpoints in float32 in 16 bits too, unless --dtype says otherwise
        return Weights(2, "16 bits a weight")
    method = quantization["quant_method"]
    if method == "fp8":
        block = quantization.get("weight_block_size")
        if isinstance(block, list) and len(block) == 2 and all(map(_positive, block)):
            return Weights(1 + 4 / (block[0] * block[1]), f"fp8, scales of {block[0]} x {block[1]}")
        return Weights(1, "fp8")
    if method in ("gptq", "awq"):
        bits, group = quantization.get("bits"), quantization.get("group_size")
        if not _positive(bits):
            return None
        return _grouped(bits, group, 2, zeros=True)
    if method == "mxfp4":
        return _grouped(4, 32, 1, zeros=False)
    if method == "compressed-tensors":
        return _compressed(quantization)
    return None


def _compressed(quantization: dict[str, Any]) -> Weights | None:
    groups = quantization.get("config_groups")
    if not isinstance(groups, dict) or len(groups) != 1:
        return None
    arguments = next(iter(groups.values())).get("weights") or {}
    bits, group = arguments.get("num_bits"), arguments.get("group_size")
    if not _positive(bits):
        return None
    # groups of float weights have scales of one byte (NVFP4, MXFP4)
    scale = 1 if arguments.get("type") == "float" else 2
    return _grouped(bits, group, scale, zeros=not arguments.get("symmetric", True))


def _grouped(bits: Any, group: Any, scale: int, zeros: bool) -> Weights:
    if not _positive(group):  # one scale a row
        return Weights(bits / 8, f"{bits} bits a weight")
    zero = bits / 8 if zeros else 0
    return Weights(bits / 8 + (scale + zero) / group, f"{bits} bits a weight, groups of {group}")


def _positive(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def readable(size: float) -> str:
    """A size in GiB, or in MiB below one."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / 2**20:.1f} MiB"
