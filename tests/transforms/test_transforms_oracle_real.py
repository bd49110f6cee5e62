"""The generated files of real releases, run: every slot holds its logical expert's tensor.

Upstream's own files run beside them: what the analysis says is wrong with them is seen there.
"""

from __future__ import annotations

import pytest
import transforms_oracle as oracle
import transforms_real as real
import transforms_toy as toy
from transforms_real import LLAMA4_SERVED as LLAMA4
from transforms_real import QWEN2, QWEN3, Case
from transforms_real import QWEN3_VL_SERVED as QWEN3_VL
from transforms_seen import faults_seen

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
EVERY = OWN_LOOP + LAYER_LOADS
WITH_VL = [v for v in EVERY if not v.startswith(("0.9.", "0.10."))]
WITH_FP8 = [v for v in EVERY if v not in OWN_LOOP[: OWN_LOOP.index("0.16.0")]]
"""Where Llama 4's loader has a branch for fp8 tensors on a CPU."""
TOLD_BY_SHAPE = ["0.25.0", "0.25.1", "0.26.0", "0.27.0", "0.27.1"]

CELLS: list[tuple[str, Case, str, int]] = [
    *((v, QWEN2, "per_expert", 2) for v in EVERY),
    *((v, QWEN2, "fused", 1) for v in LAYER_LOADS),
    *((v, QWEN3, "per_expert", 2) for v in EVERY),
    *((v, QWEN3, "fused", 1) for v in LAYER_LOADS),
    *((v, QWEN3, "fused", 2) for v in TOLD_BY_SHAPE),
    *((v, LLAMA4, kind, 2) for v in EVERY for kind in ("per_expert", "fused")),
    *((v, LLAMA4, "fused fp8", 2) for v in WITH_FP8),
    *((v, QWEN3_VL, kind, 2) for v in WITH_VL for kind in ("per_expert", "fused")),
]
NATIVE_FROM = {"qwen3_moe": "0.10.1", "qwen3_vl_moe": "0.12.0", "llama4": "0.11.1"}
NATIVE = [
    (version, case)
    for case in (QWEN3, QWEN3_VL, LLAMA4)
    for version in EVERY[EVERY.index(NATIVE_FROM[case.family]) :]
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
    if kind == "fused fp8":
        assert fake.recorder.dtypes == {oracle.FP8}


@pytest.mark.parametrize(
    ("version", "case"),
    [(v, c) for c in (QWEN2, QWEN3, LLAMA4) for v in EVERY] + [(v, QWEN3_VL) for v in WITH_VL],
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
        wrong += toy.members(fake, fake.build(cls, toy.STAGE))
        if case is LLAMA4:  # its text-only class is served by itself, too
            wrong += toy.members(fake, fake.build(cls, toy.STAGE).language_model)
        wrong += toy.off(fake, cls)
        wrong += toy.uneven(fake, cls)
        wrong += toy.empty_stage(fake, cls)
    assert wrong == []


@pytest.mark.parametrize(("version", "case"), NATIVE, ids=_id)
def test_the_faults_are_those_of_upstream_and_gone(version: str, case: Case) -> None:
    """Every fault that is told can be seen in upstream's own file, no other one, and none in ours.

    So each repair has a test that fails without it.
    """
    told = {fault.kind.slug for fault in real.of_release(version, case.family).faults}
    assert faults_seen(real.upstream(version, case), case) == told
    assert faults_seen(_patched(version, case), case) == set()


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
    """Where EPLB is added: upstream's own file, in blocks that have room for redundant experts."""
    fake = real.upstream(version, case)
    fake.strict = False
    tensors = real.tensors_of(case, kind, out)
    assert real.run(fake, case, tensors, [(4, 0, 2)]) == []
    try:
        wrong = real.run(fake, case, tensors, [(4, 2, 2)])
    except IndexError:  # llama4: physical ids into a tensor of logical experts
        return
    assert wrong


@pytest.mark.parametrize(
    ("version", "case"),
    [
        ("0.10.0", QWEN2),
        ("0.10.0", QWEN3),
        ("0.11.0", LLAMA4),
        ("0.11.1", QWEN3_VL),
        ("0.20.0", QWEN3),
        ("0.20.0", LLAMA4),
        ("0.20.0", QWEN3_VL),
    ],
    ids=_id,
)
def test_the_loading_cost_does_not_grow_with_the_experts(version: str, case: Case) -> None:
    fake = _patched(version, case)
    module = fake.load(case.module or case.family)
    costs = []
    with fake.installed():
        for experts in (8, 64):
            world = oracle.World(experts, 8, 4, 1, layers=1, mine=(0, 1))
            model = fake.build(getattr(module, case.cls), world)
            tensors = oracle.per_expert(world, case.attribute, case.root)
            before = fake.recorder.looked_at
            model.load_weights(oracle.shuffled(tensors))
            assert oracle.faults(fake) == []
            looked_at = fake.recorder.looked_at - before
            assert looked_at == 3 * (experts + 8), "more than grouping the mapping once"
            costs.append(fake.recorder.loader_calls - len(tensors))
    # a loop that asks for success may call the loader as often as an expert's replicas squared
    assert 8 * 3 <= costs[0] <= costs[1] <= 8 * 3 * (2 * 2 - 1), costs


def test_wrapper_of_llama4_follows_its_language_model() -> None:
    result = real.of_release("0.11.0", "llama4")
    text = next(f.patched for f in result.files if f.name == "mllama4.py")
    assert "self.moe_layers = self.language_model.moe_layers" in text
    assert text.count("MixtureOfExperts") == 2
