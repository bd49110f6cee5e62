"""What the ranks of one job do together, and how a failure of one ends for all."""

from __future__ import annotations

import contextlib
import os
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch.distributed as dist

from .report import Reporter


def brief(error: BaseException) -> str:
    """One line for a person: the error, and the innermost line of code that raised it.

    The first line of some messages is but a heading; three are enough of any.
    """
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' / '.join(lines[:3])}{where}"


def _is_foreign(module: str) -> bool:
    return module.split(".")[0] not in ("vllm", "eplb_generated", "worker")


class Failed(Exception):
    """A phase failed on some rank. All ranks know of it, and are still in step."""


class Ranks:
    def __init__(self, rank: int, size: int, reporter: Reporter) -> None:
        self.rank, self.size, self.reporter = rank, size, reporter

    def gather(self, value: Any) -> list[Any]:
        out: list[Any] = [None] * self.size
        dist.all_gather_object(out, value)
        return out

    def apart(self, work: Callable[[], Any]) -> Any:
        """Run work in which ranks do not speak to each other; `Failed` on all if on one."""
        value: Any = None
        error: str | None = None
        try:
            value = work()
        except Exception as problem:
            error = brief(problem)
            traceback.print_exc()
            if isinstance(problem, ModuleNotFoundError) and _is_foreign(problem.name or ""):
                # Says nothing of the model: this environment lacks what its vLLM needs.
                self.reporter.send("unusable", error=str(problem))
                os._exit(2)
        errors = {rank: e for rank, e in enumerate(self.gather(error)) if e is not None}
        if not errors:
            return value
        if len(set(errors.values())) == 1 and len(errors) == self.size:
            raise Failed(f"every rank: {errors[0]}")
        raise Failed("; ".join(f"rank {rank}: {e}" for rank, e in errors.items()))

    @contextlib.contextmanager
    def joint(self, what: str) -> Iterator[None]:
        """Work in which ranks wait for each other: one that fails cannot bring the others back.

        It ends its process, and the parent ends the rest and starts anew with the next case.
        """
        try:
            yield
        except Exception as error:
            traceback.print_exc()
            self.reporter.send("broken", what=what, error=brief(error), rank=self.rank)
            os._exit(3)
