"""What is written: sets of files, edits by hand, interruptions, manifests, two processes."""

from __future__ import annotations

import hashlib
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen import __version__
from eplb_codegen.output.manifest import tomllib

VERSION = "0.10.0"
LLAMA4 = ("apply", "llama4", "--vllm", VERSION)
ON_MOVE = """
import os, signal, sys, time
from pathlib import Path
def on_move(event, arguments):  # Python tells of a move before it makes it
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == {name!r}:
        to = Path(os.fsdecode(arguments[1]))
        {what}
sys.addaudithook(on_move)
"""


def on_move(name: str, what: str) -> str:
    """Code that does something right before the tool moves the file `name` to its place."""
    return ON_MOVE.format(name=name, what=what)


KILL = "os.kill(os.getpid(), signal.SIGKILL)"


@pytest.fixture
def folder(run: Any) -> Path:
    return run.folder / "generated" / VERSION  # type: ignore[no-any-return]


@pytest.fixture
def older(run: Any, checkout: Callable[..., Path], folder: Path) -> dict[str, bytes]:
    """The set of llama4 made from a source that was a little different."""
    path = "vllm/model_executor/models"
    note = {f"{path}/{n}.py": lambda d: d + b"# older\n" for n in ("llama4", "mllama4")}
    checkout(changes=note)
    assert run("apply", "llama4", "--source", "src").code == 0
    return {p.name: p.read_bytes() for p in folder.iterdir()}


@pytest.fixture
def wanted(results: Callable[..., Any]) -> dict[str, bytes]:
    return {f.name: f.output.encode() for f in results(VERSION)["llama4"].files}


def python_files(folder: Path) -> dict[str, bytes]:
    return {p.name: p.read_bytes() for p in folder.glob("*.py")}


@pytest.mark.parametrize("name", ["llama4.py", "mllama4.py"])
def test_a_file_edited_by_hand_is_kept_unless_forced(
    run: Any, folder: Path, wanted: dict[str, bytes], name: str
) -> None:
    run(*LLAMA4)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / name).write_bytes(b"# mine\n")
    done = run(*LLAMA4)
    assert (done.code, done.out.count("written")) == (1, 0)
    assert f"generated/{VERSION}/{name} was edited by hand" in done.err
    assert "Move it away, or overwrite it with --force." in done.err
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == {**before, name: b"# mine\n"}
    assert run("apply", "--diff", *LLAMA4[1:]).code == 1
    assert run(*LLAMA4, "--force").code == 0
    assert python_files(folder) == wanted


def test_a_foreign_file_in_the_way_is_kept_unless_forced(
    run: Any, folder: Path, wanted: dict[str, bytes]
) -> None:
    folder.mkdir(parents=True)
    (folder / "mllama4.py").write_bytes(b"# theirs\n")
    done = run(*LLAMA4)
    assert done.code == 1
    assert f"generated/{VERSION}/mllama4.py was not written by this tool" in done.err
    assert python_files(folder) == {"mllama4.py": b"# theirs\n"}
    assert run(*LLAMA4, "--force").code == 0
    assert python_files(folder) == wanted


def test_one_edited_file_does_not_stop_the_other_families(run: Any, folder: Path) -> None:
    folder.mkdir(parents=True)
    (folder / "mllama4.py").write_bytes(b"# theirs\n")
    done = run("apply", "--all", "--vllm", VERSION)
    assert done.code == 1
    assert "qwen2_moe: written" in done.out and "qwen3_moe: written" in done.out
    assert set(python_files(folder)) == {"mllama4.py", "qwen2_moe.py", "qwen3_moe.py"}
    assert "llama4" not in tomllib.loads((folder / "manifest.toml").read_text())["families"]


@pytest.mark.parametrize("lost", ["llama4.py", "mllama4.py", "manifest.toml"])
def test_what_was_deleted_is_made_again(
    run: Any, folder: Path, wanted: dict[str, bytes], lost: str
) -> None:
    run(*LLAMA4)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / lost).unlink()
    assert run(*LLAMA4).code == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_set_from_an_older_source_is_replaced(
    run: Any, folder: Path, older: dict[str, bytes], wanted: dict[str, bytes]
) -> None:
    assert set(older) == {*wanted, "manifest.toml"}
    assert all(older[name] != text for name, text in wanted.items())
    assert run(*LLAMA4).code == 0
    assert python_files(folder) == wanted


# A set lands whole or not at all.

FAILURES = {
    "a folder in the way": ("to.mkdir()", 2),
    "disk full": ("raise OSError(28, 'No space left on device')", 2),
    "Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT); time.sleep(9)", 130),
}


