"""The table of families and releases: absent, added by us, or native but faulty, and how."""

from __future__ import annotations

from typing import Any

import pytest

ABSENT, ADDED, FAULTY = "file absent", "added by us", "native but faulty"
NATIVE, REFUSES = "native and sound", "refuses EPLB"
OWN_LOOP = ("second-replica", "empty-stage", "other-stages", "doubled-weights")
LAYER_LOADS = ("fused-replicas", "empty-stage", "other-stages")
LLAMA4 = ("physical-index", "empty-stage", "stale-counts")

TABLE: dict[str, dict[tuple[int, ...], tuple[str, tuple[str, ...]]]] = {
    "qwen2_moe": {(0, 9, 2): (ADDED, ())},
    "qwen3_moe": {
        (0, 9, 2): (ADDED, ()),
        (0, 10, 1): (FAULTY, OWN_LOOP),
        (0, 25, 0): (FAULTY, LAYER_LOADS),
    },
    "qwen3_vl_moe": {
        (0, 9, 2): (ABSENT, ()),
        (0, 11, 0): (ADDED, ()),
        (0, 12, 0): (FAULTY, ("fused-replicas", *OWN_LOOP)),
        (0, 25, 0): (FAULTY, LAYER_LOADS),
    },
    "llama4": {
        (0, 9, 2): (ADDED, ()),
        (0, 11, 1): (FAULTY, (*LLAMA4, "doubled-weights", "other-stages")),
        (0, 12, 0): (FAULTY, (*LLAMA4, "doubled-weights")),
        (0, 25, 0): (FAULTY, LLAMA4),
    },
    # up to 0.11.0 the expert layer admits some classes by name
    "compressed_tensors_wna16": {
        (0, 9, 2): (REFUSES, ()),
        (0, 11, 1): (ADDED, ()),
        (0, 12, 0): (NATIVE, ()),
    },
}
"""Target -> from which release on -> state and faults. Of no family up to 0.33.0 it is sound.

That these are the faults, and the only ones, is seen by running upstream's files: see
`test_transforms_oracle_real`.
"""
STANDS_AT = {
    "second-replica": "for mapping in expert_params_mapping:",
    "fused-replicas": ("for expert_id in range(num_experts):", "def load_weights("),
    "physical-index": "new_loaded_weight = new_loaded_weight",
    "empty-stage": (
        "raise RuntimeError(",
        "assert self.num_local_physical_experts == num_local_physical_experts",
    ),
    "other-stages": ("for layer in self.model.layers:", "for layer in self.language_model.model."),
    "doubled-weights": (
        "for layer_idx, layer in enumerate(self.moe_layers):",
        "self.expert_weights.append(",
        "def update_physical_experts_metadata(",
    ),
    "stale-counts": "self.language_model.update_physical_experts_metadata(",
}
FILES = {
    "llama4": ["llama4.py", "mllama4.py"],
    "compressed_tensors_wna16": ["compressed_tensors_moe.py"],
}
SERVED = {
    "qwen2_moe": "Qwen2MoeForCausalLM",
    "qwen3_moe": "Qwen3MoeForCausalLM",
    "qwen3_vl_moe": "Qwen3VLMoeForConditionalGeneration",
    "llama4": "Llama4ForConditionalGeneration",
    "compressed_tensors_wna16": "CompressedTensorsWNA16MoEMethod",
}


def expected(family: str, release: Any) -> tuple[str, set[str]]:
    state, faults = TABLE[family][max(n for n in TABLE[family] if n <= release.number)]
    return state, set(faults)


def test_every_family_has_the_state_and_the_faults_of_the_table(release: Any) -> None:
    found = {
        name: (result.state.value, {fault.kind.slug for fault in result.faults})
        for name, result in release.results.items()
    }
    assert found == {name: expected(name, release) for name in TABLE}


def test_a_fault_stands_where_it_is_said_to(release: Any) -> None:
    for name, result in release.results.items():
        seen = set()
        for fault in result.faults:
            path, line = fault.where.split(":")
            text = release.tree.read(path).splitlines()[int(line) - 1].strip()
            assert text.startswith(STANDS_AT[fault.kind.slug]), (name, fault.where, text)
            assert f"{path.rpartition('/')[2]}:{line}" in result.reason
            seen.add(fault.where)
        assert len(seen) == len(result.faults), "a fault is told twice"


def test_files_are_made_where_support_is_added_or_repaired(release: Any) -> None:
    for name, result in release.results.items():
        made = expected(name, release)[0] in (ADDED, FAULTY)
        assert [f.name for f in result.files] == (FILES.get(name, [f"{name}.py"]) if made else [])
        assert (result.entry is not None) == made


def test_the_reason_names_the_class_the_file_or_each_fault(release: Any) -> None:
    for name, result in release.results.items():
        named = {
            ABSENT: [f"{name}.py is not there"],
            **{state: [SERVED[name]] for state in (ADDED, NATIVE, REFUSES)},
            FAULTY: [fault.kind.what for fault in result.faults],
        }[expected(name, release)[0]]
        assert all(part in result.reason for part in named), result.reason


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
