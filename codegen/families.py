"""The targets that can be named on the command line: families of models, quantisation methods."""

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
    """A name, and what is patched together under it.

    Attributes:
        files: in vllm/model_executor/models; none for a quantisation method.
        methods: the classes of a quantisation method, the one that is meant first.
        brings: targets without which some checkpoints of this family cannot be balanced.
    """

    name: str
    files: tuple[str, ...]
    methods: tuple[str, ...] = ()
    brings: tuple[str, ...] = ()


def known_families() -> list[Family]:
    """The targets that have an entry, in its order."""
    table = tomllib.loads(_TABLE.read_text(encoding="utf-8"))
    lists = ("files", "methods", "brings")
    return [Family(n, *(tuple(entry.get(key, ())) for key in lists)) for n, entry in table.items()]


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
