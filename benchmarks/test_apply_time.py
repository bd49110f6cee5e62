"""Whole-process time of `apply` as a multiple of a bare LibCST round trip, both from this run."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from eplb_codegen.source import find_source

RELEASE = "0.10.0"
ROUNDS = 9
ROUND_TRIP = "import sys, libcst; print(libcst.parse_module(open(sys.argv[1]).read()).code)"


@pytest.fixture(scope="module")
def model_file() -> Path:
    return find_source(version=RELEASE).root / "vllm/model_executor/models/qwen3_moe.py"


@pytest.fixture(scope="module")
def out(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("generated")


def cpu_seconds(command: list[str]) -> float:
    """User and system time of a process and its children: steadier than wall time."""
    before = os.times()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    after = os.times()
    used = after.children_user + after.children_system
    return used - before.children_user - before.children_system


def wall_seconds(command: list[str]) -> float:
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


@pytest.mark.parametrize(
    ("targets", "bound"),
    [(["qwen3_moe"], 2.0), (["--all"], 4.0)],
    ids=["one family", "all families"],
)
def test_apply_against_a_round_trip(
    targets: list[str],
    bound: float,
    model_file: Path,
    out: Path,
    record_property: Callable[[str, object], None],
) -> None:
    apply = [
        str(Path(sys.executable).with_name("eplb-codegen")),
        *["apply", *targets, "--vllm", RELEASE, "--out", str(out)],
    ]
    bare = [sys.executable, "-c", ROUND_TRIP, str(model_file)]
    for command in (apply, bare):
        cpu_seconds(command)  # byte code and file caches
    ratios = {}
    for name, seconds in (("cpu", cpu_seconds), ("wall", wall_seconds)):
        pairs = [(seconds(apply), seconds(bare)) for _ in range(ROUNDS)]
        ratios[name] = statistics.median(a / b for a, b in pairs)
        record_property(f"ratio_{name}", round(ratios[name], 2))
    print(f"\n{' '.join(targets)}: {ratios['cpu']:.2f} (cpu), {ratios['wall']:.2f} (wall)")
    assert ratios["wall"] <= bound
