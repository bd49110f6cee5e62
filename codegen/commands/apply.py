"""`eplb-codegen apply`: write patched model files, or show the patch."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import TypeAlias

from ..diff import in_colour
from ..errors import EnvironmentFault, Exit, Fault
from ..generate import Generator, Result
from ..output.writer import write_family
from ..planning.plan import State
from ..source import SourceTree
from ..speech import say
from .common import coloured, source_tree, targets
from .done import Done, diff_of, nothing_to_do, print_done, tell


def run(options: argparse.Namespace) -> Exit:
    """Apply to every target; the worst exit code wins."""
    if options.in_place or options.revert:
        from .in_place import run as run_in_place

        return run_in_place(options)
    families = targets(named_targets(options))
    tree = source_tree(options)
    folder = options.out / tree.version
    generator = Generator(tree)
    act = _show if options.diff else _write
    done = []
    for family in families:
        result = generator.generate(family)
        done.append(act(tree, folder, result, options))
        if result.entry is None:
            continue
        for brought in targets(list(family.brings)) if family.brings else ():
            with_it = generator.generate(brought)
            if brought not in families and with_it.state is not State.NATIVE:
                done.append(_bring(act, tree, folder, with_it, options))
    if options.json:
        print_done(tree, folder, done)
    elif not options.diff:
        say(f"{tree.origin} -> {folder}")
    if not options.json:
        for one in done:
            tell(one, options.diff)
    return max((one.exit for one in done), default=Exit.OK)


_Act: TypeAlias = Callable[[SourceTree, Path, Result, argparse.Namespace], Done]


def _bring(
    act: _Act, tree: SourceTree, folder: Path, result: Result, options: argparse.Namespace
) -> Done:
    """Write what a family brings along; where that cannot be had, the family is still there."""
    if result.entry is None:
        return Done(result.family.name, "left as it is", Exit.OK, result.reason, result)
    return act(tree, folder, result, options)


def named_targets(options: argparse.Namespace) -> list[str]:
    """The targets on the command line; none for --all.

    Raises:
        EnvironmentFault: neither or both were given.
    """
    if bool(options.targets) == options.all:
        raise EnvironmentFault(
            "name targets, or give --all"
            if not options.all
            else "--all leaves no room for targets",
            "`eplb-codegen list` shows the families.",
        )
    return list(options.targets)


def _write(tree: SourceTree, folder: Path, result: Result, options: argparse.Namespace) -> Done:
    if result.entry is None:
        return nothing_to_do(result, named=not options.all)
    name, outputs = result.family.name, {f.name: f.output for f in result.files}
    try:
        changed = write_family(folder, tree.version, name, result.entry, outputs, options.force)
    except Fault as fault:
        return Done(name, "not written", fault.exit, str(fault), result)
    return Done(name, "written" if changed else "unchanged", Exit.OK, ", ".join(outputs), result)


def _show(tree: SourceTree, folder: Path, result: Result, options: argparse.Namespace) -> Done:
    if result.entry is None:
        return nothing_to_do(result, named=not options.all)
    if not options.json:
        for file in result.files:
            say(in_colour(diff_of(file)) if coloured() else diff_of(file), end="")
    return Done(result.family.name, "differs", Exit.DIFFERENCE, "", result)
