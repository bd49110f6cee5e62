"""The same source gives the same bytes, and a second time changes nothing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.families import known_families
from eplb_codegen.generate import Generator
from eplb_codegen.output import manifest
from eplb_codegen.output.writer import digest, write_set
from eplb_codegen.planning.plan import State
from eplb_codegen.source import Overlay

ERAS = ("0.10.0", "0.11.2", "0.24.0", "0.33.0")


def test_the_order_of_families_and_what_was_read_before_do_not_matter(release: Any) -> None:
    generator = Generator(release.tree)
    for family in reversed(known_families()):
        first = release.results[family.name]
        if first.files:
            again = generator.generate(family)
            # a fault keeps the syntax tree that it was found in, so it is compared by its place
            told = [[(f.kind, f.where) for f in r.faults] for r in (first, again)]
            assert told[0] == told[1]
            assert again._replace(faults=()) == first._replace(faults=())


def test_what_is_patched_counts_as_native(release: Any) -> None:
    """The tool sees its own work in a tree as finished, and would not patch it twice."""
    for family in known_families():
        result = release.results[family.name]
        if result.files:
            texts = {file.upstream: file.patched for file in result.files}
            assert Generator(Overlay.of(release.tree, texts)).generate(family).state is State.NATIVE


def test_writing_again_changes_nothing(release: Any, tmp_path: Path) -> None:
    for expected in (True, False):
        before = snapshot(tmp_path)
        for name, result in release.results.items():
            if result.entry:
                known = manifest.load(tmp_path, release.version)
                files = {file.name: file.output for file in result.files}
                after = known.with_family(name, result.entry)
                assert write_set(tmp_path, files, known, after, force=False) is expected
    assert snapshot(tmp_path) == before
    recorded = manifest.load(tmp_path, release.version)
    for file in tmp_path.glob("*.py"):
        assert recorded.recorded(file.name) == digest(file.read_bytes())


@pytest.mark.parametrize("version", ERAS)
def test_fresh_processes_write_the_same_bytes_once(
    the_release: Any, version: str, tmp_path: Path
) -> None:
    release = the_release[version]
    folder = tmp_path / version
    shots = []
    for seed in ("1", "2"):
        subprocess.run(
            [
                *(sys.executable, "-m", "eplb_codegen", "apply", "--all"),
                *("--vllm", version, "--out", tmp_path),
            ],
            env={**os.environ, "PYTHONHASHSEED": seed},
            check=True,
        )
        shots.append(snapshot(folder))
    assert shots[0] == shots[1]
    files = {file.name: file.output for _, file in release.patched}
    entries = {n: r.entry for n, r in release.results.items() if r.entry}
    files["manifest.toml"] = manifest.Manifest(version, entries).dump()
    assert {name: data for name, (data, _) in shots[0].items()} == {
        name: text.encode() for name, text in files.items()
    }


def snapshot(folder: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of every file of a folder, temporary ones included."""
    return {p.name: (p.read_bytes(), p.stat().st_mtime_ns) for p in folder.iterdir()}
