"""`apply --in-place` on a checkout, which real git looks at, and `--revert`."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.families import family
from eplb_codegen.source import find_source

VERSION = "0.10.0"
MODELS = "vllm/model_executor/models"
NAMES = ("qwen2_moe", "llama4")
APPLY = ("apply", *NAMES, "--in-place", "--source", "vllm")
REVERT = ("apply", "--revert", "--source", "vllm")


class Checkout:
    """A git repository with the files that patches of two families depend on."""

    def __init__(self, root: Path, files: dict[str, str]) -> None:
        self.root = root
        for path, text in files.items():
            self.write(path, text)
        self.file("qwen2_moe").chmod(0o755)  # git keeps that bit
        self.git("init", "-q")
        self.commit()

    def git(self, *arguments: str) -> str:
        who = ("-c", "user.name=x", "-c", "user.email=x@example.com", "-c", "core.fileMode=true")
        command = ["git", *who, *arguments]
        return subprocess.run(
            command, cwd=self.root, check=True, capture_output=True, text=True
        ).stdout

    def commit(self) -> None:
        self.git("add", "-A")
        self.git("commit", "-qm", "x")

    def file(self, name: str) -> Path:
        return self.root / MODELS / f"{name}.py"

    def write(self, path: str, text: str) -> None:
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_bytes(text.encode())

    @property
    def status(self) -> list[str]:
        """Modified and untracked files, the folder of the models left out."""
        return [line.replace(f"{MODELS}/", "") for line in self.git("status", "-s").splitlines()]


PATCHED = [" M llama4.py", " M mllama4.py", " M qwen2_moe.py"]


@pytest.fixture
def checkout(tmp_path: Path, result: Callable[..., Any]) -> Checkout:
    tree = find_source(version=VERSION)
    entries = [result(VERSION, name).entry for name in NAMES]
    paths = {"PKG-INFO", "vllm/__init__.py", *(p for e in entries for p in e.depends)}
    return Checkout(tmp_path / "vllm", {path: tree.read(path) for path in paths})


def test_git_diff_is_the_pull_request_and_revert_undoes_it(
    tool: Any, checkout: Checkout, result: Callable[..., Any], tmp_path: Path
) -> None:
    done = tool(*APPLY)
    assert done.code == 0, done
    assert checkout.status == PATCHED
    diff = checkout.git("diff")
    files = [file for name in NAMES for file in result(VERSION, name).files]
    for file in files:
        assert (checkout.root / file.upstream).read_bytes() == file.patched.encode()
    assert "@" + "generated" not in diff and "new mode" not in diff
    assert sorted(p.name for p in tmp_path.iterdir()) == ["state", "vllm"]
    # again: known as our own work
    again = tool(*APPLY)
    assert (again.code, again.out.count(": unchanged: vllm/")) == (0, 2)
    assert checkout.git("diff") == diff
    done = tool(*REVERT)
    assert (done.code, done.out.count(": reverted: vllm/")) == (0, 2)
    assert checkout.status == []
    # the difference is the patch
    checkout.root.joinpath("../p").write_text(diff)
    checkout.git("apply", "../p")
    assert checkout.git("diff") == diff
    # and nothing is on record any more
    assert (tool(*REVERT).code, list((tmp_path / "state").rglob("*.json"))) == (2, [])


def test_one_family_at_a_time(tool: Any, checkout: Checkout) -> None:
    assert tool("apply", "llama4", "--in-place", "--source", "vllm/vllm").code == 0
    assert tool("apply", "qwen2_moe", "--in-place", "--source", "vllm").code == 0
    assert tool(*REVERT, "llama4").code == 0
    assert checkout.status == [" M qwen2_moe.py"]
    assert tool(*REVERT, "--json").json["targets"] == [
        {
            "family": "qwen2_moe",
            "action": "reverted",
            "exit": 0,
            "message": f"{MODELS}/qwen2_moe.py",
            "diff": None,
        }
    ]
    assert checkout.status == []


@pytest.mark.parametrize("what", ["edited", "deleted"])
def test_what_was_edited_since_is_kept_unless_forced(
    tool: Any, checkout: Checkout, what: str
) -> None:
    """The other family goes its way; of this one no file changes."""
    tool(*APPLY)
    file = checkout.file("mllama4")
    edited = file.read_text() + "# mine\n"
    file.write_text(edited) if what == "edited" else file.unlink()
    if what == "edited":
        done = tool(*APPLY)
        assert done.code == 1
        assert "mllama4.py was edited since it was patched" in done.err
        assert file.read_text() == edited
    done = tool(*REVERT)
    assert done.code == 1
    assert "mllama4.py was " + ("edited" if what == "edited" else "deleted") in done.err
    assert [s for s in checkout.status if "qwen" in s] == []
    assert "M llama4.py" in checkout.status[0]
    assert tool(*REVERT, "--force").code == 0
    assert checkout.status == []


def test_force_patches_anew_what_was_edited(tool: Any, checkout: Checkout) -> None:
    tool(*APPLY)
    diff = checkout.git("diff")
    checkout.file("llama4").write_text(checkout.file("llama4").read_text() + "# mine\n")
    assert tool(*APPLY, "--force").code == 0
    assert checkout.git("diff") == diff


def test_upstream_pulled_in_between(
    tool: Any, checkout: Checkout, result: Callable[..., Any]
) -> None:
    """The patch was given up, and upstream went on: it is patched as it is now."""
    tool(*APPLY)
    checkout.git("checkout", "-q", "--", ".")
    tree = find_source(version="0.10.1")
    paths = result("0.10.1", "qwen2_moe").entry.depends
    for path in paths:
        checkout.write(path, tree.read(path))
    checkout.commit()
    assert tool("apply", "qwen2_moe", "--in-place", "--source", "vllm").code == 0
    assert checkout.status == [" M qwen2_moe.py"]
    (file,) = result("0.10.1", "qwen2_moe").files
    assert checkout.file("qwen2_moe").read_text() == file.patched
    assert tool(*REVERT).code == 0
    assert checkout.status == []


@pytest.mark.parametrize("force", [[], ["--force"]])
def test_upstream_that_has_most_of_a_patch_by_now(
    tool: Any, result: Callable[..., Any], tmp_path: Path, force: list[str]
) -> None:
    """What it has of its own is no edit, and is not undone."""
    old, new = find_source(version="0.10.0"), find_source(version="0.10.1")
    entries = [result(v, "qwen3_moe").entry for v in ("0.10.0", "0.10.1")]
    paths = {"PKG-INFO", "vllm/__init__.py", *(p for e in entries for p in e.depends)}
    checkout = Checkout(
        tmp_path / "vllm",
        {f"{MODELS}/qwen2_moe.py": "", **{p: old.read(p) for p in paths if old.exists(p)}},
    )
    apply = ("apply", "qwen3_moe", "--in-place", "--source", "vllm")
    assert tool(*apply).code == 0
    checkout.git("checkout", "-q", "--", ".")
    for path in paths:
        if new.exists(path):
            checkout.write(path, new.read(path))
        else:
            (checkout.root / path).unlink()
    checkout.commit()
    assert "nothing of the patch is left" in tool(*REVERT, *force).out
    assert checkout.status == []
    assert tool(*apply, *force).code == 0
    (file,) = result("0.10.1", "qwen3_moe").files
    assert checkout.file("qwen3_moe").read_text() == file.patched


def test_a_patch_whose_line_ends_changed_is_undone(tool: Any, checkout: Checkout) -> None:
    tool(*APPLY)
    file = checkout.file("qwen2_moe")
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    assert "qwen2_moe: reverted" in tool(*REVERT).out
    assert checkout.status == []


def test_a_patch_is_the_same_whatever_else_is_patched(
    tool: Any, result: Callable[..., Any], tmp_path: Path
) -> None:
    """Qwen3-VL's model inherits Qwen3's loading, in the same checkout."""
    tree, names = find_source(version="0.33.0"), ("qwen3_moe", "qwen3_vl_moe")
    entries = [result("0.33.0", name).entry for name in names]
    paths = {"PKG-INFO", "vllm/__init__.py", *(p for e in entries for p in e.depends)}
    checkout = Checkout(
        tmp_path / "vllm", {f"{MODELS}/qwen2_moe.py": "", **{p: tree.read(p) for p in paths}}
    )
    for order in (names, names[::-1]):
        assert tool("apply", *order, "--in-place", "--source", "vllm").code == 0
        for name in names:
            (file,) = result("0.33.0", name).files
            assert checkout.file(name).read_text() == file.patched, (order, name)
        assert tool(*REVERT).code == 0
        assert checkout.status == []


def test_a_patch_that_git_undid_leaves_nothing_to_revert(tool: Any, checkout: Checkout) -> None:
    tool(*APPLY)
    checkout.git("checkout", "-q", "--", ".")
    done = tool(*REVERT)
    assert (done.code, done.out.count("nothing of the patch is left")) == (0, 2)
    assert tool(*REVERT).code == 2


KILLED = """
import os, signal
from pathlib import Path
import sys
def on_move(event, arguments):  # Python tells of a move before it makes it
    if event == "os.rename" and Path(os.fsdecode(arguments[1])).name == {name!r}:
        {what}
