"""What a run prints, and to what: patches that apply, terminals, pipes, and an early end."""

from __future__ import annotations

import json
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = "vllm/model_executor/models"
DIFF = ("apply", "--diff", "qwen2_moe", "--vllm", "0.10.0")
ESCAPE = re.compile(r"\x1b\[[0-9;]*m")


@pytest.mark.parametrize("tool", ["git", "patch"])
@pytest.mark.parametrize("version", ["0.10.0", "0.33.0"])
@pytest.mark.parametrize("end", ["as it is", "no newline at the end"])
def test_the_diff_is_a_patch(
    run: Any,
    checkout: Callable[..., Path],
    results: Callable[..., Any],
    contents: Callable[..., Any],
    version: str,
    tool: str,
    end: str,
) -> None:
    if not shutil.which(tool):
        pytest.skip(f"{tool} is not installed")
    if end != "as it is":
        root = checkout(version, changes={f"{MODELS}/qwen2_moe.py": cut_newline})
    else:
        root = checkout(version)
    before = contents(root)
    done = run("apply", "--all", "--diff", "--source", "src")
    assert (done.code, done.err) == (1, "")
    assert contents(root) == before
    assert sorted(p.name for p in run.folder.iterdir()) == ["src"]
    command = ["git", "apply", "-"] if tool == "git" else ["patch", "-p1", "--fuzz=0"]
    applied = subprocess.run(
        command,
        cwd=root,
        input=done.out,
        text=True,
        capture_output=True,
        env={**os.environ, "GIT_CEILING_DIRECTORIES": str(run.folder)},
        check=False,
    )
    assert applied.returncode == 0, applied
    assert "fuzz" not in applied.stdout and "offset" not in applied.stdout
    after = contents(root)
    changed = {path for path in before if after[path] != before[path]}
    files = {f.upstream: f for r in results(version).values() for f in r.files}
    assert changed == set(files) and set(after) == set(before)
    if end == "as it is":
        assert all(after[path] == file.patched.encode() for path, file in files.items())
    else:  # what the tool itself writes of this source says what is right
        (shown,) = (t for t in targets(run, version) if t["family"] == "qwen2_moe")
        assert shown["state"] == "native and sound"


def cut_newline(data: bytes) -> bytes:
    """Without a newline at the end; near enough to a change for the last line to be shown."""
    last = data.find(b"(\n            _maybe_reshape(weights)")
    return data[:-1] if last < 0 else data[:last] + b"(_maybe_reshape(weights))"


def targets(run: Any, version: str) -> list[dict[str, Any]]:
    document = json.loads(run("list", "--json", "--source", "src").out)
    assert document["vllm"] == version
    return document["targets"]  # type: ignore[no-any-return]


def test_the_diff_for_programs_is_the_same(run: Any) -> None:
    document = json.loads(run(*DIFF, "--json").out)
    (target,) = document["targets"]
    assert (target["action"], target["exit"]) == ("differs", 1)
    assert target["diff"] == run(*DIFF).out


@pytest.mark.parametrize("targets, code", [("llama", 3), ("qwen2_moe llama", 3), ("no_such", 3)])
def test_the_diff_of_what_is_refused_goes_to_standard_error(
    run: Any, targets: str, code: int
) -> None:
    done = run("apply", "--diff", *targets.split(), "--vllm", "0.10.0")
    assert done.code == code
    assert "refused" in done.err
    assert "refused" not in done.out and bool(done.out) == ("qwen2_moe" in targets)


def test_nothing_to_show_is_no_difference(
    run: Any, checkout: Callable[..., Path], results: Callable[[str], Any]
) -> None:
    (file,) = results("0.33.0")["qwen3_moe"].files
    checkout("0.33.0", changes={file.upstream: file.patched.encode()})
    done = run("apply", "--diff", "qwen3_moe", "--source", "src")
    assert (done.code, done.out, done.err) == (0, "", "")


