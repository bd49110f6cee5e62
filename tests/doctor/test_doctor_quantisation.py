"""Which quantisations EPLB runs with, release by release, against what people read in the sources.

Every cell says where it was read. Paths are below vllm/model_executor/layers of that release.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.analysis.moe_methods import MoEMethods, Supports
from eplb_codegen.analysis.quantization import Experts, answer
from eplb_codegen.source import find_source
from eplb_codegen.source.tree import SourceTree

LAYERS = "vllm/model_executor/layers"
QWEN3_30B = Experts(2048, 768, "silu", router_weight_on_input=False)


def compressed(bits: int, **weights: Any) -> dict[str, Any]:
    """A configuration of compressed-tensors with one group; `inputs` are its activations."""
    inputs = weights.pop("inputs", None)
    return {
        "quant_method": "compressed-tensors",
        "format": weights.pop("format", "pack-quantized"),
        "ignore": ["re:.*mlp.gate$", "lm_head"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": bits, "symmetric": True, "dynamic": False, **weights},
                "input_activations": inputs,
            }
        },
    }


W4A16 = compressed(4, type="int", strategy="group", group_size=32)
CONFIGS: dict[str, dict[str, Any] | None] = {
    "fp8": {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp.gate"],
    },
    "W4A16": W4A16,
    "GPTQ": {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "sym": True,
        "desc_act": False,
        "dynamic": {},
    },
    "AWQ": {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 128,
        "zero_point": True,
        "version": "gemm",
        "modules_to_not_convert": ["gate"],
    },
    "bitsandbytes": {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_use_double_quant": False,
        "bnb_4bit_quant_storage": "uint8",
        "llm_int8_skip_modules": None,
    },
    "none": None,
}

YES, NO, DEPENDS = Supports.YES, Supports.NO, Supports.DEPENDS
MATRIX = [
    # 0.10.0: fused_moe/layer.py:743-748 admits Fp8MoEMethod and UnquantizedFusedMoEMethod
    ("0.10.0", "fp8", YES, {"Fp8MoEMethod"}),  # quantization/fp8.py:145
    # quantization/compressed_tensors/compressed_tensors_moe.py:68-83; Marlin takes these sizes:
    # quantization/utils/marlin_utils.py:183-187, 2048 % 128 == 0 and 768 % max(64, 32) == 0
    ("0.10.0", "W4A16", NO, {"CompressedTensorsWNA16MarlinMoEMethod"}),
    # quantization/gptq_marlin.py:160 and 182-192; without Marlin gptq.py:115 has no MoE method
    ("0.10.0", "GPTQ", NO, {"GPTQMarlinMoEMethod"}),
    ("0.10.0", "AWQ", NO, {"AWQMoEMethod"}),  # quantization/awq_marlin.py:107 and 141-150
    ("0.10.0", "bitsandbytes", NO, {"BitsAndBytesMoEMethod"}),  # quantization/bitsandbytes.py:133
    ("0.10.0", "none", YES, {"UnquantizedFusedMoEMethod"}),  # fused_moe/layer.py:736
    # 0.11.2: fused_moe/layer.py:583 asks supports_eplb, False in fused_moe_method_base.py:81
    ("0.11.2", "fp8", YES, {"Fp8MoEMethod"}),  # quantization/fp8.py:304-311 and 1127
    # compressed_tensors_moe.py:139-161; supports_eplb is set at 1159 only, in W8A8Fp8
    ("0.11.2", "W4A16", NO, {"CompressedTensorsWNA16MarlinMoEMethod"}),
    # quantization/gptq_marlin.py:243-254, gptq.py:174-186; neither sets supports_eplb
    ("0.11.2", "GPTQ", NO, {"GPTQMarlinMoEMethod", "MoeWNA16Method"}),
    ("0.11.2", "AWQ", NO, {"AWQMoEMethod"}),  # quantization/awq_marlin.py:197-214
    ("0.11.2", "bitsandbytes", NO, {"BitsAndBytesMoEMethod"}),  # quantization/bitsandbytes.py:147
    ("0.11.2", "none", YES, {"UnquantizedFusedMoEMethod"}),  # unquantized_fused_moe_method.py:104
    # 0.12.0: fused_moe/layer.py:623 asks supports_eplb, False in fused_moe_method_base.py:86
    ("0.12.0", "fp8", YES, {"Fp8MoEMethod"}),  # quantization/fp8.py:325-334 and 1162
    # compressed_tensors_moe.py:150-170: Marlin where it takes the sizes, as it does with these
    # (marlin_utils.py:197-218); only the other class sets supports_eplb (2052)
    ("0.12.0", "W4A16", NO, {"CompressedTensorsWNA16MarlinMoEMethod"}),
    ("0.12.0", "GPTQ", NO, {"GPTQMarlinMoEMethod", "MoeWNA16Method"}),  # gptq_marlin.py:245-262
    ("0.12.0", "AWQ", NO, {"AWQMarlinMoEMethod"}),  # quantization/awq_marlin.py:200-219
    ("0.12.0", "bitsandbytes", NO, {"BitsAndBytesMoEMethod"}),  # quantization/bitsandbytes.py:147
    ("0.12.0", "none", YES, {"UnquantizedFusedMoEMethod"}),  # unquantized_fused_moe_method.py:104
    # 0.32.0: fused_moe/routed_experts.py:180-183, False in fused_moe_method_base.py:127
    ("0.32.0", "fp8", YES, {"Fp8MoEMethod"}),  # quantization/fp8.py:191-205 and 796
    # compressed_tensors_moe/compressed_tensors_moe.py:95-152; compressed_tensors_moe_wna16.py:562:
    # self.wna16_backend == WNA16MoEBackend.TRITON, chosen by GPU and --moe-backend
    ("0.32.0", "W4A16", DEPENDS, {"CompressedTensorsWNA16MoEMethod"}),
    # quantization/auto_gptq.py:214-257; the class at 450 does not set supports_eplb
    ("0.32.0", "GPTQ", NO, {"AutoGPTQMoEMethod"}),
    # quantization/auto_awq.py:263-286 and 337-361; the class at 525 does not set supports_eplb
    ("0.32.0", "AWQ", NO, {"AutoAWQMoEMethod"}),
    ("0.32.0", "bitsandbytes", NO, set()),  # not in quantization/__init__.py:14-47
    ("0.32.0", "none", YES, {"UnquantizedFusedMoEMethod"}),  # unquantized_fused_moe_method.py:65
]


def judge(modules: Modules, quantization: Any, experts: Experts = QWEN3_30B) -> Any:
    config = {"model_type": "qwen3_moe"}
    if quantization:
        config["quantization_config"] = quantization
    return answer(modules, config, experts)


@pytest.mark.parametrize("version, name, supports, classes", MATRIX)
def test_matrix(
    modules: Callable[[str], Modules],
    version: str,
    name: str,
    supports: Supports,
    classes: set[str],
) -> None:
    found = judge(modules(version), CONFIGS[name])
    assert (found.supports, {m.name for m in found.methods}) == (supports, classes), found
    for method in found.methods:
        lines = find_source(version=version).read(method.path).splitlines()
        assert lines[method.line - 1].startswith(f"class {method.name}(")


@pytest.mark.parametrize(
    "experts, supports, classes",
    [
        # compressed_tensors_moe.py:150-170 of 0.12.0 with marlin_utils.py:197-218
        (Experts(2048, 768, "silu", False), NO, {"MarlinMoE"}),
        (Experts(2048, 768, "silu", None), DEPENDS, {"MarlinMoE", "MoE"}),
        (Experts(), DEPENDS, {"MarlinMoE", "MoE"}),
        (Experts(2048, 800, "silu", False), YES, {"MoE"}),  # 800 % 64 != 0
        (Experts(2048, 768, "gelu", False), YES, {"MoE"}),
    ],
)
def test_the_sizes_of_experts_decide_on_the_class(
    modules: Callable[[str], Modules], experts: Experts, supports: Supports, classes: set[str]
) -> None:
    found = judge(modules("0.12.0"), W4A16, experts)
    names = {f"CompressedTensorsWNA16{c}Method" for c in classes}
    assert (found.supports, {m.name for m in found.methods}) == (supports, names)


FP8_CHANNEL = compressed(
    8,
    type="float",
    strategy="channel",
    format="float-quantized",
    inputs={"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True},
)
NVFP4 = compressed(
    4,
    type="float",
    strategy="tensor_group",
    group_size=16,
    format="nvfp4-pack-quantized",
    inputs={"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}
    | {"dynamic": "local", "symmetric": True},
)


@pytest.mark.parametrize(
    "version, quantization, supports, classes",
    [
        # compressed_tensors_moe.py:86-90: both classes, by GPU, and layer.py:743 admits neither
        (
            "0.10.0",
            FP8_CHANNEL,
            NO,
            {"CompressedTensorsW8A8Fp8MoECutlassMethod", "CompressedTensorsW8A8Fp8MoEMethod"},
        ),
        ("0.11.2", FP8_CHANNEL, YES, {"CompressedTensorsW8A8Fp8MoEMethod"}),  # :1159
        ("0.12.0", NVFP4, NO, {"CompressedTensorsW4A4Nvfp4MoEMethod"}),  # :195, not set
        # compressed_tensors_moe_w4a4_nvfp4.py:70
        ("0.32.0", NVFP4, DEPENDS, {"CompressedTensorsW4A4Nvfp4MoEMethod"}),
        # quantization/fp8.py:1007 of 0.14.0: TensorRT kernels raise an error with EPLB
        ("0.14.0", CONFIGS["fp8"], DEPENDS, {"Fp8MoEMethod"}),
        # quantization/fp8.py:953-967 of 0.16.0: the same, in the way that only they go
        ("0.16.0", CONFIGS["fp8"], DEPENDS, {"Fp8MoEMethod"}),
        # fused_moe/layer.py:738-741 of 0.9.2
        ("0.9.2", CONFIGS["none"], NO, {"UnquantizedFusedMoEMethod"}),
        ("0.9.2", CONFIGS["fp8"], YES, {"Fp8MoEMethod"}),
    ],
)
def test_other_cells(
    modules: Callable[[str], Modules],
    version: str,
    quantization: Any,
    supports: Supports,
    classes: set[str],
) -> None:
    found = judge(modules(version), quantization)
    assert (found.supports, {m.name for m in found.methods}) == (supports, classes), found


def test_exceptions_for_experts_leave_both_ways_open(modules: Callable[[str], Modules]) -> None:
    fp8 = {**CONFIGS["fp8"], "modules_to_not_convert": ["model.layers.3.mlp.experts"]}  # type: ignore[dict-item]
    found = judge(modules("0.11.2"), fp8)
    assert {m.name for m in found.methods} == {"Fp8MoEMethod", "UnquantizedFusedMoEMethod"}


def test_groups_that_do_not_tell_are_not_guessed(modules: Callable[[str], Modules]) -> None:
    two = {**W4A16, "config_groups": {**W4A16["config_groups"]}}
    two["config_groups"]["group_1"] = FP8_CHANNEL["config_groups"]["group_0"]
    found = judge(modules("0.32.0"), two)
    names = {m.name for m in found.methods}
    assert found.supports is DEPENDS
    assert names >= {"CompressedTensorsWNA16MoEMethod", "CompressedTensorsW8A8Fp8MoEMethod"}
    only = {**W4A16["config_groups"]["group_0"], "targets": ["re:.*self_attn.*"]}
    two["config_groups"] = {"group_0": FP8_CHANNEL["config_groups"]["group_0"], "group_1": only}
    assert judge(modules("0.32.0"), two).supports is YES


@pytest.mark.parametrize(
    "version, path, old, new, says",
    [
        (
            "0.12.0",
            "quantization/fp8.py",
            "elif isinstance(layer, FusedMoE):",
            "elif choose(layer):\n            return registry[type(layer)]\n        elif False:",
            "not understood in full",
        ),
        (
            "0.12.0",
            "fused_moe/layer.py",
            "if self.enable_eplb and not self.quant_method.supports_eplb:",
            "if self.enable_eplb and not admits(self.quant_method):",
            "what the expert layer asks",
        ),
        ("0.12.0", "quantization/__init__.py", "QuantizationMethods = ", "Methods = ", "not found"),
    ],
)
def test_what_is_not_understood_is_not_guessed(
    tmp_path: Path, version: str, path: str, old: str, new: str, says: str
) -> None:
    root = find_source(version=version).root
    for folder in (LAYERS, "vllm/config"):
        shutil.copytree(root / folder, tmp_path / folder, copy_function=os.link)
    file = tmp_path / LAYERS / path
    text = file.read_text()
    tree = SourceTree(tmp_path, version, "damaged")
    assert judge(Modules(tree), CONFIGS["fp8"]).supports is YES
    assert old in text
    file.unlink()
    file.write_text(text.replace(old, new))
    found = judge(Modules(tree), CONFIGS["fp8"])
    assert found.supports is Supports.UNKNOWN
    assert says in found.reason


def test_every_method_of_a_release(modules: Callable[[str], Modules]) -> None:
    def supporting(version: str) -> set[str]:
        every = MoEMethods(modules(version)).every()
        assert len(every) > 15
        assert "FusedMoEModularMethod" not in {m.name for m in every}  # asks the one it wraps
        return {m.name for m in every if m.supports is YES}

    # the only ones with `def supports_eplb` that returns True, the base's False
    assert supporting("0.11.2") == {
        "Fp8MoEMethod",
        "CompressedTensorsW8A8Fp8MoEMethod",
        "UnquantizedFusedMoEMethod",
    }
    assert supporting("0.12.0") - supporting("0.11.2") == {"CompressedTensorsWNA16MoEMethod"}
    assert supporting("0.10.0") == {"Fp8MoEMethod", "UnquantizedFusedMoEMethod"}
