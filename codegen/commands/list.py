"""`eplb-codegen list`: what each target is in the vLLM at hand, and each quantisation method."""

from __future__ import annotations

import argparse

from ..analysis.moe_methods import MoEMethod, alike
from ..errors import Exit, Refusal
from ..generate import Generator, Result
from ..planning.family import by_kind
from ..planning.plan import State
from ..speech import say
from .common import describe, exit_of, print_json, source_tree, targets


def run(options: argparse.Namespace) -> Exit:
    """Print a line a target. Exit 3 if one was not recognised, 2 if one was not readable."""
    families = targets(options.targets)
    tree = source_tree(options)
    generator = Generator(tree)
    results = [generator.generate(f) for f in families]
    methods = [] if options.targets else _others(generator, results)
    if options.json:
        print_json(
            {
                "vllm": tree.version,
                "origin": tree.origin,
                "targets": [describe(r) for r in results],
                "methods": [{**m._asdict(), "supports": m.supports.value} for m in methods],
            }
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
        if methods:
            say("quantisation methods of experts, of which none is a target:")
        for line in sorted(alike(methods)):
            say(f"  {line}")
    return max(exit_of(r) for r in results)


def _others(generator: Generator, results: list[Result]) -> list[MoEMethod]:
    """The MoE methods of the tree that belong to no target; none where there is no answer."""
    named = {name for result in results for name in result.family.methods}
    try:
        return [m for m in generator.moe_methods() if m.name not in named]
    except Refusal:
        return []  # then every target that is a method was refused for the same reason
