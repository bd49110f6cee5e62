"""Faults planted in a generated file: each is caught by the check that is meant for it."""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.output.writer import digest

FILE = "qwen2_moe.py"
METHODS = "compressed_tensors_moe.py"
Plant = Callable[..., Path]


@pytest.fixture
def plant(generated: Path, release: str, tmp_path: Path) -> Plant:
    """A generated folder in which a pattern, found exactly once, was replaced.

    The manifest vouches for the result, as if the generator had written it.
    """

    def replace(pattern: str, by: str, file: str) -> Path:
        ours = generated / release
        text = (ours / file).read_text(encoding="utf-8")
        faulty, count = re.subn(pattern, by, text)
        # a method is there for Triton and for Marlin
        assert count == (2 if file == METHODS else 1), f"{pattern!r} is there {count} times"
        compile(faulty, file, "exec")
        folder = tmp_path / "planted" / release
        shutil.copytree(ours, folder)
        (folder / file).write_text(faulty, encoding="utf-8")
        manifest = (ours / "manifest.toml").read_text(encoding="utf-8")
        manifest = manifest.replace(digest(text), digest(faulty))
        (folder / "manifest.toml").write_text(manifest, encoding="utf-8")
        return folder.parent

    return replace


@pytest.fixture
def caught(verify: Any, plant: Plant) -> Callable[..., str]:
    """Verify with a fault; returns what the check that is meant for it said."""

    def run(
        check: str, pattern: str, by: str, *options: object, case: str = "R = 2", file: str = FILE
    ) -> str:
        folder = plant(pattern, by, file)
        given = ["--layout", "per-expert", "--redundant", 2, *options]
        done = verify("qwen2_moe", "--generated", folder, *given)
        assert done.code == 1, done.text
        assert check in done.failed(case), done.text
        return "\n".join(
            f"{c['figure']}\n{c['detail']}"
            for c in done.having("failed")
            if c["check"] == check and case in c["case"]
        )

    return run


REPLICAS = r"for _, _, expert_id, _ in candidates:"


@pytest.mark.release("0.10.0")
def test_mapping_without_redundant_experts(caught: Callable[..., str]) -> None:
    pattern = r"num_experts=self\.config\.num_experts,\s+num_redundant_experts=[\w.]+\)"
    said = caught("3 slots", pattern, "num_experts=self.config.num_experts)")
    assert "48 of 60 right, 12 never or partly written, 0 wrong" in said
    assert "rank 1, slot 3 (physical 8), w13_weight: never written" in said


@pytest.mark.release("0.10.0")
def test_break_behind_the_first_replica(caught: Callable[..., str]) -> None:
    said = caught("3 slots", REPLICAS, "for _, _, expert_id, _ in candidates[:1]:")
    assert "12 never or partly written" in said
    assert "should hold logical expert 0" in said


@pytest.mark.release("0.10.0")
def test_two_experts_swapped(caught: Callable[..., str]) -> None:
    swapped = "for expert_id in ({2: 3, 3: 2}.get(e[2], e[2]) for e in candidates):"
    said = caught("3 slots", REPLICAS, swapped)
    assert "0 never or partly written, 12 wrong" in said
    assert "slot 2 (physical 2), w13_weight: wrong, should hold logical expert 2" in said
    assert "holds logical expert 3" in said


@pytest.mark.release("0.10.0")
def test_scale_not_loaded(caught: Callable[..., str]) -> None:
    skipping = f'if "w2_weight_scale" in name:\n{" " * 24}break\n{" " * 20}{REPLICAS}'
    said = caught("3 slots", REPLICAS, skipping, "--quantization", "fp8")
    assert "90 of 120 right, 30 never or partly written, 0 wrong" in said
    assert "layer 0, rank 0, slot 0 (physical 0), w2_weight_scale_inv: never written" in said


@pytest.mark.release("0.11.2")
@pytest.mark.parametrize("quantization", ["wna16", "wna16-marlin"])
def test_replicas_not_chosen_by_the_method(caught: Callable[..., str], quantization: str) -> None:
    pattern = r"enable_eplb=enable_eplb,\n +expert_load_view=expert_load_view,\n( +)logical_to_phys"
    said = caught(
        *("6 load", pattern, r"logical_to_phys", "--quantization", quantization), file=METHODS
    )
    assert "MoE layer 0: 0" in said


@pytest.mark.release("0.11.2")
@pytest.mark.parametrize("quantization", ["wna16", "wna16-marlin"])
def test_method_that_does_not_answer_for_eplb(
    caught: Callable[..., str], quantization: str
) -> None:
    """As upstream's: the release's own refusal is what is reported."""
    pattern = r"( +)return True\n(?=\n\nclass CompressedTensorsW(?:NA16MoE|4A8Int8MoE)Method)"
    said = caught(
        *("1 protocol", pattern, r"\1return False\n", "--quantization", quantization), file=METHODS
    )
    assert "EPLB is not supported CompressedTensorsWNA16M" in said


@pytest.mark.release("0.22.1")
def test_layer_left_out(caught: Callable[..., str]) -> None:
    said = caught(
        "1 protocol",
        r"if (isinstance\([\w.]+, Qwen2MoeSparseMoeBlock\)):",
        r"if layer is not self.model.layers[-1] and \1:",
    )
    assert "num_moe_layers is 2, should be 3" in said


@pytest.mark.release("0.22.1")
def test_layers_out_of_order(caught: Callable[..., str]) -> None:
    said = caught(
        "1 protocol",
        r"self\.moe_layers\.append\(([\w.]+)\)",
        r"self.moe_layers.insert(0, \1)",
    )
    assert "moe_layers[0] is not the MoE block of layer 0" in said


@pytest.mark.release("0.22.1")
def test_wrong_count(caught: Callable[..., str]) -> None:
    said = caught(
        "1 protocol",
        r"self\.num_logical_experts = moe\.n_logical_experts",
        "self.num_logical_experts = moe.n_physical_experts",
    )
    assert "num_logical_experts is 10, should be 8" in said


@pytest.mark.release("0.22.1")
def test_weights_handed_out_twice(caught: Callable[..., str]) -> None:
    said = caught("7 handed out", r"self\.expert_weights\.clear\(\)", r"self.expert_weights = [[]]")
    assert "expert_weights has 4 layers, the model 3" in said


@pytest.mark.release("0.22.1")
def test_layers_not_told_of_new_ranks(caught: Callable[..., str]) -> None:
    said = caught("8 errors", r"moe\.experts\.update_expert_map\(\)", "pass")
    assert "layer 0 was not told" in said


@pytest.mark.release("0.32.0")
def test_fused_experts_not_split(caught: Callable[..., str]) -> None:
    pattern = r"weights = split_fused_experts\(weights\)"
    said = caught("3 slots", pattern, "pass", "--layout", "fused")
    assert "12 never or partly written" in said


@pytest.mark.release("0.32.0")
def test_uneven_spread_not_refused(caught: Callable[..., str]) -> None:
    said = caught("8 errors", r"if self\.enable_eplb and self", "if False and self", case="errors")
    assert "wanted: a ValueError that names 8, 1, 2, and 2, the next R" in said


@pytest.mark.release("0.32.0")
def test_something_else_with_eplb_off(caught: Callable[..., str]) -> None:
    """A patch that changes what the model computes."""
    norm = "renormalize=%sconfig.norm_topk_prob,"
    said = caught("2 off", norm % "", norm % "not ", case="EPLB off")
    assert "largest difference" in said
