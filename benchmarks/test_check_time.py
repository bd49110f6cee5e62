"""Whole-process time of `check`: as a multiple of `apply --all`, and over all releases."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from eplb_codegen.source import cached_versions, find_source

TOOL = str(Path(sys.executable).with_name("eplb-codegen"))
ROUNDS = 7
RELEASES = 40
CORES = 2


def seconds(*arguments: str, expected: int = 0) -> float:
    start = time.perf_counter()
    done = subprocess.run([TOOL, *arguments], stdout=subprocess.DEVNULL, check=False)
    used = time.perf_counter() - start
    assert done.returncode == expected, done
    return used


@pytest.mark.parametrize(
    "made_from, exit", [("0.25.0", 0), ("0.24.0", 1)], ids=["in sync", "everything changed"]
)
def test_check_against_apply(
    made_from: str, exit: int, tmp_path: Path, record_property: Callable[[str, object], None]
) -> None:
    for version in (made_from, "0.25.0"):
        find_source(version=version)
    out, other = str(tmp_path / "out"), str(tmp_path / "other")
    seconds("apply", "--all", "--vllm", made_from, "--out", out)
    apply = ("apply", "--all", "--vllm", "0.25.0", "--out", other)
    check = ("check", "--vllm", "0.25.0", "--out", out)
    seconds(*apply)
    seconds(*check, expected=exit)
    pairs = [(seconds(*check, expected=exit), seconds(*apply)) for _ in range(ROUNDS)]
    ratio = statistics.median(a / b for a, b in pairs)
    record_property("ratio", round(ratio, 2))
    print(f"\ncheck of 0.25.0 with what was made from {made_from}: {ratio:.2f} times apply --all")
    assert ratio <= 2


@pytest.fixture(scope="module")
def everything(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, list[str]]]:
    """What `apply` writes of all families in all releases."""
    out = tmp_path_factory.mktemp("generated")
    versions = cached_versions()
    if len(versions) < RELEASES:
        pytest.fail("the cache has not all releases: run the unit tests first")
    for version in versions:
        seconds("apply", "--all", "--vllm", version, "--out", str(out))
    yield out, versions


def test_all_families_in_all_releases(
    everything: tuple[Path, list[str]], record_property: Callable[[str, object], None]
) -> None:
    """A process for each release, as many at a time as there are cores."""
    out, versions = everything
    start = time.perf_counter()
    with ThreadPoolExecutor(CORES) as pool:
        list(pool.map(lambda v: seconds("check", "--vllm", v, "--out", str(out)), versions))
    used = time.perf_counter() - start
    record_property("seconds", round(used, 1))
    print(f"\n{len(versions)} releases: {used:.1f} s, {used / len(versions):.2f} s for each")
    assert used <= 60