@pytest.mark.parametrize("name", ["mllama4.py", "manifest.toml"])
@pytest.mark.parametrize("what, code", FAILURES.values(), ids=FAILURES)
def test_a_failure_between_two_moves_puts_back_the_first(
    run: Any, folder: Path, name: str, what: str, code: int
) -> None:
    done = run(*LLAMA4, code=on_move(name, what))
    assert done.code == code, done
    assert code == 130 or f"cannot write to generated/{VERSION}" in done.err
    assert [p for p in folder.iterdir() if p.is_file()] == []


@pytest.mark.parametrize("name", ["mllama4.py", "manifest.toml"])
@pytest.mark.parametrize("failure", ["disk full", "Ctrl-C"])
def test_a_failure_between_two_moves_puts_back_what_was_there(
    run: Any, folder: Path, older: dict[str, bytes], name: str, failure: str
) -> None:
    what, code = FAILURES[failure]
    done = run(*LLAMA4, code=on_move(name, what))
    assert done.code == code, done
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == older


@pytest.mark.parametrize("name", ["llama4.py", "mllama4.py", "manifest.toml"])
@pytest.mark.parametrize("update", [False, True], ids=["new", "update"])
def test_the_run_after_one_that_was_killed_completes_the_set(
    run: Any, folder: Path, wanted: dict[str, bytes], request: Any, name: str, update: bool
) -> None:
    if update:
        request.getfixturevalue("older")
    assert run(*LLAMA4, code=on_move(name, KILL)).code == -signal.SIGKILL
    moved = [n for n, text in wanted.items() if python_files(folder).get(n) == text]
    order = [*wanted, "manifest.toml"]
    assert moved == order[: order.index(name)]
    done = run(*LLAMA4)
    assert (done.code, done.err) == (0, "")
    assert python_files(folder) == wanted
    assert "unchanged" in run(*LLAMA4).out


def test_the_run_after_one_that_was_killed_leaves_no_temporary_files(
    run: Any, folder: Path, wanted: dict[str, bytes]
) -> None:
    run(*LLAMA4, code=on_move("mllama4.py", KILL))
    assert run(*LLAMA4).code == 0
    assert {p.name for p in folder.iterdir()} == {*wanted, "manifest.toml"}


# Other processes at work in the same folder.


def test_two_processes_at_once_on_one_family(
    run: Any, folder: Path, wanted: dict[str, bytes]
) -> None:
    started = [run.start(*LLAMA4) for _ in range(3)]
    outcomes = [(p.communicate(timeout=60), p.returncode) for p in started]
    assert [code for _, code in outcomes] == [0, 0, 0], outcomes
    assert python_files(folder) == wanted
    assert {p.name for p in folder.iterdir() if p.suffix == ".tmp"} == set()


def test_two_processes_at_once_on_two_families(run: Any, folder: Path) -> None:
    """The one that began first is the last to move its manifest, and must not lose the other's."""
    wait = "run.joinpath('moving').touch(); [time.sleep(.05) for _ in range(60) if not done()]"
    code = (
        f"from pathlib import Path\nrun = Path({str(run.folder)!r})\n"
        "done = (run / 'done').exists\n" + on_move("qwen2_moe.py", wait)
    )
    first = run.start("apply", "qwen2_moe", "--vllm", VERSION, code=code)
    deadline = time.monotonic() + 30
    while not (run.folder / "moving").exists() and time.monotonic() < deadline:
        time.sleep(0.02)
    second = run("apply", "qwen3_moe", "--vllm", VERSION)
    (run.folder / "done").touch()
    first.communicate(timeout=60)
    assert (first.returncode, second.code) == (0, 0)
    manifest = tomllib.loads((folder / "manifest.toml").read_text())
    assert sorted(manifest["families"]) == ["qwen2_moe", "qwen3_moe"]


# Where nothing can be written.


def test_a_folder_that_cannot_be_made(run: Any) -> None:
    (run.folder / "file").write_text("not a folder")
    done = run(*LLAMA4, "--out", "file/x")
    assert done.code == 2
    assert "file/x" in done.err and "--out" in done.err
    assert (run.folder / "file").read_text() == "not a folder"


def test_a_file_in_the_place_of_the_folder(run: Any, folder: Path) -> None:
    folder.parent.mkdir()
    folder.write_text("not a folder")
    done = run(*LLAMA4)
    assert done.code == 2
    assert f"generated/{VERSION}" in done.err and "--out" in done.err
    assert folder.read_text() == "not a folder"


