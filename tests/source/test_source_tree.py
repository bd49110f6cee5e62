"""Reading a source tree."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.errors import EnvironmentFault, Exit
from eplb_codegen.source import SourceTree


@pytest.fixture
def tree(tmp_path: Path, make: Any) -> SourceTree:
    (tmp_path / "outside.py").write_text("secret")
    root = make.tree(tmp_path / "root")
    (root / "vllm/latin.py").write_bytes(b"# caf\xe9")
    (root / "vllm/large.py").write_bytes(bytes(4_000_001))
    (root / "vllm/limit.py").write_bytes(bytes(4_000_000))
    return SourceTree(root, "1.0", "a test")


def test_newlines_stay_as_they_are(tree: SourceTree) -> None:
    assert tree.read("vllm/config/__init__.py") == "first = 1\r\n"
    assert len(tree.read("vllm/limit.py")) == 4_000_000


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("vllm/none.py", "vllm/none.py cannot be read: No such file"),
        ("vllm/config", "vllm/config cannot be read: Is a directory"),
        ("vllm/latin.py", "vllm/latin.py is not UTF-8 text (byte 5)"),
        ("vllm/large.py", "vllm/large.py is larger than 4 MB"),
        ("../outside.py", "'../outside.py' is not a path inside"),
        ("vllm/../../outside.py", "is not a path inside"),
        ("{parent}/outside.py", "is not a path inside"),
        ("..\\outside.py", "is not a path inside"),
        ("", "is not a path inside"),
    ],
)
def test_unreadable(tree: SourceTree, path: str, message: str) -> None:
    path = path.format(parent=tree.root.parent)
    with pytest.raises(EnvironmentFault) as fault:
        tree.read(path)
    assert message in fault.value.message
    assert fault.value.advice
    assert fault.value.exit is Exit.USAGE


def test_exists(tree: SourceTree) -> None:
    paths = ["vllm/config.py", "vllm/config", "vllm/none.py", "../outside.py"]
    assert [tree.exists(path) for path in paths] == [True, True, False, False]


@pytest.mark.parametrize(
    ("module", "path"),
    [
        ("vllm", "vllm/__init__.py"),
        ("vllm.config", "vllm/config/__init__.py"),  # before config.py, as in Python
        ("vllm.model_executor.models.moe", "vllm/model_executor/models/moe.py"),
        ("vllm.model_executor", None),  # a folder without __init__.py
        ("vllm.none", None),
        ("..outside", None),
        ("vllm/config", None),
        ("", None),
    ],
)
def test_module_path(tree: SourceTree, module: str, path: str | None) -> None:
    assert tree.module_path(module) == path
