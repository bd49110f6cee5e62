"""The tiny model of each family, as data: config.json and how its checkpoint is laid out.

A new family is one more `Family`. Every tiny model has a dense layer among its MoE layers where the
family has such layers, and is small enough that a forward pass takes milliseconds.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

LAYERS = 4
TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "use_cache": True,
    # transformers 4 reads the first, transformers 5 the second.
    "torch_dtype": "float32",
    "dtype": "float32",
}


@dataclass(frozen=True)
class Family:
    """How one family names and lays out what every family has."""

    architecture: str
    module: str
    """vLLM's module of that class: some releases do not register a text-only class."""
    config: Mapping[str, Any]
    experts: str = "num_experts"
    """The key of E in the (text) config."""
    moe_layers: tuple[int, ...] = tuple(range(LAYERS))
    inner: str = "moe_intermediate_size"
    dense_inner: str = "intermediate_size"
    shared_inner: str = ""
    """The key of the shared expert's size, where the family has a shared expert."""
    shared: str = "shared_expert"
    shared_gate: bool = False
    block: str = "mlp"
    router: str = "gate"
    prefix: str = "model."
    head: str = "lm_head.weight"
    qkv_bias: bool = False
    qk_norm: bool = False
    fused_transposed: bool = False
    """Fused tensors are [E, in, out] instead of [E, out, in]."""
    all_dense: Mapping[str, Any] = field(default_factory=dict)
    """Changes to the (text) config that leave no MoE layer."""
    vision: str = ""
    """Whose vision tower the checkpoint holds, "qwen3_vl" or "llama4", if any."""
    layouts: tuple[str, ...] = field(default=("per-expert", "fused"))

    def text(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        found: Mapping[str, Any] = config.get("text_config", config)
        return found

    def tiny(self, experts: int, dense: bool = False) -> dict[str, Any]:
        """config.json with E experts, in no layer if `dense`."""
        config = copy.deepcopy(dict(self.config))
        text = config.get("text_config", config)
        text[self.experts] = experts
        if dense:
            text.update(self.all_dense)
        config["architectures"] = [self.architecture]
        return config


_QWEN_MOE = {
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "intermediate_size": 192,
    "decoder_sparse_step": 1,
    "norm_topk_prob": True,
    "output_router_logits": False,
    "router_aux_loss_coef": 0.001,
    "use_sliding_window": False,
    "sliding_window": None,
    "max_window_layers": LAYERS,
    "attention_dropout": 0.0,
}
_LLAMA4_TEXT = {
    **TEXT,
    "model_type": "llama4_text",
    "head_dim": 32,
    "intermediate_size": 64,
    "intermediate_size_mlp": 192,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 256,
    "use_qk_norm": True,
    "no_rope_layers": [1, 1, 1, 0],
    "attn_temperature_tuning": False,
    "attention_bias": False,
    "attention_dropout": 0.0,
    "rope_scaling": None,
    "pad_token_id": 0,
    "router_jitter_noise": 0.0,
    "router_aux_loss_coef": 0.001,
    "output_router_logits": False,
}

_LLAMA4: dict[str, Any] = {
    "experts": "num_local_experts",
    "moe_layers": (1, 3),
    "all_dense": {"interleave_moe_layer_step": 2 * LAYERS},
    "inner": "intermediate_size",
    "dense_inner": "intermediate_size_mlp",
    "shared_inner": "intermediate_size",
    "block": "feed_forward",
    "router": "router",
    "fused_transposed": True,
}

FAMILIES: dict[str, Family] = {
    "qwen2_moe": Family(
        architecture="Qwen2MoeForCausalLM",
        module="qwen2_moe",
        config={
            **TEXT,
            **_QWEN_MOE,
            "model_type": "qwen2_moe",
            "shared_expert_intermediate_size": 128,
            "mlp_only_layers": [1],
            "norm_topk_prob": False,
            "qkv_bias": True,
        },
        moe_layers=(0, 2, 3),
        all_dense={"mlp_only_layers": list(range(LAYERS))},
        shared_inner="shared_expert_intermediate_size",
        shared_gate=True,
        qkv_bias=True,
    ),
    "qwen3_moe": Family(
        architecture="Qwen3MoeForCausalLM",
        module="qwen3_moe",
        config={
            **TEXT,
            **_QWEN_MOE,
            "model_type": "qwen3_moe",
            "head_dim": 32,
            "attention_bias": False,
            "mlp_only_layers": [1],
        },
        moe_layers=(0, 2, 3),
        all_dense={"mlp_only_layers": list(range(LAYERS))},
        qk_norm=True,
    ),
    "qwen3_vl_moe": Family(
        architecture="Qwen3VLMoeForConditionalGeneration",
        module="qwen3_vl_moe",
        config={
            "model_type": "qwen3_vl_moe",
            "text_config": {
                **TEXT,
                **_QWEN_MOE,
                "model_type": "qwen3_vl_moe_text",
                "head_dim": 32,
                "attention_bias": False,
                "mlp_only_layers": [],
                "rope_scaling": {
                    "rope_type": "default",
                    "mrope_section": [6, 5, 5],
                    "mrope_interleaved": True,
                },
            },
            "vision_config": {
                "model_type": "qwen3_vl_moe",
                "depth": 2,
                "hidden_size": 64,
                "hidden_act": "gelu_pytorch_tanh",
                "intermediate_size": 128,
                "num_heads": 4,
                "in_channels": 3,
                "out_hidden_size": 128,
                "patch_size": 16,
                "spatial_merge_size": 2,
                "temporal_patch_size": 2,
                "num_position_embeddings": 64,
                "deepstack_visual_indexes": [0, 1],
                "initializer_range": 0.02,
            },
            "image_token_id": 250,
            "video_token_id": 251,
            "vision_start_token_id": 252,
            "vision_end_token_id": 253,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "dtype": "float32",
        },
        all_dense={"mlp_only_layers": list(range(LAYERS))},
        prefix="model.language_model.",
        qk_norm=True,
        fused_transposed=True,
        vision="qwen3_vl",
    ),
    "llama4": Family(
        architecture="Llama4ForCausalLM",
        module="llama4",
        config=_LLAMA4_TEXT,
        **_LLAMA4,
    ),
    "mllama4": Family(
        architecture="Llama4ForConditionalGeneration",
        module="mllama4",
        config={
            "model_type": "llama4",
            "text_config": _LLAMA4_TEXT,
            "vision_config": {
                "model_type": "llama4_vision_model",
                "hidden_size": 64,
                "hidden_act": "gelu",
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_channels": 3,
                "intermediate_size": 256,
                "vision_output_dim": 128,
                "image_size": 28,
                "patch_size": 14,
                "norm_eps": 1e-5,
                "pixel_shuffle_ratio": 0.5,
                "projector_input_dim": 128,
                "projector_output_dim": 128,
                "multi_modal_projector_bias": False,
                "rope_theta": 10000,
                "vision_feature_layer": -1,
                "vision_feature_select_strategy": "default",
                "initializer_range": 0.02,
            },
            "image_token_index": 250,
            "boi_token_index": 251,
            "eoi_token_index": 252,
            "tie_word_embeddings": False,
            "torch_dtype": "float32",
            "dtype": "float32",
        },
        **{**_LLAMA4, "prefix": "language_model.model.", "head": "language_model.lm_head.weight"},
        vision="llama4",
    ),
}
