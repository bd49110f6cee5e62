"""`check` as a command: what it compares, --fix, annotations, and what CI is given."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.output import manifest

ROOT = Path(__file__).parents[2]
MODELS = "vllm/model_executor/models"
QWEN2 = f"{MODELS}/qwen2_moe.py"


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("--vllm 0.10.0", "there is no folder generated"),
        ("--vllm 0.10.0 --out empty", "nothing was generated into empty"),
        ("--vllm 0.10.0 --out damaged", "damaged/0.9.2/manifest.toml is damaged"),
        ("--vllm 0.10.0 --out outside", "outside/0.10.0/manifest.toml is damaged"),
        ("--vllm nonsense", "'nonsense' is not a version"),
        ("--source empty", "is not vLLM"),
        ("../x --vllm 0.10.0 --out empty", "'../x' is no target"),
        ("--format html", "invalid choice"),
        ("--json --format github --vllm 0.10.0", "not allowed with"),
        ("--vllm latest", "."),
    ],
)
def test_usage_and_environment(tool: Any, tmp_path: Path, arguments: str, says: str) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "damaged/0.9.2").mkdir(parents=True)
    (tmp_path / "damaged/0.9.2/manifest.toml").write_text("format = 1")
    (tmp_path / "outside/0.10.0").mkdir(parents=True)
    entry = '[families.x]\ntool_version = "1"\ndepends = {}\n[families.x.files."../y.py"]\n'
    hashes = 'upstream = "x"\nupstream_sha256 = "x"\nsha256 = "x"\narchitectures = {}\n'
    (tmp_path / "outside/0.10.0/manifest.toml").write_text(
        f'format = 1\nvllm = "0.10.0"\n{entry}{hashes}'
    )
    offline = {"PIP_CONFIG_FILE": os.devnull, "PIP_INDEX_URL": "http://127.0.0.1:9/simple/"}
    done = tool("check", *arguments.split(), **offline)
    assert (done.code, done.out) == (2, ""), done
    assert says in done.err


def test_targets_and_what_they_are_compared_with(
    tool: Any, generated: Callable[..., Path], tmp_path: Path
) -> None:
    generated("0.9.2", "qwen2_moe", "qwen3_moe")
    generated("0.10.0", "qwen2_moe")
    generated("0.33.0", "qwen2_moe")
    (tmp_path / "generated/notes").mkdir()

    def compared(version: str, *names: str) -> dict[str, str]:
        targets = tool("check", *names, "--vllm", version, "--json").json["targets"]
        return {t["family"]: t["made_from_vllm"] for t in targets}

    # the nearest older folder that lists a target, else the newest
    assert compared("0.10.1") == {"qwen2_moe": "0.10.0", "qwen3_moe": "0.9.2"}
    # once there is one for this vLLM, what it lacks of the nearest older one is still told
    assert compared("0.10.0") == {"qwen2_moe": "0.10.0", "qwen3_moe": "0.9.2"}
    assert compared("0.10.0", "qwen3_moe") == {"qwen3_moe": "0.9.2"}


def test_what_a_fix_has_left_undone_is_told_again(
    tool: Any, generated: Callable[..., Path], tmp_path: Path
) -> None:
    older = generated("0.31.0", "qwen2_moe", "qwen3_moe")
    check = ("check", "--vllm", "0.32.0")
    # a folder that a killed run left empty counts for nothing
    (tmp_path / "generated/0.32.0").mkdir()
    assert tool(*check, "--json").states["qwen2_moe"] == "in sync"
    assert tool("check", "--fix", "qwen2_moe", "--vllm", "0.32.0").code == 0
    done = tool(*check, "--json")
    assert done.code == 1
    assert done.states == {"qwen2_moe": "in sync", "qwen3_moe": "not all there"}
    finding = done.json["targets"][1]["findings"][0]["message"]
    assert finding == "generated/0.32.0 does not have it, as generated/0.31.0 does"
    edited = older / "qwen3_moe.py"
    text = edited.read_text()
    edited.write_text(text + "# mine\n")
    assert [tool(*check, "--fix").code for _ in range(2)] == [3, 3]
    edited.write_text(text)
    assert [tool(*check, *fix).code for fix in (["--fix"], [])] == [0, 0]


def test_an_empty_folder_is_no_answer(tool: Any, tmp_path: Path) -> None:
    (tmp_path / "generated/0.10.0").mkdir(parents=True)
    for fix in ((), ("--fix",)):
        done = tool("check", "--vllm", "0.10.0", *fix)
        assert (done.code, done.out) == (2, "")
        assert "nothing was generated into generated" in done.err


@pytest.mark.parametrize(
    "field, value",
    [
        ("tool_version", r'"0.1\\n::error title=x::y"'),
        ("upstream", r'"x\\n::stop-commands::y"'),
        ("upstream", "5"),
        ("upstream_sha256", "[1]"),
        ("sha256", "true"),
        ("Qwen2MoeForCausalLM", "5"),
    ],
)
def test_a_manifest_that_is_not_ours(
    tool: Any, generated: Callable[..., Path], field: str, value: str
) -> None:
    """Whatever comes of it would stand in the log of a workflow."""
    path = generated("0.10.0", "qwen2_moe") / "manifest.toml"
    text, count = re.subn(rf"^{field} = .*$", f"{field} = {value}", path.read_text(), flags=re.M)
    assert count == 1
    path.write_text(text)
    done = tool("check", "--vllm", "0.10.0", "--format", "github")
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("eplb-codegen: generated/0.10.0/manifest.toml is damaged\n")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_a_folder_without_permission(tool: Any, generated: Callable[..., Path]) -> None:
    folder = generated("0.10.0", "qwen2_moe")
    folder.chmod(0)
    try:
        done = tool("check", "--vllm", "0.10.0")
    finally:
        folder.chmod(0o755)
    assert (done.code, done.out) == (2, "")
    assert "Permission denied" in done.err


def test_a_name_that_is_too_long(tool: Any) -> None:
    done = tool("check", "--vllm", "0.10.0", "--out", "x" * 300)
    assert (done.code, done.out) == (2, "")
    assert "File name too long" in done.err


def test_fix_brings_everything_to_this_release(
    tool: Any, generated: Callable[..., Path], result: Callable[..., Any]
) -> None:
    """What is in sync with an older folder too: a server takes all from the one of its release."""
    older = generated("0.31.0", "qwen2_moe", "qwen3_moe")
    before = {p.name: p.read_bytes() for p in older.iterdir()}
    done = tool("check", "--fix", "--vllm", "0.32.0")
    assert done.code == 0, done
    assert "qwen2_moe: in sync" in done.out
    assert done.out.count("    written: generated/0.32.0/") == 2
    folder = older.parent / "0.32.0"
    for name in ("qwen2_moe", "qwen3_moe"):
        assert (folder / f"{name}.py").read_text() == result("0.32.0", name).files[0].output
    assert sorted(manifest.load(folder, "0.32.0").families) == ["qwen2_moe", "qwen3_moe"]
    assert {p.name: p.read_bytes() for p in older.iterdir()} == before
    again = tool("check", "--fix", "--vllm", "0.32.0")
    assert (again.code, again.out.count("in sync\n    unchanged")) == (0, 2)


def test_fix_leaves_what_needs_a_person_and_makes_the_rest(
    tool: Any, generated: Callable[..., Path]
) -> None:
    folder = generated("0.10.0", "qwen2_moe", "qwen3_moe")
    edited, lost = folder / "qwen2_moe.py", folder / "qwen3_moe.py"
    edited.write_text(edited.read_text() + "# mine\n")
    content = lost.read_bytes()
    lost.unlink()
    done = tool("check", "--fix", "--vllm", "0.10.0")
    assert done.code == 3
    assert edited.read_text().endswith("# mine\n")
    assert lost.read_bytes() == content


ANNOTATION = re.compile(r"^::error file=([^,:]+),line=(\d+),title=([^,:]+)::(.*)$", re.M)


def test_annotations(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path], tmp_path: Path
) -> None:
    folder = generated("0.10.0", "qwen2_moe", "llama4")
    source("0.10.0", "qwen2_moe")
    source("0.10.0", "llama4", {f"{MODELS}/mllama4.py": hostile})
    (folder / "qwen2_moe.py").unlink()
    # as in a job: the folder is below the root of the repository, the step runs in it
    done = tool("check", "--source", "src", "--format", "github", GITHUB_WORKSPACE=str(tmp_path))
    assert done.code == 1
    found = {unescape(m[1]): m for m in ANNOTATION.finditer(done.out)}
    assert sorted(found) == ["generated/0.10.0/mllama4.py", "generated/0.10.0/qwen2_moe.py"]
    _, path, line, title, message = (found["generated/0.10.0/mllama4.py"][i] for i in range(5))
    assert title == "eplb-codegen%3A llama4%3A upstream changed%2C still patches"
    assert "to make it anew: eplb-codegen check --fix llama4 --source src" in unescape(message)
    assert "\n+::error::100%" in unescape(message) and "100%25" in message
    text = (tmp_path / path).read_text().splitlines()[int(line) - 1]
    assert text.startswith("class Mllama4ProcessingInfo")
    # what upstream writes is no command
    commands = re.findall(r"^\s*::([\w-]+)", outside_stops(done.out), re.M)
    assert sorted(set(commands)) == ["endgroup", "error", "group"]
    assert commands.count("error") == 2
    assert "\n+ ::set-env" in done.out


def hostile(text: str) -> str:
    """A file with lines that a runner would take for commands, before one of its classes."""
    lines = '"""\n::error::100%\n ::set-env name=X::y\n"""\n\n\n'
    return text.replace("class Mllama4ProcessingInfo", f"{lines}class Mllama4ProcessingInfo")


def unescape(text: str) -> str:
    for code, character in (("%0A", "\n"), ("%0D", "\r"), ("%3A", ":"), ("%2C", ","), ("%25", "%")):
        text = text.replace(code, character)
    return text


def outside_stops(log: str) -> str:
    """A log without what stands between `::stop-commands::` and its end."""
    return re.sub(r"^::stop-commands::(\w+)\n.*?^::\1::$", "", log, flags=re.M | re.S)


def test_a_job_below_the_root_of_its_repository(
    tool: Any, generated: Callable[..., Path], tmp_path: Path
) -> None:
    generated("0.24.0", "qwen2_moe")
    done = tool(
        *("check", "--vllm", "0.25.0", "--format", "github"), GITHUB_WORKSPACE=str(tmp_path.parent)
    )
    assert f"::error file={tmp_path.name}/generated/0.24.0/qwen2_moe.py,line=" in done.out


def test_the_action_runs_check(generated: Callable[..., Path], tmp_path: Path) -> None:
    """Its script in bash, with the tool in the place where the script installs it."""
    generated("0.24.0", "qwen2_moe")
    bin = tmp_path / "runner/eplb-codegen/bin"
    bin.mkdir(parents=True)
    (bin / "eplb-codegen").write_text(f'#!/bin/sh\nexec {sys.executable} -m eplb_codegen "$@"\n')
    (bin / "eplb-codegen").chmod(0o755)
    action = (ROOT / "action.yml").read_text()
    script = textwrap.dedent(action.partition("run: |\n")[2])
    wanted = set(re.findall(r"^        (\w+): \$\{\{", action, re.M))
    env = {"TARGETS": "qwen2_moe", "VLLM": "0.25.0", "SOURCE": "", "OUT": "generated"}
    env |= {"FORMAT": "github", "ACTION": str(ROOT)}
    assert wanted == set(env)
    output = tmp_path / "output"
    for changes, code in (
        ({}, 1),
        ({"VLLM": "0.24.0", "TARGETS": ""}, 0),
        ({"TARGETS": "$(touch x) `touch y`"}, 2),
    ):
        done = subprocess.run(
            ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", script],
            cwd=tmp_path,
            env={
                **os.environ,
                **env,
                **changes,
                "RUNNER_TEMP": str(tmp_path / "runner"),
                "GITHUB_OUTPUT": str(output),
            },
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == code, done
        assert output.read_text().splitlines()[-1] == f"exit-code={code}"
        assert ("::error file=generated/0.24.0/qwen2_moe.py" in done.stdout) == (code == 1)
    assert not (tmp_path / "x").exists() and not (tmp_path / "y").exists()


def test_no_code_of_upstream_is_run_and_torch_is_not_imported(
    tool: Any, generated: Callable[..., Path], source: Callable[..., Path]
) -> None:
    generated("0.10.0", "qwen2_moe")
    ends = "raise SystemExit('upstream was run')\n"
    root = source("0.10.0", "qwen2_moe", {QWEN2: lambda text: ends + text})
    (root / "vllm/__init__.py").write_text(ends)
    code = (
        "import sys\nclass No:\n"
        "    def find_spec(self, name, *_):\n"
        "        assert name.partition('.')[0] not in ('vllm', 'torch'), name\n"
        "sys.meta_path.insert(0, No())"
    )
    done = tool("check", "--source", "src", code=code)
    assert done.code == 1, done
    assert "upstream changed, still patches" in done.out


def test_the_hook_names_the_command() -> None:
    hooks = (ROOT / ".pre-commit-hooks.yaml").read_text()
    assert "entry: eplb-codegen check\n" in hooks and "pass_filenames: false\n" in hooks
    (pattern,) = re.findall(r"files: (.*)", hooks)
    for path in ("generated/0.10.0/manifest.toml", "a/generated/0.10.0/qwen2_moe.py"):
        assert re.search(pattern, path)
    assert not re.search(pattern, "regenerated/0.10.0/x.py")
