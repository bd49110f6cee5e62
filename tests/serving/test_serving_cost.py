"""The plugin is installed on machines that mostly do not use it."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import time
from pathlib import Path

REGISTER = "from eplb_codegen.plugin import register; register()"
IDLE = {k: v for k, v in os.environ.items() if not k.startswith("EPLB_CODEGEN")}


def seconds(code: str) -> float:
    start = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], check=True, env=IDLE)
    return time.perf_counter() - start


def test_the_idle_plugin_imports_nothing() -> None:
    code = f"import sys; before = set(sys.modules); {REGISTER}; print(*set(sys.modules) - before)"
    done = subprocess.run(
        [sys.executable, "-c", code], check=True, env=IDLE, capture_output=True, text=True
    )
    assert set(done.stdout.split()) <= {"eplb_codegen", "eplb_codegen.plugin"}


def test_the_idle_plugin_costs_under_20_ms_at_start() -> None:
    seconds(REGISTER)  # byte code and file caches
    with_it, without = [], []
    for _ in range(15):
        with_it.append(seconds(REGISTER))
        without.append(seconds("pass"))
    assert statistics.median(with_it) - statistics.median(without) < 0.020


def test_files_are_run_as_checked_and_no_others(tmp_path: Path) -> None:
    """What lies on disk by the time a module is imported does not matter."""
    code = (
        "import pathlib, sys\n"
        "from eplb_codegen.serving.folder import Served\n"
        "from eplb_codegen.serving.modules import importable\n"
        "path = pathlib.Path(sys.argv[1])\n"
        "def of(name, text):\n"
        "    (path / f'{name}.py').write_text('raise SystemExit(1)')\n"
        "    module = f'eplb_codegen_generated.{name}'\n"
        "    return Served(module, path / f'{name}.py', text.encode(), {})\n"
        "importable([of('one', 'VALUE = 1'), of('two', 'from .one import VALUE')])\n"
        "(path / 'three.py').write_text('VALUE = 3')\n"
        "from eplb_codegen_generated import two\n"
        "assert two.VALUE == 1 and two.__file__ == str(path / 'two.py')\n"
        "try:\n"
        "    from eplb_codegen_generated import three\n"
        "except ImportError:\n"
        "    print('not there')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "not there"
