"""One rank of a job: sets the interpreter up, then runs its cases, one after another."""

from __future__ import annotations

import ctypes
import json
import os
import signal
import sys
import threading
import traceback
from pathlib import Path
from typing import Any

from .report import Reporter


def main(path: Path, rank: int) -> None:
    _die_with_parent()
    job: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    folder = path.parent
    reporter = Reporter(folder / f"attempt{job['attempt']}-rank{rank}.jsonl")
    try:
        cases = _set_up(job, rank, folder, reporter)
    except Exception as error:
        traceback.print_exc()
        reporter.send("unusable", error=f"{type(error).__name__}: {error}")
        os._exit(2)
    for case in job["cases"]:
        reporter.case = case["name"]
        reporter.send("begin", rank=rank)
        try:
            cases.run(case)
        except Exception as error:
            # The other ranks may be waiting for this one: the parent starts all of them anew.
            traceback.print_exc()
            told = f"{type(error).__name__}: {error}"
            reporter.send("broken", what="an error of verify's own", error=told, rank=rank)
            os._exit(3)
        reporter.send("end")
    reporter.send("done")
    sys.stdout.flush()
    sys.stderr.flush()
    # Not through interpreter shutdown: vLLM's background threads may keep it from ending.
    os._exit(0)


def _die_with_parent() -> None:
    """The parent holds the other end of standard input: when it is gone, so is this process."""

    def watch() -> None:
        while sys.stdin.buffer.read(1):
            pass
        os._exit(4)

    threading.Thread(target=watch, daemon=True).start()
    if sys.platform == "linux":
        # Also where the thread cannot run because a kernel holds the interpreter's lock.
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)


def _set_up(job: dict[str, Any], rank: int, folder: Path, reporter: Reporter) -> Any:
    size, device = job["ranks"], job["device"]
    os.environ.update(
        HF_HUB_OFFLINE="1",
        TRANSFORMERS_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        VLLM_PLUGINS="",
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE=str(size),
        VLLM_DIST_IDENT=folder.name,
    )
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from . import cpu

    if device == "cpu":
        cpu.before_import(folder)
    import torch

    torch.set_num_threads(1)
    import vllm

    from . import attention, wna16

    if device == "cpu":
        cpu.after_import()
        if job["quantization"] in wna16.GROUPS:
            wna16.adapt()
    else:
        torch.cuda.set_device(rank)
    from .build import join
    from .cases import Cases
    from .ranks import Ranks

    attention.adapt()
    version = str(getattr(vllm, "__version__", "unknown"))
    reporter.send("ready", vllm=version, torch=str(torch.__version__))
    join(size, rank, folder / f"store{job['attempt']}", device)
    return Cases(job, Ranks(rank, size, reporter), folder)
