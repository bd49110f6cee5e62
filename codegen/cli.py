"""The command line: `eplb-codegen COMMAND`, a module of `commands` for each."""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Sequence
from pathlib import Path

from . import __version__, speech
from .errors import EnvironmentFault, Exit, Fault


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code is one of `errors.Exit`."""
    # a run is short, and what it parses has no cycles: collecting would only cost time
    gc.disable()
    try:
        options = _parser().parse_args(arguments)
        # a command's module is imported when it is the one to run
        if options.command == "list":
            from .commands.list import run
        elif options.command == "verify":
            from .commands.verify import run
        elif options.command == "doctor":
            from .commands.doctor import run
        elif options.command == "check":
            from .commands.check import run
        else:
            from .commands.apply import run
        code = run(options)
        speech.flush()
        return code
    except Fault as fault:
        print(f"eplb-codegen: {fault}", file=sys.stderr)
        return fault.exit
    except OSError as error:
        # whatever was not foreseen: a folder without permission, a disk that is gone
        print(f"eplb-codegen: {error}", file=sys.stderr)
        return Exit.USAGE
    except KeyboardInterrupt:
        print("eplb-codegen: interrupted", file=sys.stderr)
        return 130
    finally:
        gc.freeze()  # the interpreter collects once more when it ends; this leaves it nothing


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="eplb-codegen",
        description="Writes vLLM model files that support expert-parallel load balancing (EPLB).",
        epilog="Exit codes: 0 all well, 1 a difference, 2 usage or environment, 3 refused.",
    )
    parser.add_argument("--version", action="version", version=f"%(prog)s {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    listing = commands.add_parser("list", help="what each target is in a vLLM")
    listing.add_argument(
        "targets", nargs="*", metavar="TARGET", help="only these families, methods or files"
    )
    applying = commands.add_parser("apply", help="write patched model files")
    applying.add_argument(
        "targets", nargs="*", metavar="TARGET", help="a family, a method, or a file"
    )
    applying.add_argument("--all", action="store_true", help="every target")
    applying.add_argument(
        "--out", type=Path, default=Path("generated"), metavar="DIR", help="default: %(default)s"
    )
    applying.add_argument("--diff", action="store_true", help="show the patch, write nothing")
    applying.add_argument("--force", action="store_true", help="overwrite files edited by hand")
    applying.add_argument(
        "--in-place", action="store_true", help="patch the files of the checkout --source"
    )
    applying.add_argument(
        "--revert", action="store_true", help="undo --in-place; of all targets if none is named"
    )
    for command in (listing, applying):
        _add_source(command)
        command.add_argument("--json", action="store_true", help="for programs")
    _add_verify(commands)
    _add_doctor(commands)
    _add_check(commands)
    return parser


def _add_source(command: argparse.ArgumentParser) -> None:
    where = command.add_mutually_exclusive_group()
    where.add_argument(
        "--vllm", metavar="VERSION", help='this release, or "latest", from the package index'
    )
    where.add_argument("--source", type=Path, metavar="DIR", help="a vLLM checkout")


def _add_verify(commands: argparse._SubParsersAction[_Parser]) -> None:
    verifying = commands.add_parser(
        "verify",
        help="prove that a generated model is right, on real vLLM and on any machine",
        epilog="Exit codes: 0 every check passed, 1 one failed or could not run, "
        "2 usage, or a vLLM that cannot be run here.",
    )
    add = verifying.add_argument
    add("targets", nargs="+", metavar="TARGET", help="a family")
    add("--python", metavar="PATH", help="whose vLLM to use; default: this Python")
    what = verifying.add_mutually_exclusive_group()
    generated = Path("generated")
    what.add_argument(
        "--generated", type=Path, default=generated, metavar="DIR", help="default: %(default)s"
    )
    what.add_argument("--upstream", action="store_true", help="judge vLLM's own class instead")
    add("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    add(
        "--redundant",
        type=int,
        nargs="+",
        metavar="R",
        help="redundant experts, one case each; default: the two smallest that spread evenly",
    )
    add(
        "--layout",
        choices=("per-expert", "fused", "both"),
        default="both",
        help="of the expert weights in the checkpoint; default: %(default)s, as far as vLLM's "
        "own class loads them",
    )
    add("--experts", type=int, default=8, metavar="E", help="of the tiny model; default: 8")
    add(
        "--quantization",
        choices=("fp8", "wna16", "wna16-marlin"),
        help="of the tiny model's experts: fp8 with scales by block, or compressed-tensors W4A16 "
        "in either of vLLM's classes",
    )
    add("--checkpoint", type=Path, metavar="DIR", help="a real checkpoint, not a tiny random one")
    add("--seed", type=int, default=0, help="of weights, tokens and tensor order; default: 0")
    add("--device", choices=("cpu", "cuda"), default="cpu", help="default: %(default)s")
    add(
        "--timeout",
        type=float,
        default=300.0,
        metavar="S",
        help="seconds that one case may take; default: %(default)g",
    )
    add("--json", action="store_true", help="for programs")
    add("--report", type=Path, metavar="FILE", help="write a page of HTML")


def _add_doctor(commands: argparse._SubParsersAction[_Parser]) -> None:
    examining = commands.add_parser(
        "doctor",
        help="what would keep vLLM from balancing a model, before a long start",
        epilog="Exit codes: 0 nothing in the way, 1 something would go wrong, 2 usage or "
        "environment.",
    )
    add = examining.add_argument
    add("model", nargs="?", metavar="MODEL", help="a folder, or a name on the Hugging Face hub")
    for name, what in (("tensor", "TP"), ("data", "DP"), ("pipeline", "PP")):
        add(f"--{name}-parallel-size", f"-{what.lower()}", type=int, metavar="N", help=what)
    add("--redundant", type=int, metavar="R", help="redundant experts of a layer")
    add(
        "--out",
        type=Path,
        metavar="DIR",
        help="where `apply` wrote; default: what EPLB_CODEGEN_DIR says",
    )
    _add_source(examining)
    add("--json", action="store_true", help="for programs")


def _add_check(commands: argparse._SubParsersAction[_Parser]) -> None:
    checking = commands.add_parser(
        "check",
        help="whether generated files are what would be written of today's upstream",
        epilog="Exit codes: 0 all in sync, 1 something is to be made anew or retired, 2 usage or "
        "environment, 3 a target needs a person.",
    )
    add = checking.add_argument
    add("targets", nargs="*", metavar="TARGET", help="only these; default: what DIR lists")
    add("--out", type=Path, default=Path("generated"), metavar="DIR", help="default: %(default)s")
    add("--fix", action="store_true", help="make anew or retire what can be")
    _add_source(checking)
    form = checking.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="for programs")
    form.add_argument(
        "--format",
        choices=("text", "github"),
        default="text",
        help="github: with annotations of files and lines; default: %(default)s",
    )


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> None:  # type: ignore[override]
        raise EnvironmentFault(message, f"See `{self.prog} --help`.")


if __name__ == "__main__":
    sys.exit(main())
