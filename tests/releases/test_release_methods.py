"""Quantisation methods: what their patch is, to the line, and what is refused."""

from __future__ import annotations

import re
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.analysis.moe_methods import MoEMethods
from eplb_codegen.families import family
from eplb_codegen.generate import Generator, Result
from eplb_codegen.source import Overlay
from test_release_style import changed_lines

TARGET = family("compressed_tensors_wna16")
PATH = "vllm/model_executor/layers/quantization/compressed_tensors/compressed_tensors_moe.py"
STATE = ("enable_eplb", "expert_load_view", "logical_to_physical_map", "logical_replica_count")
EMPTY = ("w13_weight_g_idx", "w2_weight_g_idx", "w13_g_idx_sort_indices", "w2_g_idx_sort_indices")
PATCHED = ["0.11.1", "0.11.2"]


def generate(release: Any, text: str | None = None) -> Result:
    texts = {} if text is None else {PATH: text}
    return Generator(Overlay.of(release.tree, texts)).generate(TARGET)


@pytest.mark.parametrize("version", PATCHED)
def test_the_whole_patch(the_release: Any, version: str) -> None:
    (file,) = the_release[version].results[TARGET.name].files
    lines = [(line[0], line[1:].strip()) for line in changed_lines(file)]
    removed = [line for sign, line in lines if sign == "-"]
    added = [line for sign, line in lines if sign == "+" and line]
    for name in TARGET.methods:
        assert f'"EPLB not supported for `{name}` yet."' in removed
        removed.remove(f'"EPLB not supported for `{name}` yet."')
    # the refusals, and what makes parameters of tensors that are empty
    rest = {"if enable_eplb:", "raise NotImplementedError(", ")", "", "requires_grad=False,"}
    rest |= {f"layer.{name} = torch.nn.Parameter(" for name in EMPTY}
    rest |= {"torch.empty((num_experts, 0), dtype=torch.int32, device=device),"}
    assert set(removed) <= rest
    assert removed.count("if enable_eplb:") == 2
    assert sorted(line for line in added if line.endswith(",")) == sorted(
        f"{name}={name}," for name in STATE * 2
    )
    assert added.count("def supports_eplb(self) -> bool:") == added.count("return True") == 2
    assert [line for line in added if line.startswith("del ")] == [
        f"del layer.{name}" for name in EMPTY
    ]
    assert len(added) <= 32 and len(removed) <= 32


@pytest.mark.parametrize("version", PATCHED)
def test_no_other_method_is_changed(the_release: Any, version: str) -> None:
    release = the_release[version]
    (file,) = release.results[TARGET.name].files
    tree = Overlay.of(release.tree, {PATH: file.patched})
    before, after = (
        {m.name: m.supports.value for m in MoEMethods(Modules(t)).every()}
        for t in (release.tree, tree)
    )
    assert {n: (before[n], after[n]) for n in before if before[n] != after[n]} == dict.fromkeys(
        TARGET.methods, ("no", "yes")
    )


def test_the_class_is_found_wherever_it_stands(the_release: Any) -> None:
    release = the_release["0.11.2"]
    text = release.tree.read(PATH)
    shorter = text.replace("CompressedTensorsWNA16MarlinMoEMethod", "SomethingElse")
    result = generate(release, shorter)
    assert result.state.value == "added by us"
    assert result.reason == f"vLLM refuses EPLB with it: {TARGET.methods[0]}"
    gone = text.replace("class CompressedTensorsWNA16MoEMethod", "class SomethingElse")
    assert generate(release, gone).state.value == "file absent"


TRITON = "class CompressedTensorsWNA16MoEMethod"
DAMAGE = {
    "a state that is not given": (r"logical_replica_count: torch.Tensor \| None = None,\n", ""),
    "a refusal in some cases": (
        r"( +)if enable_eplb:\n( +raise NotImplementedError\(\n.*\n +\)\n)",
        r"\1if self.num_bits == 4:\n\1    if enable_eplb:\n\1        raise ValueError\n",
    ),
    "chosen twice": (
        r"( +)topk_weights, topk_ids, _ = FusedMoE.select_experts\(",
        r"\1FusedMoE.select_experts(x)\n\g<0>",
    ),
    "chosen by something else": (r"FusedMoE\.select_experts\(", "self.select_experts("),
    "chosen by hand": (r"FusedMoE\.select_experts\(", "choose("),
    "its state given already": (
        r"(indices_type=self.topk_indices_dtype,)",
        r"\1 enable_eplb=enable_eplb,",
    ),
    "everything handed on": (r"(indices_type=self.topk_indices_dtype),", r"\1, **extra,"),
    "a parameter of all experts": (r"torch.empty\(num_experts, 2\)", "torch.empty(2)"),
    "an answer of its own": (
        r"(    def apply\()",
        r"    @property\n    def supports_eplb(self) -> bool:\n        return False\n\n\1",
    ),
    "a refusal with another side": (
        r"(?s)( +)(if enable_eplb:\n +raise NotImplementedError\(.*?\n +\)\n)",
        r"\1\2\1else:\n\1    x = x.contiguous()\n",
    ),
    "a way round the choice": (
        r"( +)(topk_weights, topk_ids, _ = FusedMoE.select_experts\()",
        r"\1if self.num_bits == 8:\n\1    return x\n\1\2",
    ),
    "a state that is changed": (
        r"( +)(topk_weights, topk_ids, _ = FusedMoE.select_experts\()",
        r"\1enable_eplb = False\n\1\2",
    ),
    "a parameter that is registered at once": (
        r"( +)(layer.a13_scale = None)",
        r'\1layer.register_parameter("x", torch.nn.Parameter(torch.full((4,), 0)))\n\1\2',
    ),
    "weights made by its base": (r"def create_weights", "def create_other_weights"),
    "cut off": (r"(?s)indices_type=self.topk_indices_dtype,.*", ""),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_damaged(the_release: Any, name: str) -> None:
    release = the_release["0.11.2"]
    head, found, rest = release.tree.read(PATH).partition(TRITON)
    pattern, new = DAMAGE[name]
    changed, count = re.subn(pattern, new, rest)
    assert found and count >= 1
    result = generate(release, f"{head}{found}{changed}")
    assert (result.state.value, result.files) == ("not recognised", ()), result.reason
    assert f"{PATH}:" in result.reason or "fused_moe/layer.py:" in result.reason


@pytest.mark.parametrize("version", ["0.9.2", "0.10.0", "0.11.0"])
def test_where_the_layer_admits_classes_by_name_that_is_the_reason(
    the_release: Any, version: str
) -> None:
    result = the_release[version].results[TARGET.name]
    assert "the expert layer admits Fp8MoEMethod" in result.reason
    assert "vllm/model_executor/layers/fused_moe/layer.py:" in result.reason
    assert result.reason.count("only") == 1


def test_what_marlin_lacks_where_the_other_is_native(the_release: Any) -> None:
    reason = the_release["0.12.0"].results[TARGET.name].reason
    assert "EPLB runs with it: CompressedTensorsWNA16MoEMethod" in reason
    assert "vLLM refuses EPLB with it: CompressedTensorsWNA16MarlinMoEMethod" in reason
