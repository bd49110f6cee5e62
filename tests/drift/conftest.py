"""Folders as `apply` leaves them, made of real releases without a process of their own."""

from __future__ import annotations

import gc
import json
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from eplb_codegen import cli
from eplb_codegen.families import family
from eplb_codegen.generate import Generator, Result
from eplb_codegen.output.writer import write_family
from eplb_codegen.source import SourceTree, find_source

MODELS = "vllm/model_executor/models"


class Done(NamedTuple):
    """A process that has ended, never with a traceback."""

    code: int
    out: str
    err: str

    @property
    def json(self) -> dict[str, Any]:
        return json.loads(self.out)  # type: ignore[no-any-return]

    @property
    def states(self) -> dict[str, str]:
        """Of `check --json`: family -> state."""
        return {t["family"]: t["state"] for t in self.json["targets"]}


@pytest.fixture
def tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., Done]:
    """Runs the command line in the folder of the test, with a state folder of its own.

    In this process, which is faster; in one of its own, after some other code, if there is any.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.delenv("GITHUB_WORKSPACE", raising=False)

    def run(*arguments: object, code: str = "", **env: str) -> Done:
        words = list(map(str, arguments))
        if code:
            main = "import sys; from eplb_codegen.cli import main; sys.exit(main())"
            command = [sys.executable, "-c", f"{code}\n{main}", *words]
            pipes: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
            done = subprocess.run(command, **pipes, check=False)
            assert "Traceback" not in done.stderr, done.stderr[-900:]
            return Done(done.returncode, done.stdout, done.stderr)
        capfd.readouterr()
        with monkeypatch.context() as patch:
            for name, value in env.items():
                patch.setenv(name, value)
            try:
                exit = cli.main(words)
            finally:
                gc.enable()  # which a command switches off, as its process is short
        return Done(exit, *capfd.readouterr())

    return run


@cache
def _generate(version: str, name: str) -> tuple[SourceTree, Result]:
    tree = find_source(version=version)
    return tree, Generator(tree).generate(family(name))


@pytest.fixture(scope="session")
def result() -> Callable[[str, str], Result]:
    """What a family comes to in a release."""
    return lambda version, name: _generate(version, name)[1]


@pytest.fixture
def generated(tmp_path: Path) -> Callable[..., Path]:
    """Writes families of a release to `generated/`; the folder of the release."""

    def write(version: str, *names: str) -> Path:
        folder = tmp_path / "generated" / version
        for name in names:
            _, made = _generate(version, name)
            assert made.entry
            outputs = {f.name: f.output for f in made.files}
            write_family(folder, version, name, made.entry, outputs, force=False)
        return folder

    return write


@pytest.fixture
def source(tmp_path: Path) -> Callable[..., Path]:
    """Makes `src`: the files of a release that a family depends on, some of them changed.

    `changes`: path -> function of its text, or None to leave the file out.
    """

    def make(version: str, name: str, changes: dict[str, Any] | None = None) -> Path:
        tree, made = _generate(version, name)
        assert made.entry
        root = tmp_path / "src"
        for path in {"PKG-INFO", "vllm/__init__.py", *made.entry.depends}:
            change = (changes or {}).get(path, str)
            if change is not None:
                (root / path).parent.mkdir(parents=True, exist_ok=True)
                (root / path).write_bytes(change(tree.read(path)).encode())
        return root

    return make
