"""From a target on the command line to the classes to judge, and the files that hold them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EnvironmentFault
from ..families import Family, known_families
from ..output import manifest
from ..output.writer import digest
from ..source import SourceTree
from .worker.families import FAMILIES


class Subject(NamedTuple):
    """One class of a target: `model` is the key of its tiny model, `file` None for upstream's."""

    target: str
    model: str
    architecture: str
    file: Path | None


def subjects(family: Family, tree: SourceTree, generated: Path | None) -> list[Subject]:
    """The classes of a family, in the order of its files; upstream's own if `generated` is None.

    Raises:
        EnvironmentFault: no tiny model is known of the family, or its generated files are not
            there, were edited, or were made from another vLLM than this one.
    """
    if family.methods:
        raise EnvironmentFault(
            f"{family.name} is no model",
            "Verify one with it: `verify qwen3_vl_moe --quantization`.",
        )
    known = {stem: [k for k, f in FAMILIES.items() if f.module == stem] for stem in _stems(family)}
    if not any(known.values()):
        names = ", ".join(sorted({f.module for f in FAMILIES.values()}))
        raise EnvironmentFault(
            f"{family.name}: verify has no tiny model of this family", f"It has those of {names}."
        )
    files = _intact(family, tree, generated) if generated else {}
    return [
        Subject(family.name, key, FAMILIES[key].architecture, files.get(f"{stem}.py"))
        for stem, keys in known.items()
        for key in keys
        if generated is None or f"{stem}.py" in files
    ]


def of_checkpoint(found: list[Subject], checkpoint: Path) -> list[Subject]:
    """Those that the checkpoint is of, by the architectures in its config.json.

    Raises:
        EnvironmentFault: it has no readable config.json, or is of none of them.
    """
    architectures = config_of(checkpoint).get("architectures") or []
    fitting = [s for s in found if s.architecture in architectures]
    if not fitting:
        wanted = " or ".join(dict.fromkeys(s.architecture for s in found))
        raise EnvironmentFault(
            f"{checkpoint} is a checkpoint of {', '.join(architectures) or 'nothing that it names'}"
            f", not of {wanted}"
        )
    return fitting


def experts_of(checkpoint: Path, model: str) -> int:
    """E of a checkpoint.

    Raises:
        EnvironmentFault: its config.json does not say.
    """
    family = FAMILIES[model]
    try:
        return int(family.text(config_of(checkpoint))[family.experts])
    except (KeyError, TypeError, ValueError):
        raise EnvironmentFault(
            f"{checkpoint / 'config.json'} does not say {family.experts}"
        ) from None


def config_of(checkpoint: Path) -> dict[str, Any]:
    """config.json of a checkpoint."""
    path = checkpoint / "config.json"
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise EnvironmentFault(f"{path} cannot be read: {error}") from None
    if not isinstance(config, dict):
        raise EnvironmentFault(f"{path} is no object")
    return config


def _stems(family: Family) -> list[str]:
    return [name.removesuffix(".py") for name in family.files]


def methods(tree: SourceTree, generated: Path) -> dict[str, Path]:
    """The generated files of quantisation methods, by the module that each replaces.

    Raises:
        EnvironmentFault: one is listed and not there, or not as the manifest says.
    """
    folder = generated / tree.version
    listed = manifest.load(folder, tree.version).families
    found: dict[str, Path] = {}
    for target in known_families():
        if target.methods and target.name in listed:
            for name, path in _intact(target, tree, generated).items():
                upstream = listed[target.name].files[name].upstream
                found[upstream.removesuffix(".py").replace("/", ".")] = path
    return found


def _intact(family: Family, tree: SourceTree, generated: Path) -> dict[str, Path]:
    """Name -> path of the family's generated files, every one as the manifest says."""
    folder = generated / tree.version
    again = f"eplb-codegen apply {family.name} --source {tree.root} --out {generated}"
    entry = manifest.load(folder, tree.version).families.get(family.name)
    if entry is None:
        raise EnvironmentFault(
            f"{family.name}: {folder} has no generated file of it",
            f"Run `{again}`, or give --upstream to judge vLLM's own class.",
        )
    out = {}
    for name, file in entry.files.items():
        path = folder / name
        try:
            content = path.read_bytes()
        except OSError:
            raise EnvironmentFault(f"{path} is not there", f"Run `{again}`.") from None
        if digest(content) != file.sha256:
            raise EnvironmentFault(
                f"{path} was edited: it is not what {folder / manifest.NAME} says",
                f"Run `{again} --force`, which overwrites it.",
            )
        upstream = tree.root / file.upstream
        if not upstream.is_file() or digest(upstream.read_bytes()) != file.upstream_sha256:
            raise EnvironmentFault(
                f"{path} was made from another {file.upstream} than that of {tree.origin}",
                f"Run `{again}`.",
            )
        out[name] = path
    return out
