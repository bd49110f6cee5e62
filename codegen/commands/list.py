"""`eplb-codegen list`: what each family is in the vLLM at hand."""

from __future__ import annotations

import argparse

from ..errors import Exit
from ..generate import Generator
from ..planning.plan import State
from .common import describe, print_json, source_tree, targets


def run(options: argparse.Namespace) -> Exit:
    """Print a line a family. Exit 3 if one was not recognised."""
    families = targets(options.targets)
    tree = source_tree(options)
    generator = Generator(tree)
    results = [generator.generate(f) for f in families]
    if options.json:
        print_json(
            {"vllm": tree.version, "origin": tree.origin, "targets": [describe(r) for r in results]}
        )
    else:
        print(tree.origin)
        width = max(len(r.family.name) for r in results)
        for r in results:
            print(f"  {r.family.name:<{width}}  {r.state.value:<14}  {r.reason}")
    unrecognised = any(r.state is State.UNRECOGNISED for r in results)
    return Exit.REFUSED if unrecognised else Exit.OK
