"""Damaged variants of native files: sound or repaired, right by the oracle, or refused."""

from __future__ import annotations

import re

import pytest
import transforms_oracle as oracle
import transforms_real as real
import transforms_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st
from test_transforms_real_damage import CONSISTENT, INCONSISTENT, mutate
from transforms_real import LLAMA4_SERVED, QWEN3, QWEN3_VL_SERVED, Case

SOURCES: list[tuple[str, Case]] = [
    ("0.20.0", QWEN3),
    ("0.33.0", QWEN3),
    ("0.24.0", QWEN3_VL_SERVED),
    ("0.33.0", QWEN3_VL_SERVED),
    ("0.11.2", LLAMA4_SERVED),
    ("0.33.0", LLAMA4_SERVED),
]


def verdict(version: str, case: Case, source: str) -> str:
    """ "right", "refused: ...", "WRONG: ..." or, for what does not work unpatched, "broken"."""
    tree = real.changed(version, {f"{real.FOLDER}{case.family}.py": source})
    result = real.generate(tree, case.family)
    if not result.files and result.state.value != "native and sound":
        return f"refused: {result.reason}"
    names = real.family(case.family).files
    texts = {name: tree.read(real.FOLDER + name) for name in names}
    fake = real.machine(tree, case, texts | {f.name: f.patched for f in result.files})
    try:
        wrong = _wrong(fake, case, version, bool(result.files))
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if not wrong:
        return "right"
    works = _works(real.machine(tree, case, texts), case, version)
    return f"WRONG ({result.state.value}): {wrong[0]}" if works else "broken"


def _kinds(case: Case, version: str) -> list[tuple[str, int]]:
    if case is QWEN3:
        return [("per_expert", 2), ("fused", 1)] if version == "0.33.0" else [("per_expert", 2)]
    return [("per_expert", 2), ("fused", 2)]


def _wrong(fake: oracle.Machine, case: Case, version: str, patched: bool) -> list[str]:
    wrong: list[str] = []
    for kind, out in _kinds(case, version):
        shapes = [(4, 2, 2), (4, 6, 2)]
        wrong += real.run(fake, case, real.tensors_of(case, kind, out), shapes)
    cls = getattr(fake.load(case.module or case.family), case.cls)
    with fake.installed():
        wrong += toy.members(fake, fake.build(cls, toy.STAGE))
        wrong += toy.empty_stage(fake, cls)
        wrong += toy.off(fake, cls)
        wrong += toy.uneven(fake, cls) if patched else []
    return wrong


def _works(fake: oracle.Machine, case: Case, version: str) -> bool:
    """Whether a variant works as it is: on one stage, and without redundant experts."""
    try:
        for kind, out in _kinds(case, version):
            shapes = [(4, 0, 1), (4, 0, 2)]
            if real.run(fake, case, real.tensors_of(case, kind, out), shapes):
                return False
        cls = getattr(fake.load(case.module or case.family), case.cls)
        with fake.installed():
            dense = fake.build(cls, oracle.World(4, 0, 2, dense=frozenset({0})))
            dense.set_eplb_state("loads", "map", "counts")
            dense.update_physical_experts_metadata(8, 2)
            new = {(b.n_physical_experts, b.n_local_physical_experts) for b in oracle.blocks(dense)}
            one = fake.build(cls, oracle.World(4, 0, 2))
            known = [w for w in toy.members(fake, one) if "doubled" not in w and "own" not in w]
            return new == {(8, 2)} and not known and one.num_moe_layers == 2
    except Exception:
        return False


def _source(version: str, case: Case) -> str:
    return real.release(version).read(f"{real.FOLDER}{case.family}.py")


def _id(value: object) -> str:
    return value.family if isinstance(value, Case) else str(value)


@pytest.mark.parametrize("name", [n for n in CONSISTENT if n != "the mlp attribute"])
@pytest.mark.parametrize(("version", "case"), SOURCES[1::2], ids=_id)
def test_changed_throughout(version: str, case: Case, name: str) -> None:
    source = CONSISTENT[name](_source(version, case))
    try:
        compile(source, "source", "exec")
    except SyntaxError:
        pytest.skip("not Python")
    found = verdict(version, case, source)
    assert found in ("right", "broken") or found.startswith("refused: "), found


NATIVE = {
    "the raise": (r"( +)raise RuntimeError\(\"No Qwen3Mo[eE].*\n", r"\1pass\n"),
    "the test before the raise": (r"if example_\w+ is None:", "if not len('x'):"),
    "an assertion for it": (r"if (example_\w+) is None:\n +raise.*\n", r"assert \1 is not None\n"),
    "the raise in some cases": (r"if (example_\w+) is None:", r"if \1 is None and self.model:"),
    "the layers counted": (
        r"for layer in (self\.(?:language_model\.)?model\.layers):",
        r"for _, layer in enumerate(\1):",
    ),
    "another way to take experts": (
        r"new_loaded_weight = new_loaded_weight\[local_expert_indices\]",
        "new_loaded_weight = torch.index_select(new_loaded_weight, 0, local_expert_indices)",
    ),
    "modulo without a turn": (
        r"= loaded_weight\[expert_id\]",
        "= loaded_weight[expert_id % num_experts]",
    ),
    "a turn without modulo": (
        r"range\(num_experts\)",
        "range(num_experts + self.num_redundant_experts)",
    ),
    "the members": (r"self\.num_moe_layers = len\(self\.moe_layers\)\n", "pass\n"),
    "the number of layers": (
        r"self\.num_moe_layers = len\(self\.moe_layers\)",
        "self.num_moe_layers = self.config.num_hidden_layers",
    ),
    "the base": (r"(, |\()MixtureOfExperts\b", r"\1nn.Module"),
}


@pytest.mark.parametrize("name", [*INCONSISTENT, *NATIVE])
@pytest.mark.parametrize(("version", "case"), SOURCES, ids=_id)
def test_changed_in_one_place_only(version: str, case: Case, name: str) -> None:
    pattern, new = (INCONSISTENT | NATIVE)[name]
    source, count = re.subn(pattern, new, _source(version, case), flags=re.M)
    if not count:
        pytest.skip("not in this file")
    found = verdict(version, case, source)
    assert found in ("right", "broken") or found.startswith("refused: "), found


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    at=st.sampled_from(SOURCES),
    kind=st.sampled_from(["removed", "doubled", "moved", "under an if"]),
    seed=st.integers(0, 5000),
)
def test_one_statement_changed(at: tuple[str, Case], kind: str, seed: int) -> None:
    version, case = at
    source = mutate(_source(version, case), kind, seed)
    if source is not None:
        found = verdict(version, case, source)
        assert found in ("right", "broken") or found.startswith("refused: "), found
