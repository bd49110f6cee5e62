"""`eplb-codegen list`: what each family is in the vLLM at hand."""

from __future__ import annotations

import argparse

from ..errors import Exit
from ..generate import Generator
from ..planning.family import by_kind
from ..planning.plan import State
from ..speech import say
from .common import describe, exit_of, print_json, source_tree, targets


def run(options: argparse.Namespace) -> Exit:
    """Print a line a family. Exit 3 if one was not recognised, 2 if one was not readable."""
    families = targets(options.targets)
    tree = source_tree(options)
    generator = Generator(tree)
    results = [generator.generate(f) for f in families]
    if options.json:
        print_json(
            {"vllm": tree.version, "origin": tree.origin, "targets": [describe(r) for r in results]}
        )
    else:
        say(tree.origin)
        width = max(len(r.family.name) for r in results)
        for r in results:
            faulty = r.state is State.REPAIRED
            reason = "" if faulty else r.reason
            say(f"  {r.family.name:<{width}}  {r.state.value:<17}  {reason}".rstrip())
            for line in by_kind(r.faults) if faulty else ():
                say(f"  {'':<{width}}    {line}")
    return max(exit_of(r) for r in results)
