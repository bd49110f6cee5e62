"""Faults of native files mended by hand, in other ways than the tool does it.

As upstream may do it one day: small replacements in a release's text, one after the other.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import transforms_real as real
from transforms_real import LLAMA4_SERVED, QWEN3, QWEN3_VL_SERVED, Case

LAYER = "vllm/model_executor/layers/fused_moe/routed_experts.py"


class Mend(NamedTuple):
    """A pattern and its replacement in one file, and the fault that is gone with it."""

    fault: str
    path: str
    pattern: str
    new: str


def mended(version: str, mends: list[Mend]) -> dict[str, str]:
    """Path -> text of every file that they change."""
    texts: dict[str, str] = {}
    for mend in mends:
        before = texts.get(mend.path) or real.release(version).read(mend.path)
        texts[mend.path], count = re.subn(mend.pattern, mend.new, before)
        assert count, mend
    return texts


def _model(stem: str) -> str:
    return f"{real.FOLDER}{stem}.py"


def _stage(stem: str, example: str, update: str) -> list[Mend]:
    """No error for a stage without MoE layers: zeros from `getattr`, and no assertion."""
    read = rf"= {example}\.(n_\w+)"
    return [
        Mend("", _model(stem), rf"        if {example} is None:\n            raise .*\n", ""),
        Mend("", _model(stem), read, rf'= getattr({example}, "\1", 0)'),
        Mend("empty-stage", _model(stem), r"        assert self\.num_local_physical.*\n", update),
    ]


_BY_POSITION = r"(\n +)(loaded_experts = experts_shard\.unbind\(\))"
_EVERY_SLOT = (
    r"\1if is_fused:"
    r"\1    logical = self.moe_config.num_logical_experts"
    r"\1    slots = range(self.moe_config.num_experts)"
    r"\1    experts_shard = experts_shard[[slot % logical for slot in slots]]"
    r"\1\2"
)
_RESETS = Mend(
    "doubled-weights",
    _model("interfaces"),
    r"(\n +)(for layer_idx, layer in enumerate\(self\.moe_layers\):)",
    r"\1self.expert_weights = []\1\2",
)
_ALL_REPLICAS = Mend(
    "second-replica",
    _model("qwen3_vl_moe"),
    r"(\n +)if success:\n +name = name_mapped\n +break",
    r"\1if success:\1    loaded_params.add(name_mapped)",
)

BY_HAND: dict[str, tuple[str, Case, list[Mend]]] = {
    "the layer code fills the slots": (
        "0.33.0",
        QWEN3,
        [
            Mend("fused-replicas", LAYER, _BY_POSITION, _EVERY_SLOT),
            *_stage("qwen3_moe", "example_layer", ""),
            Mend(
                "other-stages",
                _model("qwen3_moe"),
                r"            if isinstance\(layer\.mlp, (\w+)\):\n                moe =",
                r'            if isinstance(getattr(layer, "mlp", None), \1):'
                "\n                moe =",
            ),
        ],
    ),
    "loops without an early end": (
        "0.12.0",
        QWEN3_VL_SERVED,
        [
            _ALL_REPLICAS,
            Mend(
                "fused-replicas",
                _model("qwen3_vl_moe"),
                r"(\n +)for expert_id in range\(num_experts\):\n +(\w+) = (\w+)\[expert_id\]",
                r"\1num_physical = num_experts + self.num_redundant_experts"
                r"\1for expert_id in range(num_physical):"
                r"\1    \2 = \3[expert_id % num_experts]",
            ),
            *_stage(
                "qwen3_vl_moe",
                "example_moe",
                "        if not self.moe_layers:\n            return\n",
            ),
            Mend(
                "other-stages",
                _model("qwen3_vl_moe"),
                r"(\n +)(if isinstance\(layer\.mlp, \w+\):\n +moe =)",
                r'\1if not hasattr(layer, "mlp"):\1    continue\1\2',
            ),
            _RESETS,
        ],
    ),
    "another variable, and properties": (
        "0.24.0",
        LLAMA4_SERVED,
        [
            Mend(
                "",
                _model("llama4"),
                r"(\n +)new_loaded_weight = new_loaded_weight\[local_expert_indices\]",
                r"\1logical_ids = local_expert_indices % self.num_experts"
                r"\1new_loaded_weight = new_loaded_weight[logical_ids]",
            ),
            Mend(
                "physical-index",
                _model("llama4"),
                r"\[\n +local_expert_indices\n +\]",
                "[local_expert_indices % self.num_experts]",
            ),
            Mend(
                "empty-stage",
                _model("llama4"),
                r"        assert self\.num_local_physical.*\n",
                "        if self.num_moe_layers == 0:\n            return\n",
            ),
            _RESETS,
            Mend(
                "",
                _model("mllama4"),
                r"        self\.num_(physical|local_physical|redundant)_experts = .*\n",
                "",
            ),
            Mend(
                "stale-counts",
                _model("mllama4"),
                r"(    def update_physical_experts_metadata)",
                "".join(
                    f"    @property\n    def num_{kind}_experts(self) -> int:\n"
                    f"        return self.language_model.num_{kind}_experts\n\n"
                    for kind in ("physical", "local_physical", "redundant")
                )
                + r"\1",
            ),
        ],
    ),
}
