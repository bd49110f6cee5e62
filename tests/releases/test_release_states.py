"""The table of families and releases: added by us, native, or the file is not there."""

from __future__ import annotations

from typing import Any

import pytest

ADDED_IN: dict[str, set[str] | None] = {
    "qwen2_moe": None,  # every release
    "qwen3_moe": {"0.9.2", "0.10.0"},
    "qwen3_vl_moe": {"0.11.0", "0.11.1", "0.11.2"},
    "llama4": {"0.9.2", "0.10.0", "0.10.1", "0.10.1.1", "0.10.2", "0.11.0"},
}
FILES = {"llama4": ["llama4.py", "mllama4.py"]}
SERVED = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
}


def expected(family: str, release: Any) -> str:
    if family == "qwen3_vl_moe" and release.number < (0, 11):
        return "file absent"
    added = ADDED_IN[family]
    return "added by us" if added is None or release.version in added else "native"


def test_every_family_is_in_the_state_of_the_table(release: Any) -> None:
    states = {name: result.state.value for name, result in release.results.items()}
    assert states == {name: expected(name, release) for name in ADDED_IN}


def test_files_are_made_only_where_support_is_added(release: Any) -> None:
    for name, result in release.results.items():
        added = expected(name, release) == "added by us"
        assert [f.name for f in result.files] == (FILES.get(name, [f"{name}.py"]) if added else [])
        assert (result.entry is not None) == added


def test_the_reason_names_the_class_or_the_file(release: Any) -> None:
    for name, result in release.results.items():
        absent = expected(name, release) == "file absent"
        assert (f"{name}.py is not there" if absent else SERVED[name]) in result.reason


@pytest.mark.parametrize(
    "version, family", [("0.10.0", "qwen3_moe"), ("0.11.0", "llama4"), ("0.33.0", "qwen2_moe")]
)
def test_the_entry_names_the_served_class_and_what_the_patch_depends_on(
    the_release: Any, version: str, family: str
) -> None:
    release = the_release[version]
    entry = release.results[family].entry
    architectures = [a for file in entry.files.values() for a in file.architectures]
    assert SERVED[family] in architectures
    models = "vllm/model_executor/models"
    files = [f"{models}/{name}" for name in entry.files]
    assert {*files, f"{models}/interfaces.py", f"{models}/registry.py"} <= set(entry.depends)
    assert any("vllm/config" in path for path in entry.depends)
    assert any("fused_moe" in path for path in entry.depends)
    assert all(release.tree.exists(path) for path in entry.depends)
