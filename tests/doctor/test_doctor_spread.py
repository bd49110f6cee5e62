"""Which numbers of redundant experts fit, and what they take."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.doctor.config import ModelConfig
from eplb_codegen.doctor.finding import Level
from eplb_codegen.doctor.memory import moe_layers, weights_of
from eplb_codegen.doctor.spread import Sizes, spread_findings

Config = Callable[..., ModelConfig]


@pytest.fixture
def findings(modules: Callable[[str], Modules], config: Config) -> Callable[..., Any]:
    def of(name: str, sizes: Sizes, version: str = "0.32.0", **changes: Any) -> Any:
        return spread_findings(modules(version), config(name, **changes), sizes)

    return of


@pytest.mark.parametrize(
    "tensor, data, redundant, level, says",
    [
        (4, 1, 0, Level.OK, r"E = 60, R = 0, EP size 4: 15 slots.*fit: 0, 4, 8, 12"),
        (4, 2, 4, Level.OK, r"E = 60, R = 4, EP size 8: 8 slots.*fit: 4, 12, 20, 28"),
        (8, None, 0, Level.PROBLEM, r"E = 60, R = 0, EP size 8.*Take R = 4; 12 and 20"),
        (8, None, None, Level.PROBLEM, r"E = 60, R = 0, EP size 8.*Take R = 4; 12 and 20"),
        (None, 8, 5, Level.PROBLEM, r"Take R = 12, or R = 4; 20 and 28"),
        (2, 8, 16, Level.PROBLEM, r"EP size 16.*Take R = 20, or R = 4; 36 and 52"),
        (1, 1, 0, Level.PROBLEM, r"EP size is 1.*config/parallel\.py:\d+"),
        (None, None, 3, Level.WARNING, r"60 logical experts.*--tensor-parallel-size"),
    ],
)
def test_spread(
    findings: Callable[..., Any],
    tensor: int | None,
    data: int | None,
    redundant: int | None,
    level: Level,
    says: str,
) -> None:
    first = findings("qwen1.5-moe-a2.7b", Sizes(tensor, data, 1, redundant))[0]
    assert first.level is level
    assert re.search(says, f"{first.message} {first.advice}"), first


def test_pipeline_stages_do_not_count(findings: Callable[..., Any]) -> None:
    first = findings("qwen1.5-moe-a2.7b", Sizes(4, 1, 3, 4))[0]
    assert "EP size 4" in first.message


def test_one_rank_is_refused_by_releases_that_do(findings: Callable[..., Any]) -> None:
    # vllm/config.py of 0.9.2 asks for no number of ranks, that of 0.10.0 does in line 2133
    assert findings("mixtral-8x7b", Sizes(1, 1), version="0.9.2")[0].level is Level.OK
    (found,) = findings("mixtral-8x7b", Sizes(1, 1), version="0.10.0")
    assert "(vllm/config.py:2133)" in found.message


@pytest.mark.parametrize(
    "name, sizes, says",
    [
        # 3 x 2048 x 1408 x 2 bytes = 16.5 MiB; 64/8 - 60//8 = 1 slot; 24 layers: 396 MiB
        (
            "qwen1.5-moe-a2.7b",
            Sizes(8, 1, 1, 4),
            "up to 396.0 MiB a rank: 1 slot x 24 MoE layers x 16.5 MiB",
        ),
        # 3 x 4096 x 1536 x 2 = 36 MiB; (128 + 16)/8 - 128/8 = 2 slots; 94 layers: 6768 MiB
        ("qwen3-235b-a22b", Sizes(8, 1, 1, 16), "6.61 GiB a rank: 2 slots x 94 MoE layers x 36.0"),
        # half of the layers: 3384 MiB
        ("qwen3-235b-a22b", Sizes(8, 1, 2, 16), "3.30 GiB a rank: 2 slots x 47 MoE layers x 36.0"),
        # 4 bits and 16 bits of scale for 32 weights: 3 x 2048 x 768 x 0.5625 = 2.53 MiB;
        # 2 slots, 48 layers: 243 MiB; one layer: 18 x 2.53 = 45.6 MiB
        (
            "qwen3-vl-30b-a3b-w4a16",
            Sizes(4, 2, 1, 16),
            "243.0 MiB a rank: 2 slots x 48 MoE layers x 2.5 MiB "
            "(4 bits a weight, groups of 32, gated experts); rearranging takes a buffer of one "
            "layer's slots as well, 45.6 MiB",
        ),
        # 3 x 5120 x 8192 x 2 = 240 MiB; (16 + 8)/8 - 16/8 = 1 slot; 48 layers: 11520 MiB
        ("llama-4-scout-17b-16e", Sizes(8, 1, 1, 8), "11.25 GiB a rank: 1 slot x 48 MoE layers"),
        # 3 x 4096 x 14336 x 2 = 336 MiB; (8 + 4)/4 - 8/4 = 1 slot; 32 layers: 10752 MiB
        ("mixtral-8x7b", Sizes(2, 2, 1, 4), "10.50 GiB a rank: 1 slot x 32 MoE layers x 336.0"),
    ],
)
def test_memory(findings: Callable[..., Any], name: str, sizes: Sizes, says: str) -> None:
    _, memory = findings(name, sizes)
    assert memory.level is Level.OK
    assert says in memory.message


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_size": None},
        {"moe_intermediate_size": None, "intermediate_size": None},
        {"num_hidden_layers": None},
        {"decoder_sparse_step": "2"},
        {"moe_layer_freq": [0, 1]},
    ],
)
def test_fields_that_lack_are_said(findings: Callable[..., Any], changes: dict[str, Any]) -> None:
    _, memory = findings("qwen1.5-moe-a2.7b", Sizes(4, 1, 1, 4), **changes)
    assert memory.level is Level.WARNING
    assert "R = 4 takes is not known" in memory.message


@pytest.mark.parametrize(
    "fields, layers",
    [
        ({}, "11111111"),
        ({"mlp_only_layers": [0, 7]}, "01111110"),  # qwen2_moe: layer in mlp_only_layers
        ({"decoder_sparse_step": 3}, "00100100"),  # qwen2_moe: (i + 1) % step == 0
        ({"first_k_dense_replace": 3}, "00011111"),  # deepseek_v2: i >= k
        ({"moe_layer_freq": 2, "first_k_dense_replace": 1}, "00101010"),  # and i % freq == 0
        ({"interleave_moe_layer_step": 2}, "01010101"),  # llama4: (i + 1) % step == 0
        ({"interleave_moe_layer_step": 0}, "00000000"),  # llama4: step > 0
        ({"moe_layer_freq": [0, 1, 1, 1, 0, 1, 1, 0]}, "01110110"),
        # ernie45_moe: start <= i <= end
        ({"moe_layer_start_index": 1, "moe_layer_end_index": 5}, "01111100"),
        ({"moe_layer_start_index": 1, "moe_layer_end_index": -1}, "01111111"),
    ],
)
def test_layers_with_experts(config: Config, fields: dict[str, Any], layers: str) -> None:
    found = moe_layers(config("mixtral-8x7b", num_hidden_layers=8, **fields))
    assert found == [c == "1" for c in layers]


@pytest.mark.parametrize(
    "quantization, size",
    [
        (None, 2),
        ({"quant_method": "fp8"}, 1),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, 1 + 4 / 16384),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, 0.5 + 2.5 / 128),
        ({"quant_method": "awq", "bits": 4, "group_size": -1}, 0.5),
        ({"quant_method": "gptq"}, None),
        ({"quant_method": "mxfp4"}, 0.5 + 1 / 32),
        ({"quant_method": "bitsandbytes"}, None),
        ({"quant_method": "compressed-tensors"}, None),
    ],
)
def test_bytes_of_a_weight(config: Config, quantization: Any, size: float | None) -> None:
    model = config("mixtral-8x7b", quantization_config=quantization)
    weights = weights_of(model)
    assert (weights.bytes if weights else None) == size


@pytest.mark.parametrize(
    "fields, experts",
    [
        ({"num_experts": 60}, 60),
        ({"n_routed_experts": 256, "num_local_experts": None}, 256),
        ({"moe_num_experts": [64, 64], "num_local_experts": None}, 64),
        ({"num_local_experts": 0}, None),
        ({"num_local_experts": True}, None),
    ],
)
def test_number_of_experts(config: Config, fields: dict[str, Any], experts: int | None) -> None:
    assert config("mixtral-8x7b", **fields).experts == experts


def test_a_dense_model(findings: Callable[..., Any]) -> None:
    (found,) = findings("mixtral-8x7b", Sizes(2, 1), num_local_experts=None)
    assert found.level is Level.PROBLEM
    assert "dense" in found.message
