"""Damaged and unusual variants of the toy: right or refused with a message, never anything else."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import transforms_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st
from transforms_damage import DAMAGE, SHAPES

BROKEN = {"no mapping", "no loop", "no FusedMoE", "BOM", "null byte"}
"""Variants that do not work as they are; they must be refused."""


@pytest.mark.parametrize("name", sorted(DAMAGE))
def test_right_or_refused(tmp_path: Path, name: str) -> None:
    variant = DAMAGE[name]
    if name not in BROKEN:
        assert toy.upstream_works(variant.source, variant.options) == "", "of no use as a test"
    found = toy.verdict(tmp_path, variant.source, **variant.options)
    assert (found == "right" and name not in BROKEN) or found.startswith("refused: vllm/"), found
    # a refusal is about the source, not about what a linter says of our own output
    assert not re.search(r"\bF\d{3}\b|path=", found), found


@settings(max_examples=30, deadline=None, derandomize=True)
@given(line=st.integers(1, toy.MODEL.count("\n")), column=st.integers(0, 40))
def test_truncated_anywhere(
    tmp_path_factory: pytest.TempPathFactory, line: int, column: int
) -> None:
    lines = toy.MODEL.split("\n")
    source = "\n".join([*lines[:line], lines[line][:column]])
    found = toy.verdict(tmp_path_factory.mktemp("toy"), source)
    if found != "right" and not found.startswith("refused: "):
        # cut between two statements it may still be Python that does not work
        assert toy.upstream_works(source, {}) != "", found


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    at=st.integers(0, toy.MODEL.count("\n") - 1),
    what=st.sampled_from(["#x", "", "  # x", "\f", "   "]),
    shape=st.sampled_from(["plain", "stops on success", "mapping handed on"]),
)
def test_comments_and_blank_lines_anywhere(
    tmp_path_factory: pytest.TempPathFactory, at: int, what: str, shape: str
) -> None:
    lines = SHAPES[shape].source.split("\n")
    source = "\n".join([*lines[:at], what, *lines[at:]])
    found = toy.verdict(tmp_path_factory.mktemp("toy"), source, shapes=[(4, 2, 2)])
    assert found == "right" or found.startswith("refused: vllm/"), found
    if found != "right":
        assert toy.upstream_works(source, {}) != "", found
