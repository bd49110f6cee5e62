"""The ranks' processes and their folder: neither outlives this process, however it ends."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

WORKER = Path(__file__).parent / "worker"
GUARD = Path(__file__).parent / "guard.py"
TAIL = 12
"""Lines of a rank's own output that a failure shows."""


class Workplace:
    """A temporary folder; a guard clears it, and ends the ranks, if this process is killed."""

    def __enter__(self) -> Workplace:
        self.folder = Path(tempfile.mkdtemp(prefix="eplb-verify-"))
        self.guard = subprocess.Popen(
            [sys.executable, "-I", "-S", str(GUARD), str(self.folder)],
            stdin=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.attempts = 0
        self.previous: Any = None
        if threading.current_thread() is threading.main_thread():
            # Termination unwinds, as an interrupt does, instead of ending at once.
            self.previous = signal.signal(signal.SIGTERM, _unwind)
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.previous is not None:
            signal.signal(signal.SIGTERM, self.previous)
        assert self.guard.stdin is not None
        self.guard.stdin.close()
        self.guard.wait()
        shutil.rmtree(self.folder, ignore_errors=True)

    def tell(self, group: int) -> None:
        """Have the guard end this process group, should it come to that."""
        assert self.guard.stdin is not None
        self.guard.stdin.write(f"{group}\n")
        self.guard.stdin.flush()


def _unwind(number: int, frame: FrameType | None) -> None:
    raise SystemExit(128 + number)


class Ranks:
    """One process per rank, each the leader of a process group of its own."""

    def __init__(self, place: Workplace, python: Path, job: dict[str, Any]) -> None:
        place.attempts += 1
        self.place, self.python, self.job = place, python, job
        # The checkpoints and logits of an earlier attempt are of use to a later one.
        self.folder = place.folder
        self.attempt = place.attempts

    def __enter__(self) -> Ranks:
        self.processes: list[subprocess.Popen[bytes]] = []
        self.reports: list[IO[str] | None] = [None] * self.job["ranks"]
        self.partial = [""] * self.job["ranks"]
        job = self.folder / f"job{self.attempt}.json"
        job.write_text(json.dumps({**self.job, "attempt": self.attempt}), encoding="utf-8")
        try:
            for rank in range(self.job["ranks"]):
                self._start(job, rank)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def _start(self, job: Path, rank: int) -> None:
        with self._path(rank, "log").open("wb") as log:
            process = subprocess.Popen(
                [str(self.python), str(WORKER), str(job), str(rank)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment() | self._private(),
                start_new_session=True,
            )
        self.processes.append(process)
        self.place.tell(process.pid)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        for process in self.processes:
            try:
                os.killpg(process.pid, signal.SIGKILL)
            except (ProcessLookupError, PermissionError):
                process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
        for report in self.reports:
            if report is not None:
                report.close()

    def _private(self) -> dict[str, str]:
        """What vLLM and torch leave lying about goes away with the folder."""
        places = {n: self.folder / n.lower() for n in ("TMPDIR", "VLLM_CACHE_ROOT")}
        for place in places.values():
            place.mkdir(exist_ok=True)
        return {name: str(place) for name, place in places.items()}

    def _path(self, rank: int, suffix: str) -> Path:
        return self.folder / f"attempt{self.attempt}-rank{rank}.{suffix}"

    def events(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What ranks have told since the last call."""
        for rank in range(self.job["ranks"]):
            report = self.reports[rank]
            if report is None:
                path = self._path(rank, "jsonl")
                if not path.exists():
                    continue
                report = self.reports[rank] = path.open(encoding="utf-8")
            self.partial[rank] += report.read()
            *lines, self.partial[rank] = self.partial[rank].split("\n")
            for line in lines:
                yield rank, json.loads(line)

    def gone(self) -> list[tuple[int, int]]:
        """(rank, exit code) of ranks that have ended."""
        codes = ((rank, process.poll()) for rank, process in enumerate(self.processes))
        return [(rank, code) for rank, code in codes if code is not None]

    def tail(self, rank: int) -> str:
        """The end of what a rank printed."""
        text = self._path(rank, "log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-TAIL:])


def environment() -> dict[str, str]:
    """The user's, less what would lead the other interpreter to this one's packages."""
    dropped = {"PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "PYTHONSTARTUP"}
    return {k: v for k, v in os.environ.items() if k not in dropped} | {
        "PYTHONUNBUFFERED": "1",
        "PYTHONDONTWRITEBYTECODE": "1",
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
    }
