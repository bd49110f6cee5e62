"""What the plugin would do with the folder of generated files."""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ..errors import Fault
from ..paths import expanded
from ..plugin import FOLDER
from ..serving.folder import Served, served
from ..source import SourceTree
from .finding import Finding, ok, problem, warning

ABOUT = "generated files"


class Generated(NamedTuple):
    """What would be put in place, and what is to be said about it."""

    files: tuple[Served, ...]
    findings: tuple[Finding, ...]


def generated(tree: SourceTree | None, folder: Path | None) -> Generated:
    """The files that the plugin would put in place; none where it would stop the server.

    `folder` is OUT, where `apply` wrote. The checks are the plugin's own.
    """
    if folder is None:
        here = Path("generated").resolve()
        there = f" ({here} is there)" if here.is_dir() else ""
        nothing = warning(
            ABOUT,
            f"{FOLDER} is not set: the plugin does nothing",
            f"Set it to the folder that `eplb-codegen apply` writes to{there}.",
        )
        return Generated((), (nothing,))
    path = expanded(folder).absolute()
    found = []
    if not os.environ.get(FOLDER):
        message = f"{FOLDER} is not set in this environment: without it the plugin does nothing"
        found.append(warning(ABOUT, message, f"Start vLLM with {FOLDER}={path}"))
    if tree is None:
        return Generated((), tuple(found))
    try:
        files = served(path, tree)
    except Fault as fault:
        message = f"the plugin would stop the server: {fault.message}"
        return Generated((), (*found, problem(ABOUT, message, fault.advice)))
    names = ", ".join(sorted(a for f in files for a in f.architectures or [f.path.name]))
    return Generated(tuple(files), (*found, ok(ABOUT, f"{path}: {names} as written")))
