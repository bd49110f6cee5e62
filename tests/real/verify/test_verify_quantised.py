"""Experts in 4 bits, as compressed-tensors packs them, in either of vLLM's classes for them."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.release("0.11.2")
METHODS = "compressed_tensors_moe.py"
CLASSES = {
    "wna16": "CompressedTensorsWNA16MoEMethod",
    "wna16-marlin": "CompressedTensorsWNA16MarlinMoEMethod",
}


@pytest.mark.parametrize("quantization", CLASSES)
@pytest.mark.parametrize("family, layers", [("qwen3_vl_moe", 4), ("qwen2_moe", 3)])
def test_every_tensor_of_an_expert(
    verify: Any, generated: Path, family: str, layers: int, quantization: str
) -> None:
    options = ["--generated", generated, "--quantization", quantization, "--redundant", 0, 2, 10]
    done = verify(family, *options)
    done.all_passed("per-expert, EPLB off", "per-expert, R = 0", "per-expert, R = 2", "errors")
    slots = {(s["case"], s["when"]): s["slots"] for s in done.target["slot_counts"]}
    # packed weights, scales and shapes, of w13 and of w2
    for when in ("after loading", "after rearrangements"):
        assert slots["per-expert, R = 2", when] == layers * 10 * 6
        assert slots["per-expert, R = 10", when] == layers * 18 * 6
    handed_out = next(c for c in done.checks if c["check"] == "7 handed out")
    # without Marlin also what the order of activations would be, which is never read
    each = 6 if quantization == "wna16-marlin" else 10
    assert handed_out["figure"] == f"{layers * each} tensors on each rank"


@pytest.mark.parametrize("quantization", CLASSES)
def test_without_the_patched_method_the_release_refuses(
    verify: Any, generated: Path, release: str, tmp_path: Path, quantization: str
) -> None:
    """The control: the model's file alone is not enough."""
    folder = tmp_path / release
    shutil.copytree(generated / release, folder)
    manifest = folder / "manifest.toml"
    entry = r"(?s)\[families\.compressed_tensors_wna16\].*?(?=\[families\.qwen)"
    text, count = re.subn(entry, "", manifest.read_text())
    assert count == 1
    manifest.write_text(text)
    done = verify(
        *("qwen3_vl_moe", "--generated", tmp_path, "--quantization", quantization),
        *("--redundant", 2),
    )
    assert done.code == 1
    assert done.failed("EPLB off") == set() and done.failed("R = 2") == {"1 protocol"}
    (refusal,) = done.having("failed")
    assert f"EPLB is not supported {CLASSES[quantization]}" in refusal["detail"]
