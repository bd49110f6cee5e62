"""Configurations of real models, releases of vLLM, and `doctor` as a process."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.doctor.config import ModelConfig, read_config
from eplb_codegen.source import find_source

CONFIGS = Path(__file__).with_name("configs")


class Done(NamedTuple):
    """A process that has ended."""

    code: int
    out: str
    err: str


class Doctor:
    """Starts `eplb-codegen` in a folder of the test, with nothing of this machine's settings."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        unset = ("VLLM_PLUGINS", "EPLB_CODEGEN_DIR", "HF_HUB_OFFLINE", "HF_ENDPOINT", "HF_TOKEN")
        self.env = {k: v for k, v in os.environ.items() if k not in unset}
        self.env["HF_HOME"] = str(folder / "hf")

    def __call__(self, *arguments: object, python: tuple[str, ...] = (), **env: str) -> Done:
        done = subprocess.run(
            [sys.executable, *python, "-m", "eplb_codegen", *map(str, arguments)],
            capture_output=True,
            text=True,
            cwd=self.folder,
            env={**self.env, **env},
            timeout=60,
        )
        assert "Traceback" not in done.stderr, done.stderr[-900:]
        return Done(done.returncode, done.stdout, done.stderr)


@pytest.fixture
def doctor(tmp_path: Path) -> Doctor:
    return Doctor(tmp_path)


@pytest.fixture
def config() -> Callable[..., ModelConfig]:
    """A configuration of the folder `configs`; other fields of its language model by keyword."""

    def of(name: str, **changes: Any) -> ModelConfig:
        found = read_config(str(CONFIGS / f"{name}.json"), print)
        found.text.update(changes)
        return found

    return of


@pytest.fixture
def checkpoint(tmp_path: Path) -> Callable[..., Path]:
    """A folder with the config.json of a configuration, further fields by keyword."""

    def of(name: str, **changes: Any) -> Path:
        whole = json.loads((CONFIGS / f"{name}.json").read_text())
        folder = tmp_path / name
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps({**whole, **changes}))
        return folder

    return of


@pytest.fixture(scope="session")
def modules() -> Callable[[str], Modules]:
    """The modules of a release."""

    @cache
    def of(version: str) -> Modules:
        return Modules(find_source(version=version))

    return of
