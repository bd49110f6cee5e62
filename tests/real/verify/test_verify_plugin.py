"""The plugin in releases whose server does not run on CPUs: registry, inspection, Ray."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

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


@pytest.mark.release("0.10.0", "0.11.2", "0.22.1")
@pytest.mark.parametrize("folder", ["there", "gone"])
def test_the_registry_resolves_to_the_generated_class(
    generated: Path, tmp_path: Path, folder: str
) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(SITE)
    chosen = generated if folder == "there" else tmp_path / "gone"
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={
            **os.environ,
            "PYTHONPATH": str(tmp_path / "site"),
            "EPLB_CODEGEN_DIR": os.path.relpath(chosen, tmp_path),
            "VLLM_CACHE_ROOT": str(tmp_path / "cache"),
        },
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if folder == "there":
        assert done.returncode == 0, done.stderr
        assert done.stdout.splitlines()[-1] == "eplb_codegen_generated.qwen2_moe"
    else:
        assert done.returncode != 0
        assert f"EPLB_CODEGEN_DIR={chosen}: there is no such folder" in done.stderr
