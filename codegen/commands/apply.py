"""`eplb-codegen apply`: write patched model files, or show the patch."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

from ..analysis.syntax import source_lines
from ..errors import EnvironmentFault, Exit, Fault
from ..generate import Generator, Result
from ..output import manifest
from ..output.writer import is_current, locked, write_set
from ..planning.plan import State
from ..source import SourceTree
from ..speech import say
from .common import coloured, describe, exit_of, print_json, source_tree, targets


class _Done(NamedTuple):
    """A target, what was done about it, and the exit code that this means."""

    result: Result
    action: str
    exit: Exit
    message: str


def run(options: argparse.Namespace) -> Exit:
    """Apply to every target; the worst exit code wins."""
    if bool(options.targets) == options.all:
        raise EnvironmentFault(
            "name targets, or give --all"
            if not options.all
            else "--all leaves no room for targets",
            "`eplb-codegen list` shows the families.",
        )
    families = targets(options.targets)
    tree = source_tree(options)
    folder = options.out / tree.version
    generator = Generator(tree)
    done = []
    for family in families:
        result = generator.generate(family)
        act = _show if options.diff else _write
        done.append(act(tree, folder, result, options))
    if options.json:
        _print_json(tree, folder, done)
    elif not options.diff:
        say(f"{tree.origin} -> {folder}")
    if not options.json:
        for one in done:
            _tell(one, options.diff)
    return max((one.exit for one in done), default=Exit.OK)


def _tell(one: _Done, diff: bool) -> None:
    """A line for a target; of a diff that was shown there is nothing more to tell."""
    line = f"  {one.result.family.name}: {one.action}" + (f": {one.message}" if one.message else "")
    if one.exit is Exit.OK and not diff:
        say(line)
    elif one.exit is not Exit.OK and one.action != "differs":
        print(line, file=sys.stderr)


def _write(tree: SourceTree, folder: Path, result: Result, options: argparse.Namespace) -> _Done:
    if result.entry is None:
        return _nothing_to_do(result, named=not options.all)
    try:
        outputs = {f.name: f.output for f in result.files}
        name, entry = result.family.name, result.entry
        before = manifest.load(folder, tree.version)
        changed = not is_current(folder, outputs, before.with_family(name, entry))
        if changed:
            with locked(options.out):
                before = manifest.load(folder, tree.version)
                after = before.with_family(name, entry)
                changed = write_set(folder, outputs, before, after, options.force)
    except Fault as fault:
        return _Done(result, "not written", fault.exit, str(fault))
    names = ", ".join(f.name for f in result.files)
    return _Done(result, "written" if changed else "unchanged", Exit.OK, names)


def _show(tree: SourceTree, folder: Path, result: Result, options: argparse.Namespace) -> _Done:
    if result.entry is None:
        return _nothing_to_do(result, named=not options.all)
    if not options.json:
        for file in result.files:
            say(diff_text(file.upstream, file.original, file.patched, coloured()), end="")
    return _Done(result, "differs", Exit.DIFFERENCE, "")


def _nothing_to_do(result: Result, named: bool) -> _Done:
    if exit_of(result) is not Exit.OK:
        return _Done(result, "refused", exit_of(result), result.reason)
    if result.state is State.ABSENT and named:
        # somebody asked for this very file
        return _Done(result, "refused", Exit.REFUSED, result.reason)
    return _Done(result, result.state.value, Exit.OK, result.reason)


def diff_text(path: str, before: str, after: str, colour: bool) -> str:
    """A unified diff of one file, as `git diff` names it."""
    import difflib

    lines = difflib.unified_diff(
        source_lines(before),
        source_lines(after),
        f"a/{path}",
        f"b/{path}",
    )
    text = []
    for line in lines:
        line = line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n"
        code = {"+": "32", "-": "31", "@": "36"}.get(line[0]) if colour else None
        text.append(f"\033[{code}m{line[:-1]}\033[0m\n" if code else line)
    return "".join(text)


def _print_json(tree: SourceTree, folder: Path, done: list[_Done]) -> None:
    print_json(
        {
            "vllm": tree.version,
            "origin": tree.origin,
            "folder": str(folder),
            "targets": [
                {
                    **describe(one.result),
                    "action": one.action,
                    "exit": int(one.exit),
                    "message": one.message,
                    "diff": "".join(
                        diff_text(f.upstream, f.original, f.patched, False)
                        for f in one.result.files
                    )
                    if one.action == "differs"
                    else None,
                }
                for one in done
            ],
        }
    )
