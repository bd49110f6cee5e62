"""What would be served is checked to the byte; nothing is served otherwise."""

from __future__ import annotations

import os
import re
import shutil
from pathlib import Path

import pytest
from eplb_codegen.cli import main
from eplb_codegen.errors import Fault
from eplb_codegen.output.writer import digest
from eplb_codegen.serving.folder import served
from eplb_codegen.source import SourceTree, find_source

RELEASE = "0.10.0"
MODELS = "vllm/model_executor/models"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("made")
    assert main(["apply", "qwen3_moe", "llama4", "--vllm", RELEASE, "--out", str(out)]) == 0
    return out


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "generated"))


@pytest.fixture(scope="module")
def tree() -> SourceTree:
    return find_source(version=RELEASE)


def refused(folder: Path, tree: SourceTree) -> str:
    with pytest.raises(Fault) as fault:
        served(folder, tree)
    return str(fault.value)


def test_what_was_written_is_served(folder: Path, tree: SourceTree) -> None:
    files = {file.module.rpartition(".")[2]: file for file in served(folder, tree)}
    assert sorted(files) == ["llama4", "mllama4", "qwen3_moe"]
    assert files["qwen3_moe"].architectures == {"Qwen3MoeForCausalLM": "Qwen3MoeForCausalLM"}
    assert files["qwen3_moe"].source == (folder / RELEASE / "qwen3_moe.py").read_bytes()


def test_a_build_of_the_release_is_served(folder: Path, tree: SourceTree) -> None:
    assert served(folder, SourceTree(tree.root, f"{RELEASE}+cu129", "a build"))


def test_missing_folder(tmp_path: Path, tree: SourceTree) -> None:
    told = refused(tmp_path / "none", tree)
    assert "there is no such folder" in told and "eplb-codegen apply" in told


def test_other_release(folder: Path) -> None:
    told = refused(folder, find_source(version="0.10.1"))
    assert f"no files for vLLM 0.10.1; what is there is for {RELEASE}" in told


def test_manifest_of_another_release(folder: Path, tree: SourceTree) -> None:
    (folder / RELEASE).rename(folder / "0.10.1")
    told = refused(folder, SourceTree(tree.root, "0.10.1", "renamed"))
    assert "is for vLLM 0.10.0, not 0.10.1" in told


@pytest.mark.parametrize("path", [f"{MODELS}/qwen3_moe.py", f"{MODELS}/interfaces.py"])
def test_upstream_file_changed(folder: Path, tree: SourceTree, tmp_path: Path, path: str) -> None:
    root = tmp_path / "vllm"
    shutil.copytree(tree.root, root, ignore=shutil.ignore_patterns("complete"))
    with (root / path).open("a") as stream:
        stream.write("# local change\n")
    told = refused(folder, SourceTree(root, RELEASE, "changed"))
    assert f"{root / path} is not the file that" in told and "eplb-codegen apply" in told


def test_generated_file_changed(folder: Path, tree: SourceTree) -> None:
    with (folder / RELEASE / "qwen3_moe.py").open("a") as stream:
        stream.write("# mine\n")
    told = refused(folder, tree)
    assert "somebody changed it" in told and "apply qwen3_moe --force" in told


def test_generated_file_gone(folder: Path, tree: SourceTree) -> None:
    (folder / RELEASE / "mllama4.py").unlink()
    assert "mllama4.py cannot be read" in refused(folder, tree)


@pytest.mark.parametrize("what", [".", RELEASE, f"{RELEASE}/manifest.toml", f"{RELEASE}/llama4.py"])
@pytest.mark.parametrize("bits", [0o020, 0o002])
def test_others_may_write(folder: Path, tree: SourceTree, what: str, bits: int) -> None:
    path = folder / what
    path.chmod(path.stat().st_mode | bits)
    told = refused(folder, tree)
    assert f"{path} can be written by others" in told and "chmod -R go-w" in told


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_of_another_user(folder: Path, tree: SourceTree) -> None:
    os.chown(folder / RELEASE / "llama4.py", 12345, -1)
    assert "belongs to another user (uid 12345)" in refused(folder, tree)


@pytest.mark.parametrize("name", ["../../evil.py", "/tmp/evil.py", "a/b.py", "evil.so", ".py"])
def test_only_modules_of_the_folder_are_run(folder: Path, tree: SourceTree, name: str) -> None:
    manifest = folder / RELEASE / "manifest.toml"
    manifest.write_text(manifest.read_text().replace('"qwen3_moe.py"', f'"{name}"'))
    assert re.search("is damaged|which is no module of its own", refused(folder, tree))


def test_file_that_the_manifest_does_not_list_is_not_served(folder: Path, tree: SourceTree) -> None:
    (folder / RELEASE / "extra.py").write_text("raise SystemExit('run')\n")
    assert "extra" not in {file.path.stem for file in served(folder, tree)}


def test_a_link_is_followed_to_a_file_that_is_checked(
    folder: Path, tree: SourceTree, tmp_path: Path
) -> None:
    path = folder / RELEASE / "llama4.py"
    elsewhere = tmp_path / "elsewhere.py"
    shutil.move(path, elsewhere)
    path.symlink_to(elsewhere)
    assert digest(path.read_bytes()) in (folder / RELEASE / "manifest.toml").read_text()
    assert served(folder, tree)
    elsewhere.chmod(0o666)
    assert "can be written by others" in refused(folder, tree)
