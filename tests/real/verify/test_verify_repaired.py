"""Native support that is faulty: upstream's class fails on real vLLM, the repaired file passes."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

FAULTY = {
    "0.12.0": {"qwen3_vl_moe": "both", "llama4": "both"},
    # its loop of 0.22.1 knows no fused tensors
    "0.22.1": {"qwen3_moe": "per-expert", "qwen3_vl_moe": "both", "llama4": "both"},
    "0.32.0": {"qwen3_moe": "both", "qwen3_vl_moe": "both", "llama4": "both"},
}
MANY = 10
"""Of 8 experts on 2 ranks: a rank holds some of them twice."""


def cells(*skip: str) -> list[Any]:
    return [
        pytest.param(family, layout, marks=pytest.mark.release(version), id=f"{version} {family}")
        for version, families in FAULTY.items()
        for family, layout in families.items()
        if family not in skip
    ]


@pytest.mark.parametrize(("family", "layout"), cells())
def test_repaired(verify: Any, generated: Path, family: str, layout: str) -> None:
    options = ["--layout", layout, "--redundant", 2, MANY]
    done = verify(family, "--generated", generated, *options)
    layouts = ["per-expert", "fused"] if layout == "both" else [layout]
    cases = [f"{name}, {r}" for name in layouts for r in ("EPLB off", "R = 2", f"R = {MANY}")]
    # every slot, the same logits as with EPLB off through rearrangements, and off bit for bit
    done.all_passed(*cases, "errors")
    assert not done.having("skipped")


@pytest.mark.parametrize(("family", "layout"), cells("llama4"))
def test_upstream_leaves_slots_unwritten(verify: Any, family: str, layout: str) -> None:
    done = verify(family, "--upstream", "--layout", layout, "--redundant", MANY)
    assert done.code == 1
    # loops of the model's own end at the first replica; layer code fills all from an expert's own
    layouts = ["fused"] if layout == "both" else [layout]
    for name in layouts:
        case = f"{name}, R = {MANY}"
        assert "3 slots" in done.failed(case), done.text
        (slots,) = [
            c for c in done.having("failed") if (c["check"], c["case"]) == ("3 slots", case)
        ][:1]
        assert "never" in slots["figure"] + slots["detail"]
    assert "3 slots" not in done.failed("EPLB off")


@pytest.mark.release("0.12.0", "0.22.1")
def test_upstream_llama4_reads_a_logical_tensor_by_physical_ids(verify: Any) -> None:
    done = verify("llama4", "--upstream", "--layout", "fused", "--redundant", 2)
    assert done.code == 1
    for target in done.targets:
        (slots,) = [
            c for c in target["checks"] if c["status"] == "failed" and c["check"] == "3 slots"
        ]
        assert "IndexError" in slots["detail"]


@pytest.mark.release("0.12.0", "0.32.0")
def test_upstream_wrapper_of_llama4_keeps_its_old_counts(verify: Any) -> None:
    done = verify("llama4", "--upstream", "--layout", "per-expert", "--redundant", 2)
    text, multimodal = done.targets
    assert not [c for c in text["checks"] if c["status"] == "failed"]
    (counts,) = [c for c in multimodal["checks"] if c["status"] == "failed"]
    assert counts["check"] == "8 errors"
    assert "num_physical_experts is 10 afterwards, should be 15" in counts["detail"]


@pytest.mark.release("0.32.0")
def test_the_tensors_of_each_expert_are_views(generated: Path, release: str) -> None:
    """Transposed are weights and scales of blocks alone, as by RoutedExperts.load_weights."""
    import ast

    import torch

    text = (generated / release / "qwen3_vl_moe.py").read_text(encoding="utf-8")
    (split,) = (
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.FunctionDef) and node.name == "split_fused_experts"
    )
    names: dict[str, Any] = {"Iterable": Iterable, "torch": torch}
    exec(ast.unparse(split), names)
    experts, hidden, inner = 4, 6, 5
    at = "layers.0.mlp.experts."
    fused = {
        f"{at}gate_up_proj": torch.rand(experts, hidden, 2 * inner),
        f"{at}gate_up_proj_scale": torch.rand(experts, 2 * inner, 1),
        f"{at}gate_up_proj_scale_inv": torch.rand(experts, 3, 4),
        f"{at}down_proj": torch.rand(experts, inner, hidden),
        f"{at}down_proj_scale": torch.rand(experts, hidden, 1),
    }
    found = dict(names["split_fused_experts"](fused.items()))
    # views, whatever R is: nothing is copied
    storages = {tensor.untyped_storage().data_ptr() for tensor in fused.values()}
    assert {tensor.untyped_storage().data_ptr() for tensor in found.values()} == storages
    for expert in range(experts):
        own = f"{at}{expert}."
        gate_up = fused[f"{at}gate_up_proj"][expert].t()
        scales = fused[f"{at}gate_up_proj_scale"][expert]
        blocks = fused[f"{at}gate_up_proj_scale_inv"][expert].t()
        for name, want in {
            "gate_proj.weight": gate_up[:inner],
            "up_proj.weight": gate_up[inner:],
            "down_proj.weight": fused[f"{at}down_proj"][expert].t(),
            "gate_proj.weight_scale": scales[:inner],
            "up_proj.weight_scale": scales[inner:],
            "down_proj.weight_scale": fused[f"{at}down_proj_scale"][expert],
            "gate_proj.weight_scale_inv": blocks[:2],
            "up_proj.weight_scale_inv": blocks[2:],
        }.items():
            assert torch.equal(found.pop(own + name), want), name
    assert not found