sys.addaudithook(on_move)
"""


@pytest.mark.parametrize("then", ["apply", "revert"])
@pytest.mark.parametrize("name", ["llama4.py", "mllama4.py"])
def test_a_run_that_was_killed_is_completed_or_undone(
    tool: Any, checkout: Checkout, name: str, then: str
) -> None:
    command = ("apply", "llama4", "--in-place", "--source", "vllm")
    code = KILLED.format(name=name, what="os.kill(os.getpid(), signal.SIGKILL)")
    assert tool(*command, code=code).code == -signal.SIGKILL
    assert any(".tmp" in line for line in checkout.status)
    assert tool(*(command if then == "apply" else REVERT)).code == 0
    assert checkout.status == (PATCHED[:2] if then == "apply" else [])


def test_a_disk_that_is_full_changes_nothing(tool: Any, checkout: Checkout, tmp_path: Path) -> None:
    what = "raise OSError(28, 'No space left on device')"
    done = tool(*APPLY[:1], "llama4", *APPLY[3:], code=KILLED.format(name="mllama4.py", what=what))
    assert done.code == 2
    assert "No space left" in done.err
    assert checkout.status == []
    assert list((tmp_path / "state").rglob("*.json")) == []


def test_a_link_is_left_alone(tool: Any, checkout: Checkout, tmp_path: Path) -> None:
    """As package managers link files of an environment to a cache that others share."""
    file = checkout.file("qwen2_moe")
    cache = tmp_path / "cache.py"
    file.rename(cache)
    file.symlink_to(cache)
    before = cache.read_bytes()
    done = tool("apply", "qwen2_moe", "--in-place", "--source", "vllm")
    assert (done.code, file.is_symlink()) == (2, True)
    assert "qwen2_moe.py is a link" in done.err
    assert cache.read_bytes() == before


def test_windows_newlines(tool: Any, checkout: Checkout) -> None:
    file = checkout.file("qwen2_moe")
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    checkout.commit()
    before = file.read_bytes()
    assert tool("apply", "qwen2_moe", "--in-place", "--source", "vllm").code == 0
    assert file.read_bytes().count(b"\n") == file.read_bytes().count(b"\r\n")
    assert tool(*REVERT).code == 0
    assert file.read_bytes() == before


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("apply qwen2_moe --in-place", "--in-place and --revert need --source"),
        ("apply --revert", "--in-place and --revert need --source"),
        ("apply qwen2_moe --in-place --vllm 0.10.0", "--in-place and --revert need --source"),
        ("apply --in-place --source vllm", "name targets, or give --all"),
        ("apply qwen2_moe --diff --in-place --source vllm", "--diff writes nothing"),
        ("apply --revert --source vllm", "nothing is on record here as patched"),
        ("apply qwen2_moe --revert --source vllm", "nothing is on record here as patched"),
    ],
)
def test_usage_in_place(tool: Any, checkout: Checkout, arguments: str, says: str) -> None:
    done = tool(*arguments.split())
    assert done.code == 2, done
    assert says in done.err
    assert checkout.status == []


def test_a_record_that_is_damaged_stops(tool: Any, checkout: Checkout, tmp_path: Path) -> None:
    tool(*APPLY)
    (record,) = (tmp_path / "state").rglob("*.json")
    record.write_text('{"format": 1}')
    for command in (APPLY, REVERT):
        done = tool(*command)
        assert done.code == 2
        assert str(record) in done.err
    assert checkout.status == PATCHED


def test_families_that_need_nothing(tool: Any, checkout: Checkout) -> None:
    done = tool("apply", "--all", "--in-place", "--source", "vllm")
    assert "qwen3_vl_moe: file absent" in done.out
    assert family("qwen3_moe").name in done.out + done.err


def test_a_quantisation_method(tool: Any, result: Callable[..., Any], tmp_path: Path) -> None:
    """Its file stands in a folder of its own."""
    name, tree = "compressed_tensors_wna16", find_source(version="0.11.2")
    made = result("0.11.2", name)
    (file,) = made.files
    paths = {"PKG-INFO", "vllm/__init__.py", *made.entry.depends}
    checkout = Checkout(
        tmp_path / "vllm", {f"{MODELS}/qwen2_moe.py": "", **{p: tree.read(p) for p in paths}}
    )
    arguments = ("apply", name, "--in-place", "--source", "vllm")
    assert tool(*arguments).code == 0
    assert checkout.status == [f" M {file.upstream}"]
    assert (checkout.root / file.upstream).read_text() == file.patched
    assert "unchanged" in tool(*arguments).out
    assert tool(*REVERT).code == 0
    assert checkout.status == []
