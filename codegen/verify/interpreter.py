"""Which vLLM another interpreter would import: found without importing it."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

from ..errors import EnvironmentFault
from ..paths import expanded
from ..source import SourceTree
from ..source.local import tree_at
from .launch import environment

_ASK = (
    # Not the current folder's: the ranks run elsewhere.
    "import sys; sys.path.pop(0); from importlib.util import find_spec; "
    "s = find_spec('vllm'); print(s.origin if s and s.origin else '')"
)
_ADVICE = "Name the Python of an environment that has vLLM, with --python."


def executable(name: str) -> Path:
    """The interpreter that a user means by a path or a command's name.

    A link is kept as it is: it is what makes the Python of a virtual environment that one's.

    Raises:
        EnvironmentFault: there is no such program.
    """
    found = shutil.which(expanded(name))
    if found is None:
        raise EnvironmentFault(f"{name} is no program that can be run", _ADVICE)
    return Path(found).absolute()


def vllm_of(python: Path) -> SourceTree:
    """The vLLM that this interpreter has.

    Raises:
        EnvironmentFault: the interpreter does not run, or has no vLLM.
    """
    try:
        done = subprocess.run(
            [str(python), "-c", _ASK], capture_output=True, text=True, env=environment(), timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise EnvironmentFault(f"{python} cannot be run: {error}", _ADVICE) from None
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["it says nothing"])[-1]
        raise EnvironmentFault(f"{python} cannot be run: {last}", _ADVICE)
    origin = done.stdout.strip()
    if not origin:
        raise EnvironmentFault(f"{python} has no vLLM", _ADVICE)
    return tree_at(Path(origin).parent)
