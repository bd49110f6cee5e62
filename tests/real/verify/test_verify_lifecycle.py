"""Whatever happens to a verify or to one of its ranks: an answer, and nothing left behind."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

QUICK = ["--layout", "per-expert", "--redundant", "2"]


def processes_of(folder: Path) -> list[int]:
    """Living processes whose command line names something in this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:
            continue
        if os.fsencode(folder) in command:
            found.append(int(entry.name))
    return found


def wait_for(what: Callable[[], Any], seconds: float) -> Any:
    end = time.monotonic() + seconds
    while not (found := what()):
        assert time.monotonic() < end, "waited in vain"
        time.sleep(0.1)
    return found


@pytest.mark.release("0.10.0")
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_killed_half_way(
    start: Callable[..., subprocess.Popen[str]], generated: Path, tmp_path: Path, number: int
) -> None:
    process = start(
        "qwen2_moe", "--generated", generated, env={**os.environ, "TMPDIR": str(tmp_path)}
    )

    def begun() -> bool:
        reports = list(tmp_path.glob("*/*-rank1.jsonl"))
        return any("begin" in path.read_text(encoding="utf-8") for path in reports)

    wait_for(begun, 120)
    # two ranks and the guard, in the one temporary folder
    assert len(processes_of(tmp_path)) == 3
    process.send_signal(number)
    assert process.wait(30) != 0
    wait_for(lambda: not processes_of(tmp_path), 20)
    wait_for(lambda: not list(tmp_path.iterdir()), 20)


@pytest.mark.release("0.10.0")
def test_nothing_stays_behind(verify: Any, generated: Path, tmp_path: Path) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    shared = set(Path("/dev/shm").iterdir())
    verify(
        "qwen3_moe",
        *("--generated", generated, *QUICK),
        env={**os.environ, "TMPDIR": str(temporary)},
        cwd=tmp_path,
    ).all_passed()
    assert list(tmp_path.iterdir()) == [temporary]
    assert not list(temporary.iterdir())
    assert not processes_of(temporary)
    assert not [p for p in set(Path("/dev/shm").iterdir()) - shared if p.name.startswith("psm")]


@pytest.fixture
def troubled(generated: Path, release: str, tmp_path: Path) -> Callable[[str], Path]:
    """A generated folder in which rank 1 does this when EPLB is set up."""

    def plant(statement: str) -> Path:
        from eplb_codegen.output.writer import digest

        ours = generated / release
        text = (ours / "qwen2_moe.py").read_text(encoding="utf-8")
        mark = "        self.expert_weights.clear()\n"
        assert text.count(mark) == 1
        body = f"        import os, time\n        if os.environ['RANK'] == '1':\n{' ' * 12}"
        changed = text.replace(mark, f"{body}{statement}\n{mark}")
        folder = tmp_path / "troubled" / release
        folder.mkdir(parents=True)
        (folder / "qwen2_moe.py").write_text(changed, encoding="utf-8")
        manifest = (ours / "manifest.toml").read_text(encoding="utf-8")
        manifest = manifest.replace(digest(text), digest(changed))
        (folder / "manifest.toml").write_text(manifest, encoding="utf-8")
        return folder.parent

    return plant


@pytest.mark.release("0.11.2")
def test_hung_rank(verify: Any, troubled: Callable[[str], Path]) -> None:
    folder = troubled("time.sleep(3600)")
    done = verify("qwen2_moe", "--generated", folder, *QUICK, "--timeout", 40)
    assert done.code == 1, done.text
    (ranks,) = [c for c in done.having("failed") if c["check"] == "ranks"]
    # rank 0 waits for rank 1, so that neither answers
    assert "no answer from rank 0, 1 within 40 s" in ranks["what"]
    assert ranks["case"] == "per-expert, R = 2"
    unproven = {c["check"][0] for c in done.having("not run")}
    assert unproven >= {"4", "5", "6", "7", "8"}
    # the cases after it were run, on new ranks
    assert {c["check"] for c in done.having("passed") if c["case"] == "errors"} == {"8 errors"}


@pytest.mark.release("0.11.2")
def test_dead_rank(verify: Any, troubled: Callable[[str], Path]) -> None:
    folder = troubled("os._exit(7)")
    done = verify("qwen2_moe", "--generated", folder, *QUICK)
    assert done.code == 1, done.text
    (ranks,) = [c for c in done.having("failed") if c["check"] == "ranks"]
    told = (ranks["what"], ranks["detail"])
    assert "rank 1 ended with code 7" in told[0] or "rank 0" in told[0], told
    assert {c["check"][0] for c in done.having("not run")} >= {"4", "5"}


@pytest.mark.release("0.22.1")
def test_two_side_by_side(start: Callable[..., subprocess.Popen[str]], generated: Path) -> None:
    both = [start("qwen2_moe", "--generated", generated, *QUICK, "--seed", n) for n in (1, 2)]
    for process in both:
        out, err = process.communicate(timeout=400)
        assert process.returncode == 0, out + err
        assert "PASSED" in out


@pytest.mark.release("0.32.0")
def test_a_case_is_not_taken_for_an_earlier_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM remembers configurations by their id, which a later case must not inherit."""
    from eplb_codegen.verify.worker import eplb

    class State:
        def __init__(self, *_: Any) -> None:
            self.model_states: dict[str, object] = {}

        def add_model(self, *_: Any) -> None:
            self.model_states["it"] = object()

    class Config:
        parallel_config = model_config = None

    monkeypatch.setattr(eplb.tree, "need", lambda name: State)
    config = Config()
    kept = weakref.ref(config)
    eplb.Balancer(None, config, None)
    del config
    gc.collect()
    assert kept() is not None
