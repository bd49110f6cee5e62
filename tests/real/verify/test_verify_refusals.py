"""Exit code 2: what stands in the way, and what to do about it; and what a person reads."""

from __future__ import annotations

import shutil
import subprocess
import sys
import venv
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

Refused = Callable[..., str]


@pytest.fixture
def refused(verify: Any) -> Refused:
    """Verify, which must end with exit code 2; returns the message."""

    def run(*arguments: object) -> str:
        done = verify(*arguments)
        assert done.code == 2, done.text
        assert "Traceback" not in done.err.partition("cannot be run here")[0]
        return str(done.err)

    return run


@pytest.fixture
def copy(generated: Path, release: str, tmp_path: Path) -> Path:
    shutil.copytree(generated, tmp_path / "copy")
    return tmp_path / "copy" / release


def test_edited_by_hand(refused: Refused, copy: Path) -> None:
    with (copy / "qwen2_moe.py").open("a", encoding="utf-8") as file:
        file.write("# mine\n")
    said = refused("qwen2_moe", "--generated", copy.parent)
    assert "qwen2_moe.py was edited" in said
    assert "eplb-codegen apply qwen2_moe --source" in said and "--force" in said


def test_missing_file(refused: Refused, copy: Path) -> None:
    (copy / "qwen2_moe.py").unlink()
    said = refused("qwen2_moe", "--generated", copy.parent)
    assert "qwen2_moe.py is not there" in said and "eplb-codegen apply qwen2_moe" in said


def test_nothing_generated(refused: Refused, tmp_path: Path) -> None:
    said = refused("qwen2_moe", "--generated", tmp_path)
    assert "has no generated file of it" in said
    assert "eplb-codegen apply qwen2_moe" in said and "--upstream" in said


def test_made_from_another_upstream_file(refused: Refused, copy: Path) -> None:
    manifest = copy / "manifest.toml"
    lines = manifest.read_text(encoding="utf-8").splitlines()
    other = 'upstream_sha256 = "' + "0" * 64 + '"'
    lines = [other if line.startswith("upstream_sha256") else line for line in lines]
    manifest.write_text("\n".join(lines), encoding="utf-8")
    said = refused("qwen2_moe", "--generated", copy.parent)
    assert "was made from another vllm/model_executor/models/qwen2_moe.py" in said


def test_unknown_family(refused: Refused) -> None:
    said = refused("olmoe", "--upstream")
    assert "no tiny model of this family" in said and "qwen3_vl_moe" in said


def test_uneven_spread(refused: Refused, generated: Path) -> None:
    said = refused("qwen2_moe", "--generated", generated, "--redundant", 3)
    assert "8 experts and 3 redundant ones do not spread evenly over 2 ranks" in said
    assert "--redundant 4" in said


def test_numbers_out_of_range(refused: Refused) -> None:
    assert "--ranks must be at least 2" in refused("qwen2_moe", "--ranks", 1)
    assert "--redundant must be at least 0" in refused("qwen2_moe", "--redundant", -2)


def test_report_that_cannot_be_written(refused: Refused, tmp_path: Path) -> None:
    said = refused("qwen2_moe", "--upstream", "--report", tmp_path / "none" / "report.html")
    assert "report.html cannot be written" in said


def test_no_such_python(refused: Refused, tmp_path: Path) -> None:
    assert "is no program" in refused("qwen2_moe", "--python", tmp_path / "python")


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python without any package."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return folder / "bin" / "python"


def test_python_without_vllm(refused: Refused, bare: Path) -> None:
    said = refused("qwen2_moe", "--upstream", "--python", bare)
    assert f"{bare} has no vLLM" in said and "--python" in said


def test_vllm_that_cannot_be_run(refused: Refused, bare: Path, release: str) -> None:
    """The models are there, but nothing that they need."""
    done = subprocess.run(
        [bare, "-c", "import site; print(site.getsitepackages()[0])"],
        capture_output=True,
        text=True,
        check=True,
    )
    models = Path(done.stdout.strip()) / "vllm" / "model_executor" / "models"
    models.mkdir(parents=True)
    (models.parents[1] / "__init__.py").touch()
    (models.parents[1] / "_version.py").write_text(f"version = '{release}'\n", encoding="utf-8")
    said = refused("qwen2_moe", "--upstream", "--python", bare)
    assert "cannot be run here" in said and "No module named 'torch'" in said


def test_cuda_without_a_gpu(refused: Refused) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    said = refused("qwen2_moe", "--upstream", "--device", "cuda", "--layout", "per-expert")
    assert "cannot be run here" in said


@pytest.mark.release("0.22.1")
def test_text_and_report(start: Any, generated: Path, tmp_path: Path) -> None:
    """A line a check for people, and a page that needs nothing from elsewhere."""
    report = tmp_path / "report.html"
    process = start(
        *("qwen2_moe", "--generated", generated, "--layout", "per-expert", "--redundant", 2),
        *("--python", sys.executable, "--report", report),
    )
    out, err = process.communicate(timeout=300)
    assert process.returncode == 0, out + err
    lines = out.splitlines()
    assert lines[0].startswith("Qwen2MoeForCausalLM (")
    assert "2 ranks, tiny model, E = 8" in lines[1]
    (slots,) = [line for line in lines if "3 slots" in line and "60 of 60 right" in line]
    assert slots.split()[0] == "ok"
    assert lines[-1].startswith("PASSED: ")
    page = report.read_text(encoding="utf-8")
    assert "proven: every check passed" in page
    assert page.count('class="cell right"') > 100
    assert "http" not in page and "<script" not in page and "url(" not in page
    assert "color-scheme: light dark" in page and "@media print" in page


@pytest.mark.parametrize(
    "options, says",
    [
        (["--device", "cuda"], "--quantization wna16 is proven with reference kernels"),
        (["--layout", "fused"], "--quantization is for the tiny checkpoint"),
    ],
)
def test_quantisation_where_it_proves_nothing(
    refused: Refused, options: list[str], says: str
) -> None:
    assert says in refused("qwen2_moe", "--upstream", "--quantization", "wna16", *options)
