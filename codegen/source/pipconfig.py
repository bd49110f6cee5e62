"""How pip reaches the package index on this machine, so that this tool reaches it the same way."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import subprocess
import sys

from ..errors import EnvironmentFault


def pip_settings() -> dict[str, str]:
    """pip's settings, keyed by option without dashes ("index-url"); lists are space-separated.

    From `pip config list` of this interpreter, thus from all of pip's files and its environment;
    where there is no pip, from the PIP_* environment alone. pip's own precedence holds:
    environment, then the section [install], then [global]. Raises EnvironmentFault if pip
    cannot read its configuration.
    """
    if importlib.util.find_spec("pip") is None:
        return {
            name[4:].lower().replace("_", "-"): value
            for name, value in os.environ.items()
            if name.startswith("PIP_") and value
        }
    listing = subprocess.run(
        [sys.executable, "-m", "pip", "--disable-pip-version-check", "config", "list"],
        capture_output=True,
        encoding="utf-8",
        errors="replace",
        cwd=sys.prefix,  # -m looks into the current folder first, where `pip` may be anything
    )
    if listing.returncode:
        raise EnvironmentFault(
            f"pip cannot read its configuration: {without_credentials(listing.stderr.strip())}",
            "Correct it (`pip config debug` names the files), or use --source.",
        )
    settings: dict[str, str] = {}
    for section in ("global", "install", ":env:"):
        for line in listing.stdout.splitlines():
            key, _, value = line.partition("=")
            if key.startswith(f"{section}."):
                settings[key[len(section) + 1 :]] = str(ast.literal_eval(value))
    return settings


def without_credentials(text: str) -> str:
    """`text` with the user and password of every URL in it replaced."""
    return re.sub(r"(?<=://)[^/\s'\"]*@", "***@", text)
