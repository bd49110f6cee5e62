"""The controls: upstream's own classes fail where they must, and pass where they are right."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Module
from eplb_codegen.output.relocate import relocate
from eplb_codegen.output.writer import digest
from eplb_codegen.source import find_source

MODELS = "vllm/model_executor/models"


@pytest.mark.release("0.32.0")
def test_qwen2_moe_is_no_mixture_of_experts(verify: Any) -> None:
    done = verify("qwen2_moe", "--upstream", "--layout", "per-expert", "--redundant", 2)
    assert done.code == 1
    assert "1 protocol" in done.failed("R = 2")
    (check,) = [c for c in done.having("failed") if c["check"] == "1 protocol"]
    assert "not a mixture of experts" in check["detail"]


@pytest.mark.release("0.32.0")
def test_qwen3_moe_leaves_fused_replicas_unwritten(verify: Any, tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    done = verify("qwen3_moe", "--upstream", "--redundant", 2, "--report", report)
    assert done.code == 1
    assert not done.failed("per-expert") and not done.failed("errors")
    assert "3 slots" in done.failed("fused, R = 2")
    (slots,) = [c for c in done.having("failed") if c["check"] == "3 slots"]
    # 2 replicas in each of 3 layers, 2 parameters of each
    assert "12 never or partly written, 0 wrong" in slots["figure"]
    first = "layer 0, rank 1, slot 3 (physical 8), w13_weight: never written"
    assert f"{first}, should hold logical expert 0" in slots["detail"]
    page = report.read_text(encoding="utf-8")
    assert "6 never written" in page and 'class="cell never-written"' in page


@pytest.mark.release("0.32.0")
def test_llama4_breaks_on_fused_experts(verify: Any) -> None:
    done = verify("llama4", "--upstream", "--layout", "fused", "--redundant", 2)
    assert done.code == 1
    for target in done.targets:
        failed = [c for c in target["checks"] if c["status"] == "failed"]
        assert [c["check"] for c in failed] == ["3 slots"]
        assert "IndexError" in failed[0]["detail"]


@pytest.fixture(scope="module")
def native(tmp_path_factory: pytest.TempPathFactory, generated: Path) -> Path:
    """A generated folder whose qwen3_moe.py is upstream's of 0.10.1, which has EPLB of its own."""
    out = tmp_path_factory.mktemp("native")
    folder = out / "0.10.0"
    folder.mkdir()
    theirs = find_source(version="0.10.1").root / MODELS / "qwen3_moe.py"
    name = "vllm.model_executor.models.qwen3_moe"
    module = Module(name, f"{MODELS}/qwen3_moe.py", theirs.read_text(encoding="utf-8"))
    text = relocate(module, set(), by_ruff=False)
    (folder / "qwen3_moe.py").write_text(text, encoding="utf-8")
    ours = generated / "0.10.0"
    manifest = (ours / "manifest.toml").read_text(encoding="utf-8")
    old = digest((ours / "qwen3_moe.py").read_bytes())
    (folder / "manifest.toml").write_text(manifest.replace(old, digest(text)), encoding="utf-8")
    return out


@pytest.mark.release("0.10.0")
def test_later_native_qwen3_moe_gives_the_same_logits(
    verify: Any, generated: Path, native: Path
) -> None:
    options = ["--layout", "per-expert", "--redundant", 4]
    ours = verify("qwen3_moe", "--generated", generated, *options)
    theirs = verify("qwen3_moe", "--generated", native, *options)
    ours.all_passed()

    def logits(done: Any) -> list[str]:
        """The digests of all logits with EPLB on, before and after rearrangements."""
        return [
            c["detail"].partition("SHA-256")[2]
            for c in done.checks
            if c["case"] == "per-expert, R = 4" and "logits" in c["what"]
        ]

    assert len(logits(ours)) == 2 and all(logits(ours))
    assert logits(theirs) == logits(ours), json.dumps(theirs.target["checks"], indent=1)
    assert not {"2 off", "3 slots", "4 logits", "5 rearrangement"} & theirs.failed()
