"""Runs vLLM's engine in processes of its own, with the plugin beside this file."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).parent
VERIFY = HERE.parents[2] / "codegen" / "verify"


@dataclass(frozen=True)
class Run:
    """What an engine printed: its tokens, the slots that each rearrangement moved, who served."""

    tokens: list[list[int]]
    moved: list[int]
    served: set[str]


class EngineFailed(Exception):
    """Holds all that the engine's processes printed."""


@pytest.fixture(scope="session")
def plugin_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that announces the plugin, as an installed distribution would."""
    folder = tmp_path_factory.mktemp("plugin")
    info = folder / "cpu_eplb_test-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: cpu-eplb-test\nVersion: 0\n")
    (info / "entry_points.txt").write_text(
        "[vllm.general_plugins]\ncpu_eplb_test = cpu_eplb:register\n"
    )
    return folder


@pytest.fixture(scope="session")
def engine(plugin_folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Run]:
    def run(
        model: Path, options: dict[str, Any], generated: Path | None = None, target: str = ""
    ) -> Run:
        paths = [plugin_folder, HERE, VERIFY, *([generated] if generated else [])]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(map(str, paths)),
            "HF_HUB_OFFLINE": "1",
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": "0|1",
            "VLLM_NO_USAGE_STATS": "1",
            "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")),
            # the reference kernels serve EPLB off too: the compiled one ignores the expert map
            "TEST_CPU_EPLB": "1",
            "TEST_GENERATED": target,
        }
        done = subprocess.run(
            [sys.executable, str(HERE / "greedy.py"), str(model), json.dumps(options)],
            env=environment,
            cwd=plugin_folder,
            capture_output=True,
            text=True,
            timeout=600,
        )
        output = done.stdout + done.stderr
        if done.returncode:
            raise EngineFailed(output)
        tokens = re.search(r"^TOKENS (.*)$", done.stdout, re.M)
        assert tokens, output[-6000:]
        return Run(
            json.loads(tokens[1]),
            [int(n) for n in re.findall(r"REARRANGED (\d+)", output)],
            set(re.findall(r"SERVED (\S+)", output)),
        )

    return run