def test_a_folder_in_the_place_of_a_file(run: Any, folder: Path) -> None:
    (folder / "mllama4.py").mkdir(parents=True)
    done = run(*LLAMA4, "--force")
    assert done.code == 2
    assert f"cannot write to generated/{VERSION}" in done.err
    assert [p.name for p in folder.iterdir()] == ["mllama4.py"]


# The manifest.


def test_manifest_says_what_was_made_from_what(
    run: Any, checkout: Callable[..., Path], folder: Path, contents: Callable[..., Any]
) -> None:
    root = checkout()
    assert run("apply", "--all", "--source", "src").code == 0
    manifest = tomllib.loads((folder / "manifest.toml").read_text())
    assert (manifest["format"], manifest["vllm"]) == (1, VERSION)
    assert sorted(manifest["families"]) == ["llama4", "qwen2_moe", "qwen3_moe"]
    written = contents(folder)
    recorded = {}
    for entry in manifest["families"].values():
        assert entry["tool_version"] == __version__
        for path, digest in entry["depends"].items():
            assert sha256((root / path).read_bytes()) == digest, path
        for name, file in entry["files"].items():
            recorded[name] = file["sha256"]
            assert entry["depends"][file["upstream"]] == file["upstream_sha256"]
            assert file["upstream"] == f"vllm/model_executor/models/{name}"
            assert file["upstream_sha256"].encode() in written[name]
    assert recorded == {n: sha256(data) for n, data in written.items() if n != "manifest.toml"}
    llama4 = manifest["families"]["llama4"]["files"]
    name = "Llama4ForConditionalGeneration"
    assert llama4["mllama4.py"]["architectures"] == {name: name}


def test_manifest_and_files_do_not_tell_when_or_where_or_in_which_order(
    run: Any, contents: Callable[..., Any]
) -> None:
    for out, targets in {"a": "llama4 qwen2_moe", "b/c": "qwen2_moe llama4"}.items():
        assert run("apply", *targets.split(), "--vllm", VERSION, "--out", out).code == 0
    one_by_one = [run("apply", t, "--vllm", VERSION, "--out", "d") for t in ("qwen2_moe", "llama4")]
    assert [done.code for done in one_by_one] == [0, 0]
    made = [contents(run.folder / out) for out in ("a", "b/c", "d")]
    assert made[0] == made[1] == made[2]
    assert len(made[0]) == 4
    assert not any(str(run.folder).encode() in data for data in made[0].values())


@pytest.mark.parametrize(
    "text, says",
    [
        ("families = [", "cannot be read"),
        (b"\xff\xfe", "cannot be read"),
        ("", "is damaged"),
        ("format = 1", "is damaged"),
        ('format = 2\nvllm = "0.10.0"\n[families]', "has format 2, not 1"),
        ('format = 1\nvllm = "0.9.2"\n[families]', "is for vLLM 0.9.2, not 0.10.0"),
        ('format = 1\nvllm = "0.10.0"\nfamilies = []', "is damaged"),
        ('format = 1\nvllm = "0.10.0"\n[families]\nllama4 = 3', "is damaged"),
        ("[files]", "is damaged"),
        ('[files."llama4.py"]\nupstream = "x"', "is damaged"),
        ('[files."llama4.py".architectures]\nX = "X"', "is damaged"),
        ('depends = "text"\n[files]', "is damaged"),
        ("depends = 7\n[files]", "is damaged"),
        ('files = "text"\n[depends]', "is damaged"),
        (
            '[depends]\n[files."llama4.py"]\nupstream = "x"\nupstream_sha256 = "x"\n'
            'sha256 = "x"\narchitectures = "text"',
            "is damaged",
        ),
        (None, "cannot be read"),
    ],
)
def test_a_manifest_that_cannot_be_used(
    run: Any, folder: Path, text: str | bytes | None, says: str
) -> None:
    folder.mkdir(parents=True)
    path = folder / "manifest.toml"
    if isinstance(text, str) and ("files" in text or "depends" in text):
        head = 'format = 1\nvllm = "0.10.0"\n[families.llama4]\ntool_version = "1"\n'
        text = head + text.replace("[files", "[families.llama4.files").replace(
            "[depends", "[families.llama4.depends"
        )
    data = text.encode() if isinstance(text, str) else text
    if data is None:
        path.mkdir()
    else:
        path.write_bytes(data)
    done = run(*LLAMA4, "--force")
    assert done.code == 2, done
    assert f"generated/{VERSION}/manifest.toml {says}" in done.err
    assert "Move generated/0.10.0 away, or use another --out." in done.err
    assert [p.name for p in folder.iterdir()] == ["manifest.toml"]
    assert data is None or path.read_bytes() == data


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
