"""What `apply` writes is proven on real vLLM: every family, on the releases that need it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest


@pytest.mark.release("0.10.0", "0.11.2", "0.22.1")
def test_qwen2_moe(verify: Any, generated: Path, release: str) -> None:
    done = verify("qwen2_moe", "--generated", generated)
    done.all_passed("per-expert, EPLB off", "per-expert, R = 0", "per-expert, R = 2", "errors")
    assert done.target["vllm"].startswith(release)
    assert "/qwen2_moe.py" in done.target["file"]
    # upstream's loop raises KeyError on fused experts: nothing to compare with, and it is said
    (skipped,) = done.having("skipped")
    assert skipped["check"] == "layout" and "fused" in skipped["what"]
    assert "KeyError" in skipped["detail"]


@pytest.mark.release("0.32.0")
def test_qwen2_moe_in_both_layouts(verify: Any, generated: Path) -> None:
    done = verify("qwen2_moe", "--generated", generated, "--redundant", 0, 4)
    done.all_passed("per-expert, R = 0", "per-expert, R = 4", "fused, R = 0", "fused, R = 4")
    assert not done.having("skipped")


def test_every_check_has_spoken(verify: Any, generated: Path, release: str) -> None:
    """Four ranks, and more redundant experts than experts; E spreads over no four ranks."""
    options = ["--layout", "per-expert", "--ranks", 4, "--experts", 6, "--redundant", 10]
    done = verify("qwen2_moe", "--generated", generated, *options)
    done.all_passed("per-expert, EPLB off", "per-expert, R = 10")
    names = {check["check"] for check in done.having("passed")}
    assert {name[0] for name in names} == set("12345678")
    slots = {(s["case"], s["when"]): s["slots"] for s in done.target["slot_counts"]}
    # 3 MoE layers, 16 physical experts, 2 parameters each
    assert slots["per-expert, R = 10", "after loading"] == 96
    assert slots["per-expert, R = 10", "after rearrangements"] == 96


@pytest.mark.release("0.10.0")
def test_qwen3_moe_with_many_redundant_experts(verify: Any, generated: Path) -> None:
    options = ["--layout", "per-expert", "--redundant", 0, 4, 10]
    done = verify("qwen3_moe", "--generated", generated, *options)
    done.all_passed("per-expert, R = 0", "per-expert, R = 4", "per-expert, R = 10")


@pytest.mark.release("0.10.0")
def test_llama4_in_both_files_and_layouts(verify: Any, generated: Path) -> None:
    done = verify("llama4", "--generated", generated, "--redundant", 2)
    done.all_passed("per-expert, R = 2", "fused, R = 2", "errors")
    text, multimodal = done.targets
    assert text["file"].endswith("/llama4.py")
    assert multimodal["file"].endswith("/mllama4.py")
    assert multimodal["architecture"] == "Llama4ForConditionalGeneration"


@pytest.mark.release("0.11.2")
def test_qwen3_vl_moe_in_both_layouts(verify: Any, generated: Path) -> None:
    done = verify("qwen3_vl_moe", "--generated", generated, "--redundant", 0, 2)
    done.all_passed("per-expert, R = 2", "fused, R = 0", "fused, R = 2")


@pytest.mark.release("0.11.2")
def test_another_seed_and_an_odd_number_of_experts(verify: Any, generated: Path) -> None:
    options = ["--layout", "per-expert", "--experts", 7, "--seed", 5]
    done = verify("qwen2_moe", "--generated", generated, *options)
    done.all_passed("per-expert, R = 1", "per-expert, R = 3")


def test_fp8_experts_with_their_scales(verify: Any, generated: Path) -> None:
    done = verify("qwen2_moe", "--generated", generated, "--quantization", "fp8", "--redundant", 2)
    done.all_passed("per-expert, EPLB off", "per-expert, R = 2")
    slots = {(s["case"], s["when"]): s["slots"] for s in done.target["slot_counts"]}
    # 3 MoE layers, 10 physical experts, 2 weights and 2 scales each
    assert slots["per-expert, R = 2", "after loading"] == 120


@pytest.mark.release("0.22.1")
def test_real_checkpoint(verify: Any, generated: Path, tmp_path: Path) -> None:
    """A checkpoint that is there already, of twelve experts."""
    from eplb_codegen.verify.worker import checkpoint, families

    family = families.FAMILIES["qwen2_moe"]
    checkpoint.write(tmp_path, family, 12, "per-expert", 3)
    options = ["--generated", generated, "--checkpoint", tmp_path, "--redundant", 4]
    done = verify("qwen2_moe", *options)
    done.all_passed("checkpoint, EPLB off", "checkpoint, R = 4")
    assert done.target["experts"] == 12
    refused = verify("qwen3_moe", "--upstream", "--checkpoint", tmp_path)
    assert refused.code == 2
    assert "is a checkpoint of Qwen2MoeForCausalLM, not of Qwen3MoeForCausalLM" in refused.err


def test_tokenizer_of_the_tiny_checkpoint(tmp_path: Path) -> None:
    """A real one, for this release's transformers."""
    from eplb_codegen.verify.worker import checkpoint, families
    from transformers import AutoTokenizer

    checkpoint.write(tmp_path, families.FAMILIES["qwen2_moe"], 4, "per-expert", 0)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    text = "Experts: 8 + 2, \u00fcber \u4e8c ranks\n"
    ids = tokenizer(text).input_ids
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, len(tokenizer)) == (0, 1, 256)
