"""Every state of `check` and every exit code, from real releases."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.source import find_source

MODELS = "vllm/model_executor/models"
QWEN2 = f"{MODELS}/qwen2_moe.py"
CONFIG = "vllm/config/parallel.py"


@pytest.mark.parametrize(
    "old, new, name, state, code",
    [
        ("0.10.0", "0.10.1", "qwen3_moe", "upstream changed, still patches", 1),
        ("0.19.1", "0.20.0", "qwen2_moe", "upstream changed, still patches", 1),
        ("0.24.0", "0.25.0", "qwen2_moe", "upstream changed, still patches", 1),
        ("0.31.0", "0.32.0", "qwen2_moe", "in sync", 0),
        ("0.32.0", "0.31.0", "qwen2_moe", "in sync", 0),
    ],
)
def test_from_one_release_to_another(
    tool: Any,
    generated: Callable[..., Path],
    result: Callable[..., Any],
    tmp_path: Path,
    old: str,
    new: str,
    name: str,
    state: str,
    code: int,
) -> None:
    folder = generated(old, name)
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    done = tool("check", "--vllm", new, "--json")
    assert done.code == code, done
    (target,) = done.json["targets"]
    assert (target["family"], target["state"], target["exit"]) == (name, state, code)
    assert (target["made_from_vllm"], done.json["vllm"]) == (old, new)
    (file,) = target["files"] or [None]
    if code == 0:
        assert file is None
        assert "the same patch as in generated/0.3" in target["findings"][0]["message"]
    else:
        # both differences are patches, and lead to what is there now
        apply_patch(tmp_path, file["upstream_diff"], file["upstream"], result(old, name).files[0])
        assert (tmp_path / "up.py").read_text() == result(new, name).files[0].original
        text = before[f"{name}.py"].decode()
        (tmp_path / "up.py").write_text(text)
        patch(tmp_path, file["result_diff"])
        written = (tmp_path / "up.py").read_text()
        assert body(written) == body(result(new, name).files[0].output)
        line = file["line"] - 1
        assert text.splitlines()[:line] == written.splitlines()[:line]
        assert text.splitlines()[line] != written.splitlines()[line]
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before
    assert [p.name for p in (tmp_path / "generated").iterdir()] == [old]


def apply_patch(folder: Path, diff: str, path: str, old: Any) -> None:
    assert f"/{path}\n" in diff
    (folder / "up.py").write_text(old.original)
    patch(folder, diff)


def patch(folder: Path, diff: str) -> None:
    """Apply a difference of one file to `up.py`."""
    lines = re.sub(r"\A--- .*\n\+\+\+ .*\n", "--- a/up.py\n+++ b/up.py\n", diff)
    command = ["git", "apply", "--unidiff-zero", "-"]
    subprocess.run(command, input=lines, text=True, cwd=folder, check=True)


def body(text: str) -> str:
    return text.partition("# SHA-256 of that file")[2].partition("\n")[2]


def test_support_of_upstream_that_is_faulty_is_told(
    tool: Any, generated: Callable[..., Path]
) -> None:
    generated("0.10.0", "qwen3_moe")
    done = tool("check", "--vllm", "0.10.1")
    assert "qwen3_moe.py; native but faulty: " in done.out
    assert re.search(r"^\+ +MixtureOfExperts\):$", done.out, re.M)


WNA16 = "compressed_tensors_wna16"


def test_a_quantisation_method_that_upstream_has_now(
    tool: Any, generated: Callable[..., Path], tmp_path: Path
) -> None:
    generated("0.11.2", WNA16)
    done = tool("check", "--vllm", "0.12.0", "--json")
    (target,) = done.json["targets"]
    assert (done.code, target["state"]) == (1, "upstream now sound, retire the patch")
    # its own release: nothing to do, and lost files are known by their headers
    assert tool("check", "--vllm", "0.11.2").code == 0
    (tmp_path / "generated/0.11.2/manifest.toml").unlink()
    assert tool("check", "--vllm", "0.11.2", "--json").states == {WNA16: "not all there"}
    assert tool("check", "--fix", "--vllm", "0.11.2").code == 0
    assert tool("check", "--vllm", "0.11.2", "--json").states == {WNA16: "in sync"}


def test_in_sync_in_its_own_release(tool: Any, generated: Callable[..., Path]) -> None:
    generated("0.32.0", "qwen2_moe")
    assert tool("check", "--vllm", "0.32.0").out.splitlines() == [
        "vLLM 0.32.0 from the package index, compared with generated",
        "  qwen2_moe: in sync",
    ]


EXPERTS = "self.experts = FusedMoE("


def gone(text: str) -> str:
    """Experts that something else builds now."""
    return text.replace(EXPERTS, "self.experts = make_experts(")


def test_a_part_that_is_gone(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path]
) -> None:
    folder = generated("0.10.0", "qwen2_moe")
    source("0.10.0", "qwen2_moe", {QWEN2: gone})
    done = tool("check", "--source", "src", "--json")
    (target,) = done.json["targets"]
    assert done.code == 3
    assert target["state"] == "upstream changed, not recognised"
    assert re.search(r"qwen2_moe\.py:\d+: .*experts", target["findings"][0]["message"])
    (file,) = target["files"]
    assert "+        self.experts = make_experts(" in file["upstream_diff"]
    # the line of our file in which the change upstream falls
    lines = (folder / "qwen2_moe.py").read_text().splitlines()
    assert EXPERTS in lines[file["line"] - 1]


@pytest.mark.parametrize(
    "change, code, state, says",
    [
        (None, 3, "upstream changed, not recognised", "qwen2_moe.py is not there"),
        (lambda text: text + "# \udcff", 2, "upstream not readable", "is not UTF-8"),
    ],
    ids=["deleted", "not UTF-8"],
)
def test_an_upstream_file_that_cannot_be_read(
    tool: Any,
    generated: Callable[..., Path],
    source: Callable[..., Path],
    change: Any,
    code: int,
    state: str,
    says: str,
) -> None:
    generated("0.10.0", "qwen2_moe")
    root = source("0.10.0", "qwen2_moe", {QWEN2: None} if change is None else {})
    if change:
        (root / QWEN2).write_bytes((root / QWEN2).read_bytes() + b"# \xff")
    done = tool("check", "--source", "src", "--json")
    (target,) = done.json["targets"]
    assert (done.code, target["state"]) == (code, state)
    assert says in target["findings"][0]["message"]


def test_a_file_that_the_patch_depends_on(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path]
) -> None:
    generated("0.32.0", "qwen2_moe")
    source("0.32.0", "qwen2_moe", {CONFIG: lambda text: text + "# changed\n"})
    done = tool("check", "--source", "src", "--json")
    (target,) = done.json["targets"]
    assert (done.code, target["state"]) == (1, "a file the patch depends on changed")
    assert target["findings"][0]["message"] == f"{CONFIG}; the patch stays the same"


def test_a_file_that_the_patch_depends_on_of_another_release(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path]
) -> None:
    """The protocol as 0.24.0 has it asks for another patch of the same model file."""
    folder = generated("0.25.0", "qwen2_moe")
    old = find_source(version="0.24.0").read(f"{MODELS}/interfaces.py")
    changes = {
        f"{MODELS}/interfaces.py": lambda _: old,
        "PKG-INFO": lambda text: text.replace("Version: 0.25.0", "Version: 0.25.9"),
    }
    source("0.25.0", "qwen2_moe", changes)
    done = tool("check", "--source", "src", "--json")
    (target,) = done.json["targets"]
    assert (done.code, done.json["vllm"]) == (1, "0.25.9")
    assert target["state"] == "a file the patch depends on changed"
    assert target["findings"][0]["message"] == f"{MODELS}/interfaces.py"
    assert target["files"][0]["path"] == str(folder.relative_to(folder.parents[1]) / "qwen2_moe.py")
    assert "+    def set_eplb_state(" in target["files"][0]["result_diff"]


def test_a_patch_that_upstream_took(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path], result: Any
) -> None:
    folder = generated("0.10.0", "qwen2_moe", "qwen3_moe")
    taken = result("0.10.0", "qwen2_moe").files[0].patched
    source("0.10.0", "qwen2_moe", {QWEN2: lambda _: taken})
    check = ("check", "qwen2_moe", "--source", "src")
    done = tool(*check, "--json")
    assert (done.code, done.states) == (1, {"qwen2_moe": "upstream now sound, retire the patch"})
    fixed = tool(*check, "--fix")
    assert (fixed.code, "retired" in fixed.out) == (0, True)
    assert sorted(p.name for p in folder.iterdir()) == ["manifest.toml", "qwen3_moe.py"]
    assert tool(*check, "--json").states == {"qwen2_moe": "in sync"}


def test_a_patch_of_an_older_release_that_upstream_took(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path], result: Any
) -> None:
    """Afterwards an empty folder of this release says that nothing is needed."""
    older = generated("0.9.2", "qwen2_moe")
    taken = result("0.10.0", "qwen2_moe").files[0].patched
    source("0.10.0", "qwen2_moe", {QWEN2: lambda _: taken})
    check = ("check", "--source", "src", "--json")
    assert tool(*check).states == {"qwen2_moe": "upstream now sound, retire the patch"}
    assert tool(*check, "--fix").code == 0
    assert [p.name for p in (older.parent / "0.10.0").iterdir()] == ["manifest.toml"]
    assert (older / "qwen2_moe.py").exists()
    assert (tool(*check).code, tool(*check).states) == (0, {"qwen2_moe": "in sync"})
    assert tool(*check, "qwen2_moe").states == {"qwen2_moe": "in sync"}


def test_edited_by_hand(tool: Any, generated: Callable[..., Path]) -> None:
    folder = generated("0.24.0", "qwen2_moe")
    file = folder / "qwen2_moe.py"
    lines = file.read_text().splitlines(keepends=True)
    lines.insert(99, "# mine\n")
    file.write_text("".join(lines))
    done = tool("check", "--vllm", "0.24.0", "--json")
    (target,) = done.json["targets"]
    assert (done.code, target["state"]) == (3, "edited by hand")
    assert target["files"][0]["line"] == 100
    assert "\n-# mine\n" in target["files"][0]["result_diff"]
    # whatever else is the matter, and --fix leaves it alone
    done = tool("check", "--vllm", "0.25.0", "--json", "--fix")
    (target,) = done.json["targets"]
    states = [finding["state"] for finding in target["findings"]]
    assert (done.code, states) == (3, ["edited by hand", "upstream changed, still patches"])
    assert file.read_text() == "".join(lines)
    assert not (folder.parent / "0.25.0").exists()


def test_line_ends_that_git_changed(tool: Any, generated: Callable[..., Path]) -> None:
    file = generated("0.24.0", "qwen2_moe") / "qwen2_moe.py"
    file.write_bytes(file.read_bytes().replace(b"\n", b"\r\n"))
    done = tool("check", "--vllm", "0.24.0")
    assert done.code == 3
    assert "other line ends" in done.out


@pytest.mark.parametrize("same_release", [True, False])
def test_made_by_another_version_of_this_tool(
    tool: Any, generated: Callable[..., Path], same_release: bool
) -> None:
    """The manifest and the header of a folder as that version would have left them."""
    folder = generated("0.31.0", "qwen2_moe")
    made = made_by_another(folder, lambda text: text)
    done = tool("check", "--vllm", "0.31.0" if same_release else "0.32.0", "--json")
    (target,) = done.json["targets"]
    assert (done.code, target["state"]) == (1, "made by another version of this tool")
    assert target["made_by_tool"] == "0.0.9"
    assert (folder / "qwen2_moe.py").read_text() == made


def test_another_version_of_this_tool_that_wrote_something_else(
    tool: Any, generated: Callable[..., Path]
) -> None:
    folder = generated("0.31.0", "qwen2_moe")
    made_by_another(folder, lambda text: text + "\n# of old\n")
    done = tool("check", "--vllm", "0.32.0", "--json")
    (target,) = done.json["targets"]
    assert [f["state"] for f in target["findings"]] == ["made by another version of this tool"]
    assert "\n-# of old\n" in target["files"][0]["result_diff"]


def made_by_another(folder: Path, change: Callable[[str], str]) -> str:
    from eplb_codegen import __version__
    from eplb_codegen.output.writer import digest

    file, manifest = folder / "qwen2_moe.py", folder / "manifest.toml"
    before = file.read_text()
    after = change(before.replace(f"eplb-codegen {__version__}:", "eplb-codegen 0.0.9:"))
    file.write_text(after)
    text = manifest.read_text().replace(digest(before), digest(after))
    manifest.write_text(text.replace(f'tool_version = "{__version__}"', 'tool_version = "0.0.9"'))
    return after


@pytest.mark.parametrize("lost", ["mllama4.py", "manifest.toml"])
def test_something_lost_is_made_again(tool: Any, generated: Callable[..., Path], lost: str) -> None:
    folder = generated("0.10.0", "llama4")
    before = {p.name: p.read_bytes() for p in folder.iterdir()}
    (folder / lost).unlink()
    done = tool("check", "--vllm", "0.10.0", "--json")
    assert (done.code, done.states) == (1, {"llama4": "not all there"})
    assert lost in done.json["targets"][0]["findings"][0]["message"]
    assert tool("check", "--vllm", "0.10.0", "--fix").code == 0
    assert {p.name: p.read_bytes() for p in folder.iterdir()} == before


def test_a_target_that_was_not_generated(tool: Any, generated: Callable[..., Path]) -> None:
    folder = generated("0.10.0", "qwen2_moe")
    done = tool("check", "qwen3_moe", "--vllm", "0.10.0", "--json")
    assert (done.code, done.states) == (1, {"qwen3_moe": "not all there"})
    for name in ("qwen3_vl_moe", "misspelt"):
        done = tool("check", name, "--vllm", "0.10.0", "--json")
        assert (done.code, done.out) == (2, "")
        assert f"{name} is generated nowhere in generated, and" in done.err
    (folder / "qwen3_moe.py").write_text("# mine\n")
    done = tool("check", "qwen3_moe", "--vllm", "0.10.0", "--json")
    assert (done.code, done.states) == (3, {"qwen3_moe": "edited by hand"})


def test_upstream_of_a_checkout_is_not_at_hand(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path]
) -> None:
    """What changes in the generated file is shown all the same."""
    source("0.24.0", "qwen2_moe", {QWEN2: lambda text: text + "# of a checkout\n"})
    assert tool("apply", "qwen2_moe", "--source", "src").code == 0
    done = tool("check", "--vllm", "0.25.0", "--json")
    (file,) = done.json["targets"][0]["files"]
    assert done.states == {"qwen2_moe": "upstream changed, still patches"}
    assert file["upstream_diff"] is None
    assert "\n-# of a checkout\n" in file["result_diff"]
