"""Writes a tiny random checkpoint, and reads any checkpoint's experts back, without vLLM's loaders.

The reader is what slots are judged against: it shares no code with the loaders under test.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from . import fp8_blocks, tokenizer, wna16
from .families import Family

Tensors = dict[str, torch.Tensor]
Experts = dict[int, dict[str, torch.Tensor]]
"""Layer number -> vLLM's parameter name -> [E, ...]: what each logical expert must hold."""


def write(
    folder: Path,
    family: Family,
    experts: int,
    layout: str,
    seed: int,
    dense: bool = False,
    quantization: str | None = None,
) -> Path:
    """Write config.json and model.safetensors with E distinct experts; none at all if `dense`.

    With a `quantization` the experts' own weights, and nothing else, are in it: "fp8" with a scale
    for each block, or one of `wna16.GROUPS`.
    """
    config = family.tiny(experts, dense)
    moe_layers = () if dense else family.moe_layers
    tensors = _tensors(family, config, moe_layers, layout, seed)
    if quantization == "fp8":
        config["quantization_config"] = fp8_blocks.config(tensors, _is_own_weight)
        tensors = fp8_blocks.quantised(tensors, _is_own_weight)
    elif quantization is not None:
        group = wna16.GROUPS[quantization]
        config["quantization_config"] = wna16.config(tensors, _is_own_weight, group)
        tensors = wna16.quantised(tensors, _is_own_weight, group)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    if not family.vision:
        # Images would take a processor as well, and nothing here has any.
        text = family.text(config)
        tokenizer.write(folder, text["vocab_size"], text["bos_token_id"], text["eos_token_id"])
    save_file(tensors, str(folder / "model.safetensors"), metadata={"format": "pt"})
    return folder


