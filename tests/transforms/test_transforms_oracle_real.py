"""The generated files of real releases, run: every slot holds its logical expert's tensor."""

from __future__ import annotations

import pytest
import transforms_oracle as oracle
import transforms_real as real
import transforms_toy as toy
from transforms_real import LLAMA4, QWEN2, QWEN3, QWEN3_VL, Case

OWN_LOOP = [
    "0.9.2",
    "0.10.0",
    "0.10.1",
    "0.10.1.1",
    "0.10.2",
    "0.11.0",
    "0.11.1",
    "0.11.2",
    "0.12.0",
    "0.13.0",
    "0.14.0",
    "0.14.1",
    "0.16.0",
    "0.17.0",
    "0.17.1",
    "0.18.0",
    "0.18.1",
    "0.19.0",
    "0.19.1",
    "0.20.0",
    "0.20.1",
    "0.20.2",
    "0.21.0",
    "0.22.0",
    "0.22.1",
    "0.23.0",
    "0.24.0",
]
LAYER_LOADS = [
    "0.25.0",
    "0.25.1",
    "0.26.0",
    "0.27.0",
    "0.27.1",
    "0.28.0",
    "0.29.0",
    "0.30.0",
    "0.31.0",
    "0.32.0",
    "0.33.0",
]
LLAMA4_RELEASES = ["0.9.2", "0.10.0", "0.10.1", "0.10.1.1", "0.10.2", "0.11.0"]

CELLS: list[tuple[str, Case, str, int]] = [
    *((v, QWEN2, "per_expert", 2) for v in OWN_LOOP + LAYER_LOADS),
    *((v, QWEN2, "fused", 1) for v in LAYER_LOADS),
    *((v, QWEN3, "per_expert", 2) for v in ("0.9.2", "0.10.0")),
    *((v, LLAMA4, kind, 2) for v in LLAMA4_RELEASES for kind in ("per_expert", "fused")),
    *(
        (v, QWEN3_VL, kind, 2)
        for v in ("0.11.0", "0.11.1", "0.11.2")
        for kind in ("per_expert", "fused")
    ),
]


def _id(cell: object) -> str:
    return cell.family if isinstance(cell, Case) else str(cell)


def _patched(version: str, case: Case) -> oracle.Machine:
    tree = real.release(version)
    result = real.of_release(version, case.family)
    assert result.files, result.reason
    return real.machine(tree, case, {f.name: f.patched for f in result.files})


@pytest.mark.parametrize(("version", "case", "kind", "out"), CELLS, ids=_id)
def test_every_slot_holds_its_logical_expert(version: str, case: Case, kind: str, out: int) -> None:
    fake = _patched(version, case)
    assert real.run(fake, case, real.tensors_of(case, kind, out)) == []


@pytest.mark.parametrize(
    ("version", "case"),
    [
        *((v, QWEN2) for v in OWN_LOOP + LAYER_LOADS),
        *((v, QWEN3) for v in ("0.9.2", "0.10.0")),
        *((v, LLAMA4) for v in LLAMA4_RELEASES),
        *((v, QWEN3_VL) for v in ("0.11.0", "0.11.1", "0.11.2")),
    ],
    ids=_id,
)
def test_members_methods_and_stages(version: str, case: Case) -> None:
    fake = _patched(version, case)
    module = fake.load(case.module or case.family)
    with fake.installed():
        cls = getattr(module, case.cls)
        wrong = []
        for world in oracle.worlds([(4, 2, 2), (4, 0, 2)]):
            wrong += toy.members(fake, fake.build(cls, world))
        wrong += toy.off(fake, cls)
        wrong += toy.uneven(fake, cls)
        if case is not LLAMA4:  # which layers are dense is said in another way there
            wrong += toy.empty_stage(fake, cls)
    assert wrong == []


@pytest.mark.parametrize(
    ("version", "case", "kind", "out"),
    [
        ("0.9.2", QWEN2, "per_expert", 2),
        ("0.20.0", QWEN2, "per_expert", 2),
        ("0.27.0", QWEN2, "fused", 1),
        ("0.10.0", QWEN3, "per_expert", 2),
        ("0.11.0", LLAMA4, "per_expert", 2),
        ("0.11.0", LLAMA4, "fused", 2),
        ("0.11.1", QWEN3_VL, "fused", 2),
    ],
    ids=_id,
)
def test_the_oracle_sees_upstream_fail(version: str, case: Case, kind: str, out: int) -> None:
    """Upstream's own file, in blocks that have room for the redundant experts."""
    tree = real.release(version)
    name = f"{case.family}.py"
    fake = real.machine(tree, case, {name: tree.read(real.FOLDER + name)})
    fake.strict = False
    tensors = real.tensors_of(case, kind, out)
    assert real.run(fake, case, tensors, [(4, 0, 2)]) == []
    try:
        wrong = real.run(fake, case, tensors, [(4, 2, 2)])
    except IndexError:  # llama4: physical ids into a tensor of logical experts
        return
    assert wrong


def test_the_loading_cost_does_not_grow_with_the_experts() -> None:
    for version, case in (("0.10.0", QWEN2), ("0.10.0", QWEN3), ("0.11.0", LLAMA4)):
        fake = _patched(version, case)
        module = fake.load(case.module or case.family)
        costs = []
        with fake.installed():
            for experts in (8, 64):
                world = oracle.World(experts, 8, 4, 1, layers=1, mine=(0, 1))
                model = fake.build(getattr(module, case.cls), world)
                tensors = oracle.per_expert(world, case.attribute)
                model.load_weights(oracle.shuffled(tensors))
                assert oracle.faults(fake) == []
                costs.append((fake.recorder.loader_calls - len(tensors)) / (8 * 3))
        assert costs == [1.0, 1.0], (version, case.family)


def test_wrapper_of_llama4_follows_its_language_model() -> None:
    result = real.of_release("0.11.0", "llama4")
    text = next(f.patched for f in result.files if f.name == "mllama4.py")
    assert "self.moe_layers = self.language_model.moe_layers" in text
    assert text.count("MixtureOfExperts") == 2
