"""The two styles of vLLM's files, and how new code is fitted to them.

Up to 0.11.0 the files are formatted by yapf (79 columns, continuation lines aligned), from 0.11.1
on by ruff's formatter with its defaults. Which one a file follows is asked of the file, not of
the release: what ruff would not change follows ruff.
"""

from __future__ import annotations

import subprocess
import sysconfig
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from ..errors import EnvironmentFault

YAPF_COLUMNS = 79


def ruff(arguments: Iterable[str], source: str) -> tuple[int, str]:
    """Run ruff without any configuration on standard input; its exit code and standard output.

    Raises:
        EnvironmentFault: ruff is not there or failed for a reason of its own.
    """
    try:
        done = subprocess.run(
            [_ruff(), *arguments, "--isolated", "--no-cache", "-"],
            input=source.encode(),
            capture_output=True,
            check=False,
        )
    except OSError as error:
        raise EnvironmentFault(f"ruff cannot be run: {error}", "Reinstall eplb-codegen.") from None
    if done.returncode not in (0, 1):
        raise EnvironmentFault(f"ruff failed: {done.stderr.decode(errors='replace').strip()}")
    return done.returncode, done.stdout.decode()


@cache
def _ruff() -> str:
    """The ruff that was installed with this package, or the one on the PATH."""
    beside = Path(sysconfig.get_path("scripts")) / "ruff"
    return str(beside) if beside.exists() else "ruff"


def follows_ruff(source: str) -> bool:
    """Whether ruff's formatter would leave a file as it is."""
    return ruff(["format", "--check"], source)[0] == 0


def format_with_ruff(source: str) -> str:
    """The file as ruff's formatter writes it."""
    code, formatted = ruff(["format"], source)
    if code:
        raise EnvironmentFault("ruff could not format the patched file")
    return formatted


def fill(opening: str, items: list[str], closing: str, columns: int = YAPF_COLUMNS) -> str:
    """`opening a, b, c closing` on as few lines as fit, aligned behind `opening`.

    Where even the first item does not fit behind `opening`, all of them go below it with an indent
    of four, as isort and yapf do.
    """
    whole = opening + ", ".join(items) + closing
    if len(whole) <= columns:
        return whole
    margin = " " * len(opening)
    lines = [opening]
    if len(opening) + len(items[0]) + 1 > columns:
        margin = "    "
        lines.append(margin)
    for position, item in enumerate(items):
        last = position == len(items) - 1
        piece = item + (closing if last else ",")
        at_start = lines[-1] == margin or lines[-1] == opening
        candidate = lines[-1] + ("" if at_start else " ") + piece
        if len(candidate) > columns and not at_start:
            lines.append(margin + piece)
        else:
            lines[-1] = candidate
    return "\n".join(lines)


def wrap_as_yapf(code: str, depth: int) -> str:
    """New statements, wrapped by yapf if a line is too long at `depth` levels of indentation."""
    indent = 4 * depth
    if all(len(line) + indent <= YAPF_COLUMNS for line in code.splitlines() if line):
        return code
    # not needed for most files, and slow to import
    from yapf.yapflib.yapf_api import FormatCode

    heads = "".join(f"{'    ' * level}if x:\n" for level in range(depth))
    body = "".join(
        f"{' ' * indent}{line}" if line.strip() else line for line in code.splitlines(keepends=True)
    )
    formatted, _ = FormatCode(heads + body, style_config="pep8")
    lines = formatted.splitlines(keepends=True)[depth:]
    leading = code[: len(code) - len(code.lstrip("\n"))]
    return leading + "".join(line[indent:] if line.strip() else line for line in lines).lstrip("\n")
