"""What `apply` did about each target, told to people and to programs."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import NamedTuple

from ..diff import unified
from ..errors import Exit
from ..generate import Generated, Result
from ..planning.plan import State
from ..source import SourceTree
from ..speech import say
from .common import describe, exit_of, print_json


class Done(NamedTuple):
    """A target, what was done about it, and the exit code that this means."""

    family: str
    action: str
    exit: Exit
    message: str
    result: Result | None = None


def nothing_to_do(result: Result, named: bool) -> Done:
    """Of a target for which nothing is to be written; `named`: somebody asked for this very one."""
    code = exit_of(result)
    if result.state in (State.ABSENT, State.REFUSES) and named:
        code = Exit.REFUSED
    action = result.state.value if code is Exit.OK else "refused"
    return Done(result.family.name, action, code, result.reason, result)


def tell(one: Done, diff: bool = False) -> None:
    """A line for a target; of a diff that was shown there is nothing more to tell."""
    line = f"  {one.family}: {one.action}" + (f": {one.message}" if one.message else "")
    if one.exit is Exit.OK and not diff:
        say(line)
    elif one.exit is not Exit.OK and one.action != "differs":
        print(line, file=sys.stderr)


def diff_of(file: Generated) -> str:
    """The patch of one file, as `git diff` names it."""
    return unified(file.original, file.patched, f"a/{file.upstream}", f"b/{file.upstream}")


def print_done(tree: SourceTree, folder: Path, done: list[Done]) -> None:
    """All of it for programs."""
    print_json(
        {
            "vllm": tree.version,
            "origin": tree.origin,
            "folder": str(folder),
            "targets": [_document(one) for one in done],
        }
    )


def _document(one: Done) -> dict[str, object]:
    files = one.result.files if one.result else ()
    return {
        **(describe(one.result) if one.result else {"family": one.family}),
        "action": one.action,
        "exit": int(one.exit),
        "message": one.message,
        "diff": "".join(map(diff_of, files)) if one.action == "differs" else None,
    }
