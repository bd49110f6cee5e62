"""The command line: `eplb-codegen list` and `eplb-codegen apply`."""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__
from .errors import EnvironmentFault, Exit, Fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is one of `errors.Exit`."""
    # a run is short, and what it parses has no cycles: collecting would only cost time
    gc.disable()
    options = _parser().parse_args(arguments)
    try:
        # a command's module is imported when it is the one to run
        if options.command == "list":
            from .commands.list import run
        else:
            from .commands.apply import run
        return run(options)
    except Fault as fault:
        print(f"eplb-codegen: {fault}", file=sys.stderr)
        return fault.exit
    except KeyboardInterrupt:
        print("eplb-codegen: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # the reader of our output went away, as `| head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return Exit.OK


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="eplb-codegen",
        description="Writes vLLM model files that support expert-parallel load balancing (EPLB).",
        epilog="Exit codes: 0 all well, 1 a difference, 2 usage or environment, 3 refused.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="what each family is in a vLLM")
    listing.add_argument(
        "targets", nargs="*", metavar="TARGET", help="only these families or files"
    )
    applying = commands.add_parser("apply", help="write patched model files")
    applying.add_argument("targets", nargs="*", metavar="TARGET", help="a family, or a model file")
    applying.add_argument("--all", action="store_true", help="every family")
    applying.add_argument(
        "--out", type=Path, default=Path("generated"), metavar="DIR", help="default: %(default)s"
    )
    applying.add_argument("--diff", action="store_true", help="show the patch, write nothing")
    applying.add_argument("--force", action="store_true", help="overwrite files edited by hand")
    for command in (listing, applying):
        where = command.add_mutually_exclusive_group()
        where.add_argument("--vllm", metavar="VERSION", help="this release, from the package index")
        where.add_argument("--source", type=Path, metavar="DIR", help="a vLLM checkout")
        command.add_argument("--json", action="store_true", help="for programs")
    return parser


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise EnvironmentFault(message, f"See `{self.prog} --help`.")


if __name__ == "__main__":
    sys.exit(main())
