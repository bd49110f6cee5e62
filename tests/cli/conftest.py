"""The command line as a process, and small copies of real releases that may be damaged."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from eplb_codegen.families import known_families
from eplb_codegen.generate import Generator, Result
from eplb_codegen.source import find_source

MODELS = "vllm/model_executor/models"

# Shells start background jobs, of CI for one, with SIGINT ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


class Done(NamedTuple):
    """A process that has ended. No command may ever end with a traceback."""

    code: int
    out: str
    err: str

    @property
    def text(self) -> str:
        return self.out + self.err


class Commands:
    """Starts `python -m eplb_codegen` in a folder of the test."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def start(self, *arguments: object, code: str = "", **options: object) -> subprocess.Popen[str]:
        """`code` runs first in the same process; `env` is added to the environment."""
        env = {**os.environ, **options.pop("env", {})}  # type: ignore[dict-item]
        main = "import sys; from eplb_codegen.cli import main; sys.exit(main())"
        how = ["-c", f"{code}\n{main}"] if code else ["-m", "eplb_codegen"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        return subprocess.Popen(  # type: ignore[call-overload, no-any-return]
            [sys.executable, *how, *map(str, arguments)],
            **{"cwd": self.folder, "env": env, **pipes, **options},
        )

    def __call__(self, *arguments: object, **options: object) -> Done:
        process = self.start(*arguments, **options)
        out, err = process.communicate(timeout=60)
        assert "Traceback" not in (err or ""), err[-900:]
        return Done(process.returncode, out or "", err or "")


@pytest.fixture
def run(tmp_path: Path) -> Commands:
    return Commands(tmp_path)


@pytest.fixture(scope="session")
def results() -> Callable[[str], dict[str, Result]]:
    """What the families come to in a release, made in this process."""

    @cache
    def of(version: str) -> dict[str, Result]:
        generator = Generator(find_source(version=version))
        return {family.name: generator.generate(family) for family in known_families()}

    return of


@pytest.fixture
def checkout(tmp_path: Path, results: Callable[[str], dict[str, Result]]) -> Callable[..., Path]:
    """Makes `src`, a folder with those files of a release that its patches depend on.

    `changes` of files by path: new content, a function of the old one, or None to leave it out.
    Importing its vLLM ends the process.
    """

    def make(version: str = "0.10.0", name: str = "src", **changes: object) -> Path:
        tree = find_source(version=version)
        entries = [r.entry for r in results(version).values() if r.entry]
        paths = {"PKG-INFO", *(path for entry in entries for path in entry.depends)}
        files = {path: (tree.root / path).read_bytes() for path in paths}
        files["vllm/__init__.py"] = b"raise SystemExit('vllm was imported')\n"
        changed: dict[str, object] = changes.get("changes", {})  # type: ignore[assignment]
        for path, change in changed.items():
            new = change(files[path]) if callable(change) else change
            if new is None:
                del files[path]
            else:
                files[path] = new
        root = tmp_path / name
        for path, data in files.items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_bytes(data)
        return root

    return make


@pytest.fixture
def contents() -> Callable[[Path], dict[str, bytes]]:
    """Every file below a folder, hidden ones included; empty if there is no such folder."""

    def read(folder: Path) -> dict[str, bytes]:
        files = [path for path in folder.rglob("*") if path.is_file()]
        return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}

    return read
