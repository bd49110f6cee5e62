"""Whole-process time of `apply` as a multiple of a bare LibCST round trip, both from this run."""

from __future__ import annotations

import os
import resource
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
from eplb_codegen.source import find_source

RELEASE = "0.10.0"
ROUNDS = 9
ROUND_TRIP = "import sys, libcst; print(libcst.parse_module(open(sys.argv[1]).read()).code)"


class Seconds(NamedTuple):
    """Of a process and its children. User and system time are steadier than wall time."""

    cpu: float
    wall: float


class Timer:
    """Runs commands as an installed package runs: with byte code, whatever this shell says."""

    def __init__(self, byte_code: Path) -> None:
        self.env = {**os.environ, "PYTHONPYCACHEPREFIX": str(byte_code)}
        self.env.pop("PYTHONDONTWRITEBYTECODE", None)

    def __call__(self, command: list[str]) -> Seconds:
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, env=self.env)
        after, end = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
        return Seconds(used, end - start)


@pytest.fixture(scope="module")
def model_file() -> Path:
    return find_source(version=RELEASE).root / "vllm/model_executor/models/qwen3_moe.py"


@pytest.fixture(scope="module")
def timer(tmp_path_factory: pytest.TempPathFactory) -> Timer:
    return Timer(tmp_path_factory.mktemp("byte_code"))


@pytest.mark.parametrize("writes", [False, True], ids=["unchanged", "written"])
@pytest.mark.parametrize(
    ("targets", "bound"),
    [(["qwen3_moe"], 2.0), (["--all"], 4.0)],
    ids=["one family", "all families"],
)
def test_apply_against_a_round_trip(
    targets: list[str],
    bound: float,
    writes: bool,
    timer: Timer,
    model_file: Path,
    tmp_path: Path,
    record_property: Callable[[str, object], None],
) -> None:
    out = tmp_path / "generated"
    apply = [
        str(Path(sys.executable).with_name("eplb-codegen")),
        *["apply", *targets, "--vllm", RELEASE, "--out", str(out)],
    ]
    bare = [sys.executable, "-c", ROUND_TRIP, str(model_file)]
    pairs = []
    for _ in range(ROUNDS + 1):
        if writes:
            shutil.rmtree(out, ignore_errors=True)
        pairs.append((timer(apply), timer(bare)))
    del pairs[0]  # it made the byte code, filled the system's caches, and wrote
    ratios = {
        name: statistics.median(getattr(a, name) / getattr(b, name) for a, b in pairs)
        for name in Seconds._fields
    }
    for name, ratio in ratios.items():
        record_property(f"ratio_{name}", round(ratio, 2))
    what = "written" if writes else "unchanged"
    print(f"\n{' '.join(targets)}, {what}: {ratios['cpu']:.2f} (cpu), {ratios['wall']:.2f} (wall)")
    assert ratios["wall"] <= bound
