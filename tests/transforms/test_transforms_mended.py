"""A fixed upstream: sound once nothing is left; until then the rest is told and repaired."""

from __future__ import annotations

import dataclasses
from itertools import pairwise

import pytest
import transforms_oracle as oracle
import transforms_real as real
from eplb_codegen.families import family
from transforms_mends import BY_HAND, Mend, mended
from transforms_real import Case
from transforms_seen import faults_seen


def _fake(
    version: str, case: Case, texts: dict[str, str], layer_fills: bool = False
) -> oracle.Machine:
    """A release with these texts in place of its own."""
    tree = real.changed(version, texts)
    names = family(case.family).files
    fake = real.machine(tree, case, {name: tree.read(real.FOLDER + name) for name in names})
    return dataclasses.replace(fake, layer_fills=layer_fills)


@pytest.mark.parametrize("name", BY_HAND)
def test_what_is_mended_in_another_way_is_sound(name: str) -> None:
    version, case, mends = BY_HAND[name]
    texts = mended(version, mends)
    result = real.generate(real.changed(version, texts), case.family)
    assert (result.state.value, result.faults, result.files) == ("native and sound", (), ())
    fills = any("routed_experts" in path for path in texts)
    assert faults_seen(_fake(version, case, texts, fills), case) == set()


def _steps(name: str) -> list[tuple[list[Mend], str]]:
    """The mends up to and with the n-th that does away with a fault, and all of that fault."""
    _, _, mends = BY_HAND[name]
    ends = [0, *(i + 1 for i, mend in enumerate(mends) if mend.fault)]
    return [(mends[a:b], mends[b - 1].fault) for a, b in pairwise(ends)]


ALONE = [(name, fault) for name in BY_HAND for _, fault in _steps(name)]


@pytest.mark.parametrize(("name", "fault"), ALONE)
def test_of_what_is_mended_in_part_the_rest_is_told_and_repaired(name: str, fault: str) -> None:
    version, case, _ = BY_HAND[name]
    (mends,) = (mends for mends, gone in _steps(name) if gone == fault)
    before = {f.kind.slug for f in real.of_release(version, case.family).faults}
    texts = mended(version, mends)
    result = real.generate(real.changed(version, texts), case.family)
    assert result.state.value == "native but faulty", result.reason
    assert {f.kind.slug for f in result.faults} == before - {fault}
    patched = texts | {f.upstream: f.patched for f in result.files}
    fills = any("routed_experts" in path for path in texts)
    assert faults_seen(_fake(version, case, patched, fills), case) == set()


@pytest.mark.parametrize(
    "plant",
    [
        # names of replicas that do not reach what is loaded
        "assert loaded_weight.shape[0] != self.moe_config.num_logical_experts\n",
        "num_redundant_experts = self.moe_config.num_redundant_experts\n",
    ],
)
def test_a_name_alone_does_not_fill_replicas(plant: str) -> None:
    path = "vllm/model_executor/layers/fused_moe/routed_experts.py"
    text = real.release("0.33.0").read(path)
    line = "                loaded_experts = experts_shard.unbind()\n"
    assert text.count(line) == 1
    texts = {path: text.replace(line, f"                {plant}{line}")}
    result = real.generate(real.changed("0.33.0", texts), "qwen3_moe")
    assert "fused-replicas" in {f.kind.slug for f in result.faults}
