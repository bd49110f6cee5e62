"""What the commands say on standard output, whatever has become of it."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable

from .errors import EnvironmentFault


def say(text: str, end: str = "\n") -> None:
    """Write a text.

    A reader that went away, as `| head` does, is no error: the rest goes nowhere.

    Raises:
        EnvironmentFault: standard output cannot be written to.
    """
    if sys.stdout is not None:  # as with `>&-`
        _safely(lambda: print(text, end=end))


def flush() -> None:
    """Have everything said before the process ends, while a failure can still be told.

    Raises:
        EnvironmentFault: standard output cannot be written to.
    """
    if sys.stdout is not None:
        _safely(sys.stdout.flush)


def _safely(write: Callable[[], None]) -> None:
    try:
        write()
    except BrokenPipeError:
        _drop_the_rest()
    except OSError as error:
        _drop_the_rest()
        raise EnvironmentFault(f"standard output: {error.strerror or error}") from None


def _drop_the_rest() -> None:
    # the interpreter flushes once more when it ends
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
