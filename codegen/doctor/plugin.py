"""Whether vLLM, started by this Python, finds the plugin."""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Mapping
from importlib.metadata import Distribution, EntryPoint, distributions
from importlib.util import find_spec

from .finding import Finding, ok, problem, warning

ABOUT = "plugin"
GROUP = "vllm.general_plugins"
NAME = "eplb_codegen"
DISTRIBUTION = "eplb-codegen"
ALLOWED = "VLLM_PLUGINS"


def plugin_findings(environment: Mapping[str, str] = os.environ) -> list[Finding]:
    """What the metadata of the installed distributions says, and vLLM's list of allowed plugins.

    vLLM goes through the entry points of the group `vllm.general_plugins`. Of several
    distributions with the same name, importlib.metadata takes the first on `sys.path`.
    """
    found = [d for d in distributions() if _normal(d) == DISTRIBUTION]
    return [*_installed(found), *_allowed(environment), *_others()]


def _installed(found: list[Distribution]) -> list[Finding]:
    if not found:
        return [
            problem(
                ABOUT,
                f"{DISTRIBUTION} is not installed in {sys.executable}",
                f"Install it in the environment that runs vLLM: pip install {DISTRIBUTION}",
            )
        ]
    first, *others = found
    entry = _entry(first)
    if entry is None:
        hidden = [d for d in others if _entry(d)]
        return [
            problem(
                ABOUT,
                f"{_described(first)} has no entry point {GROUP}:{NAME}"
                + (f" and hides {_described(hidden[0])}, which has it" if hidden else ""),
                f"It is left from an older installation: delete {_folder(first)}"
                if hidden
                else f"Install it again: pip install --force-reinstall --no-deps {DISTRIBUTION}",
            )
        ]
    findings = [_importable(first, entry)]
    for other in others:
        findings.append(
            warning(
                ABOUT,
                f"{_described(other)} is installed too; a process with another sys.path "
                f"may take {'it' if _entry(other) else 'it, and it has no such entry point'}",
                f"Delete {_folder(other)}",
            )
        )
    return findings


def _importable(distribution: Distribution, entry: EntryPoint) -> Finding:
    try:
        there = find_spec(entry.module) is not None
    except (ImportError, ValueError):
        there = False
    if not there:
        return problem(
            ABOUT,
            f"{entry.module}, which the entry point of {_described(distribution)} names, "
            "is not there",
            f"Install it again: pip install --force-reinstall --no-deps {DISTRIBUTION}",
        )
    return ok(ABOUT, f"vLLM finds it: {entry.value} of {_described(distribution)}")


def _allowed(environment: Mapping[str, str]) -> list[Finding]:
    if ALLOWED not in environment:
        return []
    names = environment[ALLOWED].split(",")
    if NAME in names:
        return [ok(ABOUT, f"{ALLOWED} allows it")]
    return [
        problem(
            ABOUT,
            f"{ALLOWED}={environment[ALLOWED]} leaves it out, so that vLLM does not load it",
            f"Start vLLM with {ALLOWED}={','.join([*filter(None, names), NAME])}, or without it.",
        )
    ]


def _others() -> list[Finding]:
    """Other general plugins, any of which may register a class for the same architecture."""
    names = {
        e.name: _described(d)
        for d in distributions()
        for e in d.entry_points
        if e.group == GROUP and e.name != NAME and not e.value.startswith("vllm.")
    }
    return [
        warning(
            ABOUT,
            f"vLLM also loads the plugin {name} of {where}, which may register another class "
            "for the same architecture",
            f"If in doubt leave it out with {ALLOWED}.",
        )
        for name, where in sorted(names.items())
    ]


def _entry(distribution: Distribution) -> EntryPoint | None:
    entries = (e for e in distribution.entry_points if e.group == GROUP and e.name == NAME)
    return next(entries, None)


def _normal(distribution: Distribution) -> str:
    # of a broken distribution the name is None
    return re.sub(r"[-_.]+", "-", str(distribution.metadata["Name"])).lower()


def _described(distribution: Distribution) -> str:
    name = distribution.metadata["Name"]
    return f"{name} {distribution.version} ({_folder(distribution)})"


def _folder(distribution: Distribution) -> str:
    # the path of the metadata is public in no version of importlib.metadata
    return str(getattr(distribution, "_path", distribution.locate_file("")))
