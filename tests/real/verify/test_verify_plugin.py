"""The plugin in releases whose server does not run on CPUs: registry, inspection, Ray, methods."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

SITE = """
from pathlib import Path

from eplb_codegen.verify.worker import cpu

cpu.before_import(Path(__file__).parent)
"""
"""Lets vLLM be imported on a CPU, in the process that inspects models too."""
SCRIPT = """
import vllm.model_executor.models.qwen2_moe as theirs
from vllm.plugins import load_general_plugins

load_general_plugins()
import eplb_codegen.plugin

eplb_codegen.plugin.register()  # vLLM calls it again in some processes
from vllm.model_executor.models import ModelRegistry

entry = ModelRegistry.models["Qwen2MoeForCausalLM"]
ours = entry.load_model_cls()
assert ours is not theirs.Qwen2MoeForCausalLM
assert theirs.Qwen2MoeForCausalLM.__module__ == "vllm.model_executor.models.qwen2_moe"
assert entry.inspect_model_cls().is_text_generation_model
from vllm.ray.ray_env import get_env_vars_to_copy

assert "EPLB_CODEGEN_DIR" in get_env_vars_to_copy()
print(ours.__module__)
"""


@pytest.fixture
def start_python(tmp_path: Path) -> Callable[[str, Path], subprocess.CompletedProcess[str]]:
    """Runs a script in a new interpreter with the plugin's folder set, relative to its own."""

    def run(script: str, folder: Path) -> subprocess.CompletedProcess[str]:
        (tmp_path / "script.py").write_text(script)
        (tmp_path / "site").mkdir()
        (tmp_path / "site/sitecustomize.py").write_text(SITE)
        return subprocess.run(
            [sys.executable, str(tmp_path / "script.py")],
            cwd=tmp_path,
            env={
                **os.environ,
                "PYTHONPATH": str(tmp_path / "site"),
                "EPLB_CODEGEN_DIR": os.path.relpath(folder, tmp_path),
                "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
            },
            capture_output=True,
            text=True,
            timeout=300,
            check=False,
        )

    return run


@pytest.mark.release("0.10.0", "0.11.2", "0.22.1")
def test_the_registry_resolves_to_the_generated_class(generated: Path, start_python: Any) -> None:
    done = start_python(SCRIPT, generated)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "eplb_codegen_generated.qwen2_moe"


@pytest.mark.release("0.10.0", "0.11.2", "0.22.1")
def test_a_folder_that_is_gone_ends_the_process(tmp_path: Path, start_python: Any) -> None:
    done = start_python(SCRIPT, tmp_path / "gone")
    assert done.returncode != 0
    assert f"EPLB_CODEGEN_DIR={tmp_path / 'gone'}: there is no such folder" in done.stderr


METHOD = """
import sys
{before}
from vllm.plugins import load_general_plugins

load_general_plugins()
load_general_plugins()
import eplb_codegen.plugin

eplb_codegen.plugin.register()
from vllm.model_executor.layers.quantization.compressed_tensors import (
    compressed_tensors,
    compressed_tensors_moe,
)

for name in ("CompressedTensorsWNA16MoEMethod", "CompressedTensorsWNA16MarlinMoEMethod"):
    ours = getattr(compressed_tensors_moe, name)
    assert ours.supports_eplb.fget(None) is True
    # what chooses the class, whenever it was imported, finds ours
    chooser = compressed_tensors.CompressedTensorsMoEMethod.get_moe_method
    assert chooser.__globals__[name] is ours
print(compressed_tensors_moe.__name__, compressed_tensors_moe.__file__)
"""
UPSTREAM = "vllm.model_executor.layers.quantization.compressed_tensors.compressed_tensors"


@pytest.mark.release("0.11.2")
@pytest.mark.parametrize("before", ["", f"import {UPSTREAM}"], ids=["first", "upstream first"])
def test_a_quantisation_method_is_put_in_place(
    generated: Path, before: str, start_python: Any
) -> None:
    done = start_python(METHOD.format(before=before), generated)
    assert done.returncode == 0, done.stderr
    module, file = done.stdout.splitlines()[-1].split()
    assert module == f"{UPSTREAM}_moe"
    assert Path(file).samefile(generated / "0.11.2/compressed_tensors_moe.py")
