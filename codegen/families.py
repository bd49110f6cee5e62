"""The families of models that can be named on the command line."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from .errors import EnvironmentFault

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLE = Path(__file__).with_name("families.toml")


class Family(NamedTuple):
    """A name, and the files in vllm/model_executor/models that are patched together."""

    name: str
    files: tuple[str, ...]


def known_families() -> list[Family]:
    """The families that have an entry, in its order."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    return [Family(name, tuple(entry["files"])) for name, entry in table.items()]


def family(name: str) -> Family:
    """The family of that name, the one that a file belongs to, or a file alone.

    Raises:
        EnvironmentFault: the name cannot be that of a model file.
    """
    stem = name.removesuffix(".py")
    for known in known_families():
        if stem == known.name or f"{stem}.py" in known.files:
            return known
    if not re.fullmatch(r"[A-Za-z_]\w{0,99}", stem):
        raise EnvironmentFault(
            f"{name[:100]!r} is no target",
            "Name a family, or a file of vllm/model_executor/models such as `olmoe`.",
        )
    return Family(stem, (f"{stem}.py",))
