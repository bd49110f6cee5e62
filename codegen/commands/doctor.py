"""`eplb-codegen doctor`: what would keep vLLM from balancing a model's experts."""

from __future__ import annotations

import argparse
import os
import sys

from ..doctor import Level, Request, examine
from ..doctor.config import read_config
from ..doctor.spread import Sizes
from ..errors import EnvironmentFault, Exit
from ..paths import expanded
from ..plugin import FOLDER
from ..source.local import installed_tree
from ..speech import say
from .common import print_json, progress, source_tree


def run(options: argparse.Namespace) -> Exit:
    """A line for each finding. Exit 1 if one is a problem, 0 if not."""
    sizes = _sizes(options)
    given = options.out or os.environ.get(FOLDER)
    folder = expanded(given) if given else None
    config = read_config(options.model, progress) if options.model else None
    named = options.vllm or options.source
    tree = source_tree(options) if options.model or named else installed_tree()
    findings = examine(Request(tree, config, sizes, folder))
    problems = sum(f.level is Level.PROBLEM for f in findings)
    if options.json:
        print_json(
            {
                "vllm": tree.version if tree else None,
                "origin": tree.origin if tree else None,
                "model": options.model,
                "python": sys.executable,
                "findings": [{**f._asdict(), "level": f.level.value} for f in findings],
            }
        )
    else:
        say(", ".join(filter(None, [tree.origin if tree else "no vLLM here", options.model])))
        for f in findings:
            say(f"  {f.level.value:<7}  {f.about}: {f.message}")
            if f.advice:
                say(f"  {'':<7}  -> {f.advice}")
        say(f"{problems} problem{'' if problems == 1 else 's'}")
    return Exit.DIFFERENCE if problems else Exit.OK


def _sizes(options: argparse.Namespace) -> Sizes:
    for name in ("tensor_parallel_size", "data_parallel_size", "pipeline_parallel_size"):
        value = getattr(options, name)
        if value is not None and value < 1:
            raise EnvironmentFault(f"--{name.replace('_', '-')} {value} is below 1")
    if options.redundant is not None and options.redundant < 0:
        raise EnvironmentFault(f"--redundant {options.redundant} is negative")
    return Sizes(
        options.tensor_parallel_size,
        options.data_parallel_size,
        options.pipeline_parallel_size or 1,
        options.redundant,
    )
