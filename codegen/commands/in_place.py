"""`eplb-codegen apply --in-place` and `--revert`: the files of a checkout themselves."""

from __future__ import annotations

import argparse

from ..errors import EnvironmentFault, Exit, Fault
from ..families import Family
from ..in_place import Record, patch, revert
from ..output.writer import locked
from ..source import SourceTree
from ..speech import say
from .apply import named_targets
from .common import source_tree, targets
from .done import Done, nothing_to_do, print_done, tell


def run(options: argparse.Namespace) -> Exit:
    """Patch or put back every target; the worst exit code wins."""
    if options.source is None:
        raise EnvironmentFault("--in-place and --revert need --source", "Give a vLLM checkout.")
    if options.diff:
        raise EnvironmentFault("--diff writes nothing", "Leave it out, or --in-place.")
    tree = source_tree(options)
    with locked(tree.root):
        record = Record(tree)
        if options.revert:
            names = options.targets or record.families
            if not names:
                raise _nothing_on_record(tree)
            done = [_revert(tree, record, f.name, options.force) for f in targets(names)]
        else:
            families = targets(named_targets(options))
            done = [_patch(tree, record, f, options) for f in families]
    if options.json:
        print_done(tree, tree.root, done)
    else:
        say(tree.origin)
        for one in done:
            tell(one)
    return max((one.exit for one in done), default=Exit.OK)


def _patch(tree: SourceTree, record: Record, family: Family, options: argparse.Namespace) -> Done:
    try:
        result, changed = patch(tree, record, family, options.force)
    except Fault as fault:
        return Done(family.name, "not patched", fault.exit, str(fault))
    if result.entry is None:
        return nothing_to_do(result, named=not options.all)
    paths = ", ".join(f.upstream for f in result.files if f.patched != f.original)
    return Done(family.name, "patched" if changed else "unchanged", Exit.OK, paths, result)


def _revert(tree: SourceTree, record: Record, name: str, force: bool) -> Done:
    try:
        if name not in record.families:
            raise _nothing_on_record(tree)
        paths = revert(tree, record, name, force)
    except Fault as fault:
        return Done(name, "not reverted", fault.exit, str(fault))
    if not paths:
        return Done(name, "unchanged", Exit.OK, "nothing of the patch is left")
    return Done(name, "reverted", Exit.OK, ", ".join(paths))


def _nothing_on_record(tree: SourceTree) -> EnvironmentFault:
    return EnvironmentFault(
        f"nothing is on record here as patched in {tree.root}",
        "If it was patched elsewhere, or by another user, restore the files with `git checkout`.",
    )