class _Draw:
    """Random tensors big enough that every module visibly changes the output."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def matrix(self, *shape: int, gain: float = 1.0) -> torch.Tensor:
        return torch.randn(*shape, generator=self.generator) * (gain / shape[-1] ** 0.5)

    def vector(self, size: int, mean: float = 0.0) -> torch.Tensor:
        return mean + 0.1 * torch.randn(size, generator=self.generator)


def _tensors(
    family: Family, config: Mapping[str, Any], moe_layers: tuple[int, ...], layout: str, seed: int
) -> Tensors:
    draw, text = _Draw(seed), family.text(config)
    hidden, vocab = text["hidden_size"], text["vocab_size"]
    out: Tensors = {
        f"{family.prefix}embed_tokens.weight": draw.matrix(vocab, hidden, gain=hidden**0.5),
        f"{family.prefix}norm.weight": draw.vector(hidden, 1.0),
        family.head: draw.matrix(vocab, hidden),
    }
    for layer in range(text["num_hidden_layers"]):
        at = f"{family.prefix}layers.{layer}."
        out[f"{at}input_layernorm.weight"] = draw.vector(hidden, 1.0)
        out[f"{at}post_attention_layernorm.weight"] = draw.vector(hidden, 1.0)
        out.update(_attention(f"{at}self_attn.", family, text, draw))
        block = f"{at}{family.block}."
        if layer in moe_layers:
            out.update(_moe(block, family, text, draw, layout))
        else:
            out.update(_mlp(block, hidden, text[family.dense_inner], draw))
    if family.vision:
        tower = {"qwen3_vl": _qwen3_vl_vision, "llama4": _llama4_vision}[family.vision]
        out.update(tower(config["vision_config"], hidden, draw))
    return {name: tensor.contiguous() for name, tensor in out.items()}


def _attention(at: str, family: Family, text: Mapping[str, Any], draw: _Draw) -> Tensors:
    hidden, heads = text["hidden_size"], text["num_attention_heads"]
    size = text.get("head_dim", hidden // heads)
    rows = {"q": heads * size, "k": text["num_key_value_heads"] * size}
    rows["v"] = rows["k"]
    out = {f"{at}{n}_proj.weight": draw.matrix(r, hidden) for n, r in rows.items()}
    out[f"{at}o_proj.weight"] = draw.matrix(hidden, heads * size)
    if family.qkv_bias:
        out.update({f"{at}{n}_proj.bias": draw.vector(r) for n, r in rows.items()})
    if family.qk_norm:
        out.update({f"{at}{n}_norm.weight": draw.vector(size, 1.0) for n in "qk"})
    return out


def _mlp(at: str, hidden: int, inner: int, draw: _Draw) -> Tensors:
    return {
        f"{at}gate_proj.weight": draw.matrix(inner, hidden),
        f"{at}up_proj.weight": draw.matrix(inner, hidden),
        f"{at}down_proj.weight": draw.matrix(hidden, inner, gain=2.0),
    }


def _moe(at: str, family: Family, text: Mapping[str, Any], draw: _Draw, layout: str) -> Tensors:
    hidden, experts = text["hidden_size"], text[family.experts]
    each = [_mlp("", hidden, text[family.inner], draw) for _ in range(experts)]
    # A decided router: ties broken by rounding would look like a fault of the model.
    out = {f"{at}{family.router}.weight": draw.matrix(experts, hidden, gain=4.0)}
    if layout == "per-expert":
        out.update(
            {f"{at}experts.{e}.{name}": w for e, mlp in enumerate(each) for name, w in mlp.items()}
        )
    else:
        gate, up, down = (
            torch.stack([mlp[f"{name}_proj.weight"] for mlp in each])
            for name in ("gate", "up", "down")
        )
        gate_up = torch.cat([gate, up], dim=1)
        if family.fused_transposed:
            gate_up, down = gate_up.transpose(1, 2), down.transpose(1, 2)
        out.update({f"{at}experts.gate_up_proj": gate_up, f"{at}experts.down_proj": down})
    if family.shared_inner:
        out.update(_mlp(f"{at}{family.shared}.", hidden, text[family.shared_inner], draw))
        if family.shared_gate:
            out[f"{at}{family.shared}_gate.weight"] = draw.matrix(1, hidden)
    return out


class _Modules:
    """The tensors of common modules, under names that start alike."""

    def __init__(self, at: str, draw: _Draw) -> None:
        self.at, self.draw = at, draw
        self.out: Tensors = {}

    def linear(self, name: str, rows: int, columns: int, bias: bool = True) -> None:
        self.out[f"{self.at}{name}.weight"] = self.draw.matrix(rows, columns)
        if bias:
            self.out[f"{self.at}{name}.bias"] = self.draw.vector(rows)

    def norm(self, name: str, size: int) -> None:
        self.out[f"{self.at}{name}.weight"] = self.draw.vector(size, 1.0)
        self.out[f"{self.at}{name}.bias"] = self.draw.vector(size)


def _llama4_vision(vision: Mapping[str, Any], text_hidden: int, draw: _Draw) -> Tensors:
    """A vision tower is never run by the checks, but its weights must load."""
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    patch, entry = vision["patch_size"], vision["projector_input_dim"]
    make = _Modules("vision_model.", draw)
    make.linear("patch_embedding.linear", hidden, vision["num_channels"] * patch**2, bias=False)
    make.norm("layernorm_pre", hidden)
    make.norm("layernorm_post", hidden)
    for n in range(vision["num_hidden_layers"]):
        at = f"model.layers.{n}."
        make.norm(f"{at}input_layernorm", hidden)
        make.norm(f"{at}post_attention_layernorm", hidden)
        for name in "qkvo":
            make.linear(f"{at}self_attn.{name}_proj", hidden, hidden)
        make.linear(f"{at}mlp.fc1", inner, hidden)
        make.linear(f"{at}mlp.fc2", hidden, inner)
    make.linear("vision_adapter.mlp.fc1", entry, inner, bias=False)
    make.linear("vision_adapter.mlp.fc2", vision["projector_output_dim"], entry, bias=False)
    patches = (vision["image_size"] // patch) ** 2 + 1
    return {
        **make.out,
        "vision_model.class_embedding": draw.vector(hidden),
        "vision_model.positional_embedding_vlm": draw.matrix(patches, hidden),
        "multi_modal_projector.linear_1.weight": draw.matrix(
            text_hidden, vision["vision_output_dim"]
        ),
    }


def _qwen3_vl_vision(vision: Mapping[str, Any], text_hidden: int, draw: _Draw) -> Tensors:
    at = "model.visual."
    hidden, inner = vision["hidden_size"], vision["intermediate_size"]
    merged = hidden * vision["spatial_merge_size"] ** 2
    patch = vision["patch_size"]
    make = _Modules(at, draw)
    for n in range(vision["depth"]):
        make.norm(f"blocks.{n}.norm1", hidden)
        make.norm(f"blocks.{n}.norm2", hidden)
        make.linear(f"blocks.{n}.attn.qkv", 3 * hidden, hidden)
        make.linear(f"blocks.{n}.attn.proj", hidden, hidden)
        make.linear(f"blocks.{n}.mlp.linear_fc1", inner, hidden)
        make.linear(f"blocks.{n}.mlp.linear_fc2", hidden, inner)
    deepstack = [
        f"deepstack_merger_list.{n}" for n in range(len(vision["deepstack_visual_indexes"]))
    ]
    for name, size in [("merger", hidden), *((name, merged) for name in deepstack)]:
        make.norm(f"{name}.norm", size)
        make.linear(f"{name}.linear_fc1", merged, merged)
        make.linear(f"{name}.linear_fc2", text_hidden, merged)
    return {
        **make.out,
        f"{at}patch_embed.proj.weight": draw.matrix(
            hidden, vision["in_channels"], vision["temporal_patch_size"], patch, patch
        ),
        f"{at}patch_embed.proj.bias": draw.vector(hidden),
        f"{at}pos_embed.weight": draw.matrix(vision["num_position_embeddings"], hidden),
    }


_EXPERT = re.compile(
    r"\blayers\.(\d+)\.\w+\.experts\.(?:(\d+)\.)?(gate|up|down|gate_up)_proj(?:\.(\w+))?$"
)


def _is_own_weight(name: str) -> bool:
    """Whether this is the weight of one expert alone."""
    found = _EXPERT.search(name)
    return found is not None and found[2] is not None and found[4] == "weight"


def read_config(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


def read_experts(folder: Path, family: Family) -> Experts:
    """What every logical expert holds in this checkpoint, whichever layout it is in.

    Besides weights these are scales, under the names that vLLM gives to scales of blocks and of
    whole tensors.
    """
    single: dict[tuple[int, str, str], dict[int, torch.Tensor]] = {}
    parts: dict[tuple[int, str, str], torch.Tensor] = {}
    for name, tensor in _expert_tensors(folder):
        found = _EXPERT.search(name)
        assert found is not None
        layer, expert, part, kind = int(found[1]), found[2], found[3], found[4] or "weight"
        if expert is not None:
            single.setdefault((layer, part, kind), {})[int(expert)] = tensor
        else:
            transposed = family.fused_transposed and kind == "weight"
            parts[layer, part, kind] = tensor.transpose(1, 2) if transposed else tensor
    for key, by_expert in single.items():
        parts[key] = torch.stack([by_expert[e] for e in range(len(by_expert))])
    out: Experts = {}
    for layer, kind in sorted({(layer, kind) for layer, _, kind in parts}):
        held = {part: t for (n, part, k), t in parts.items() if (n, k) == (layer, kind)}
        if kind.endswith("_shape") and "gate" in held:
            out.setdefault(layer, {})[f"w13_{kind}"] = held["gate"]  # the same as that of up
        elif gate_up := _gate_up(held):
            out.setdefault(layer, {})[f"w13_{kind}"] = gate_up[0]
        if "down" in held:
            out.setdefault(layer, {})[f"w2_{kind}"] = held["down"]
    return {layer: wna16.loaded(experts) for layer, experts in out.items()}


def _gate_up(held: Mapping[str, torch.Tensor]) -> list[torch.Tensor]:
    """Gate above up, as vLLM holds them: [E, 2 x rows, ...]; [E, 2] where each has one number."""
    if "gate_up" in held:
        return [held["gate_up"]]
    if "gate" not in held or "up" not in held:
        return []
    if held["gate"].dim() == 1:
        return [torch.stack([held["gate"], held["up"]], dim=1)]
    return [torch.cat([held["gate"], held["up"]], dim=1)]


def _expert_tensors(folder: Path) -> Iterator[tuple[str, torch.Tensor]]:
    files: list[Path] = sorted(folder.glob("*.safetensors"))
    for path in files:
        with safe_open(str(path), "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 - not a dict
                if _EXPERT.search(name):
                    yield name, opened.get_tensor(name)