@pytest.mark.parametrize(
    "env, coloured",
    [
        ({"TERM": "xterm"}, True),
        ({"TERM": "xterm", "NO_COLOR": "1"}, False),
        ({"TERM": "dumb"}, False),
    ],
)
def test_a_terminal_gets_colours(
    run: Any, monkeypatch: pytest.MonkeyPatch, env: dict[str, str], coloured: bool
) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    ours, theirs = pty.openpty()
    process = run.start(*DIFF, stdout=theirs, env=env)
    os.close(theirs)
    text = read_all(ours)
    process.communicate(timeout=60)
    assert process.returncode == 1
    assert bool(ESCAPE.search(text)) == coloured
    assert ESCAPE.sub("", text).replace("\r\n", "\n") == run(*DIFF).out
    if coloured:
        added = [line for line in text.splitlines() if "MixtureOfExperts):" in line]
        assert added and all(line.startswith("\x1b[32m+") for line in added)


@pytest.mark.parametrize("arguments", [DIFF, ("list", "--vllm", "0.10.0")])
def test_a_pipe_gets_no_colours(run: Any, arguments: tuple[str, ...]) -> None:
    done = run(*arguments, env={"TERM": "xterm"})
    assert done.out and "\x1b" not in done.text


@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(("list", "--vllm", "0.10.0"), id="list"),
        pytest.param(("list", "--json", "--vllm", "0.10.0"), id="list for programs"),
        pytest.param(("apply", "--all", "--diff", "--vllm", "0.10.0"), id="diff"),
        pytest.param(("apply", "--all", "--vllm", "0.10.0"), id="apply"),
    ],
)
@pytest.mark.parametrize("unbuffered", ["", "1"], ids=["buffered", "unbuffered"])
def test_a_reader_that_went_away_is_no_error(
    run: Any, arguments: tuple[str, ...], unbuffered: str
) -> None:
    ours, theirs = os.pipe()
    os.close(ours)
    process = run.start(*arguments, stdout=theirs, env={"PYTHONUNBUFFERED": unbuffered})
    os.close(theirs)
    _, err = process.communicate(timeout=60)
    assert err == ""
    assert process.returncode in (0, 1)


@pytest.mark.parametrize("arguments", [DIFF, ("list", "--vllm", "0.10.0")], ids=["diff", "list"])
@pytest.mark.parametrize("where", ["/dev/full", "closed"])
def test_output_that_cannot_be_written(run: Any, arguments: tuple[str, ...], where: str) -> None:
    redirect = ">&-" if where == "closed" else f"> {where}"
    command = [sys.executable, "-m", "eplb_codegen", *arguments]
    done = subprocess.run(
        ["sh", "-c", f'"$@" {redirect}', "sh", *command],
        cwd=run.folder,
        env={**os.environ, "PYTHONUNBUFFERED": ""},
        stderr=subprocess.PIPE,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr and "Exception ignored" not in done.stderr
    assert done.returncode == 2 if where == "/dev/full" else done.returncode in (0, 1, 2)


def test_ctrl_c_while_it_waits_for_the_index(run: Any) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(30)
        env = {
            **{name: "" for name in os.environ if name.startswith("PIP_")},
            "PIP_CONFIG_FILE": os.devnull,
            "PIP_INDEX_URL": f"http://127.0.0.1:{server.getsockname()[1]}/simple/",
            "EPLB_CODEGEN_CACHE": str(run.folder / "cache"),
        }
        process = run.start("apply", "--all", "--vllm", "0.10.0", env=env)
        connection, _ = server.accept()
        with connection:
            connection.recv(1)  # it asks, and gets no answer
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert out == ""
    assert "eplb-codegen: interrupted" in err and "Traceback" not in err
    assert not (run.folder / "generated").exists()


def read_all(descriptor: int) -> str:
    data = b""
    try:
        while piece := os.read(descriptor, 65536):
            data += piece
    except OSError:  # Linux, once the other end is closed
        pass
    os.close(descriptor)
    return data.decode()
