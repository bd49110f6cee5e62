"""The day upstream fixes it: `list` says so, and `apply` writes nothing."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

FAMILIES = {
    "0.10.1": ["qwen3_moe"],
    "0.12.0": ["qwen3_moe", "qwen3_vl_moe", "llama4"],
    "0.24.0": ["qwen3_moe", "qwen3_vl_moe", "llama4"],
    "0.33.0": ["qwen3_moe", "qwen3_vl_moe", "llama4"],
}


@pytest.mark.parametrize("version", FAMILIES)
def test_a_fixed_upstream_is_sound_and_nothing_is_written(
    run: Any, checkout: Callable[..., Path], results: Callable[[str], Any], version: str
) -> None:
    faulty = [results(version)[name] for name in FAMILIES[version]]
    assert all(r.state.value == "native but faulty" for r in faulty)
    checkout(version, changes={f.upstream: f.patched.encode() for r in faulty for f in r.files})
    shown = json.loads(run("list", "--json", *FAMILIES[version], "--source", "src").out)
    assert [(t["state"], t["files"], t["faults"]) for t in shown["targets"]] == [
        ("native and sound", [], []) for _ in faulty
    ]
    done = run("apply", *FAMILIES[version], "--source", "src")
    assert (done.code, done.err) == (0, "")
    assert done.out.count("native and sound") == len(faulty)
    assert not (run.folder / "generated").exists()


def test_what_upstream_has_fixed_by_half_is_repaired_by_half(
    run: Any, checkout: Callable[..., Path]
) -> None:
    """The layer code of 0.33.0 fills the slots; pipeline stages are as they were."""
    layer = "vllm/model_executor/layers/fused_moe/routed_experts.py"
    line = b"                loaded_experts = experts_shard.unbind()\n"
    fill = (
        b"                if is_fused:\n"
        b"                    logical = self.moe_config.num_logical_experts\n"
        b"                    slots = range(self.moe_config.num_experts)\n"
        b"                    experts_shard = experts_shard[[s % logical for s in slots]]\n"
    )
    checkout("0.33.0", changes={layer: lambda data: data.replace(line, fill + line)})
    done = run("apply", "qwen3_moe", "qwen2_moe", "--source", "src")
    assert done.code == 0
    for name in ("qwen3_moe", "qwen2_moe"):
        written = (run.folder / "generated" / "0.33.0" / f"{name}.py").read_text()
        assert "split_fused_experts" not in written
    assert "redundant experts are not filled" not in written
