"""`eplb-codegen verify` as a user starts it, on the vLLM of this environment.

A test that is marked `release(...)` belongs to the environments that have one of these releases.
`nox` gives each environment its release in VERIFY_VLLM, and no test passes for run where vLLM is
not: outside of these sessions none is collected then.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.cli import main
from eplb_codegen.source.local import installed_tree

FAMILIES = {
    "0.10.0": ["qwen2_moe", "qwen3_moe", "llama4"],
    "0.11.2": ["qwen2_moe", "qwen3_vl_moe"],
    "0.12.0": ["qwen3_vl_moe", "llama4"],
    "0.22.1": ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "llama4"],
    "0.32.0": ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "llama4"],
}
ONLY_MARKED = {"0.12.0"}
"""Releases that are there for the tests which ask for them, and for no others."""
HERE = Path(__file__).parent

# Shells start background jobs, of CI for one, with SIGINT ignored, which children inherit.
signal.signal(signal.SIGINT, signal.default_int_handler)


def installed() -> str | None:
    tree = installed_tree()
    return tree.version if tree else None


if not (installed() or os.environ.get("VERIFY_VLLM")):
    without = {"test_verify_verdict.py"}  # needs no vLLM
    collect_ignore = [file.name for file in HERE.glob("test_*.py") if file.name not in without]


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "release(*versions): runs on these releases of vLLM only")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    version = installed()
    wanted = os.environ.get("VERIFY_VLLM")
    if wanted and wanted != version:
        raise pytest.UsageError(f"this environment should have vLLM {wanted}, and has {version}")
    other: list[pytest.Item] = []
    for item in [item for item in items if HERE in item.path.parents]:
        marks = list(item.iter_markers("release"))
        if any(version not in mark.args for mark in marks) or (
            version in ONLY_MARKED and not marks
        ):
            other.append(item)
    if other:
        config.hook.pytest_deselected(items=other)
        items[:] = [item for item in items if item not in other]


@pytest.fixture(scope="session")
def release() -> str:
    version = installed()
    assert version is not None
    return version


@pytest.fixture(scope="session")
def generated(release: str, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `apply` writes for this release: the folder above that of the release."""
    out = tmp_path_factory.mktemp("generated")
    assert main(["apply", *FAMILIES[release], "--out", str(out)]) == 0
    return out


@dataclass(frozen=True)
class Done:
    """A verify that has ended, asked for --json."""

    code: int
    out: str
    err: str

    @property
    def targets(self) -> list[dict[str, Any]]:
        targets: list[dict[str, Any]] = json.loads(self.out)["targets"]
        return targets

    @property
    def target(self) -> dict[str, Any]:
        (target,) = self.targets
        return target

    @property
    def checks(self) -> list[dict[str, str]]:
        return [check for target in self.targets for check in target["checks"]]

    def having(self, status: str) -> list[dict[str, str]]:
        return [check for check in self.checks if check["status"] == status]

    def failed(self, case: str = "") -> set[str]:
        """The names of checks that failed, in cases whose name holds this."""
        return {check["check"] for check in self.having("failed") if case in check["case"]}

    def all_passed(self, *cases: str) -> None:
        """Every check passed, apart from what has no meaning; and these cases were there."""
        assert self.code == 0, self.text
        assert not self.having("failed") and not self.having("not run"), self.text
        told = {check["case"] for check in self.having("passed")}
        assert set(cases) <= told, told

    @property
    def text(self) -> str:
        if not self.out.startswith("{"):
            return self.out + self.err
        lines = [
            f"{c['status']:8} {c['case']:28} {c['check']:16} {c['what']}: {c['figure']}\n"
            f"{c['detail']}"
            for c in self.checks
            if c["status"] != "passed"
        ]
        return "\n".join(lines) + self.err


Verify = Callable[..., Done]


@pytest.fixture(scope="session")
def start() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts `eplb-codegen verify`; what still runs at the end is killed."""
    processes = []

    def run(*arguments: object, **options: Any) -> subprocess.Popen[str]:
        process = subprocess.Popen(
            [sys.executable, "-m", "eplb_codegen", "verify", *map(str, arguments)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            **options,
        )
        processes.append(process)
        return process

    yield run
    for process in processes:
        process.kill()
        process.communicate()


@pytest.fixture(scope="session")
def verify(start: Callable[..., subprocess.Popen[str]]) -> Verify:
    """Runs it to its end, for programs."""

    def run(*arguments: object, **options: Any) -> Done:
        process = start(*arguments, "--json", **options)
        out, err = process.communicate(timeout=550)
        assert "Traceback" not in err or process.returncode == 2, err
        return Done(process.returncode, out, err)

    return run
