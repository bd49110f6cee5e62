"""Commands, options, exit codes and messages."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

OLD, NEW = "0.10.0", "0.33.0"


@pytest.mark.parametrize(
    "arguments, code, says",
    [
        pytest.param("", 2, "COMMAND.*--help", id="no command"),
        pytest.param("aply x", 2, "aply.*--help", id="unknown command"),
        pytest.param("apply", 2, "name targets, or give --all", id="no target"),
        pytest.param("apply --all qwen2_moe", 2, "--all", id="--all and a target"),
        pytest.param("apply --bogus", 2, "--bogus.*--help", id="unknown option"),
        pytest.param("list --force", 2, "--force.*--help", id="option of another command"),
        pytest.param("apply --out", 2, "--out.*--help", id="option without its value"),
        pytest.param("list --vllm 0.10.0 --source .", 2, "not allowed with", id="two sources"),
        pytest.param("list --vllm newest", 2, "'newest' is not a version", id="no version"),
        pytest.param("list --source nowhere", 2, "nowhere does not exist", id="no such folder"),
        pytest.param("list --source .", 2, "is not vLLM", id="folder without vLLM"),
        pytest.param("apply ../x --vllm 0.10.0", 2, "'../x' is no target", id="path as target"),
        pytest.param("apply x-y --vllm 0.10.0", 2, "'x-y' is no target", id="no module name"),
        pytest.param("--help", 0, "list.*apply.*Exit codes", id="help"),
        pytest.param("apply --help", 0, "--diff.*--force", id="help of a command"),
        pytest.param("--version", 0, r"eplb-codegen \d", id="version"),
    ],
)
def test_usage(run: Any, arguments: str, code: int, says: str) -> None:
    done = run(*arguments.split())
    assert re.search(says, done.err if code else done.out, re.DOTALL), done
    assert done.code == code
    assert not (done.out if code else done.err)
    assert list(run.folder.iterdir()) == []


@pytest.mark.parametrize(
    "targets, version, code, says, written",
    [
        ("qwen2_moe", OLD, 0, r"qwen2_moe: written: qwen2_moe\.py", ["qwen2_moe"]),
        ("qwen2_moe.py", OLD, 0, r"qwen2_moe: written: qwen2_moe\.py", ["qwen2_moe"]),
        ("llama4", OLD, 0, r"written: llama4\.py, mllama4\.py", ["llama4", "mllama4"]),
        ("qwen3_moe", NEW, 0, r"qwen3_moe: written: qwen3_moe\.py", ["qwen3_moe"]),
        ("--all", OLD, 0, "file absent", ["llama4", "mllama4", "qwen2_moe", "qwen3_moe"]),
        (
            "--all",
            NEW,
            0,
            "written",
            ["llama4", "mllama4", "qwen2_moe", "qwen3_moe", "qwen3_vl_moe"],
        ),
        ("qwen3_vl_moe", OLD, 3, r"models/qwen3_vl_moe\.py is not there", []),
        ("no_such_model", OLD, 3, r"models/no_such_model\.py is not there", []),
        ("llama", OLD, 3, r"models/llama\.py:\d+: .*experts.*Dense models", []),
        ("interfaces", OLD, 3, r"interfaces\.py: vLLM's registry serves no class", []),
        ("llama qwen2_moe", OLD, 3, "qwen2_moe: written.*llama: refused", ["qwen2_moe"]),
        ("qwen2_moe qwen2_moe", OLD, 0, "qwen2_moe: written", ["qwen2_moe"]),
    ],
)
def test_apply(
    run: Any, targets: str, version: str, code: int, says: str, written: list[str]
) -> None:
    done = run("apply", *targets.split(), "--vllm", version)
    assert re.search(says, done.text, re.DOTALL), done
    assert done.code == code
    assert bool(done.err) == bool(code)
    folder = run.folder / "generated" / version
    assert sorted(p.stem for p in folder.glob("*.py")) == written
    assert (folder / "manifest.toml").exists() == bool(written)
    assert bool(written) == (run.folder / "generated").exists()


def test_apply_again_says_unchanged(run: Any) -> None:
    assert "written" in run("apply", "qwen2_moe", "--vllm", OLD).out
    again = run("apply", "qwen2_moe", "--vllm", OLD)
    assert again.code == 0
    assert "qwen2_moe: unchanged: qwen2_moe.py" in again.out


def test_a_name_that_is_too_long_for_a_file(run: Any) -> None:
    done = run("apply", "a" * 300, "--vllm", OLD)
    assert done.code in (2, 3)
    assert "aaa" in done.err


def test_a_file_of_a_family_does_not_push_the_family_aside(run: Any) -> None:
    run("apply", "llama4", "llama4.py", "--vllm", OLD)
    folder = run.folder / "generated" / OLD
    assert sorted(p.name for p in folder.glob("*.py")) == ["llama4.py", "mllama4.py"]


def test_the_worst_of_all_targets_wins(run: Any) -> None:
    run("apply", "qwen2_moe", "--vllm", OLD)
    edited = run.folder / "generated" / OLD / "qwen2_moe.py"
    edited.write_bytes(edited.read_bytes() + b"# mine\n")
    for targets, code in {"qwen2_moe qwen3_moe": 1, "llama qwen2_moe qwen3_moe": 3}.items():
        done = run("apply", *targets.split(), "--vllm", OLD)
        assert done.code == code
        assert "qwen3_moe: " in done.out  # written the first time
        assert "qwen2_moe.py was edited by hand" in done.err


def test_list(run: Any) -> None:
    done = run("list", "--vllm", OLD)
    assert (done.code, done.err) == (0, "")
    first, *lines = done.out.splitlines()
    assert first == f"vLLM {OLD} from the package index"
    heading = lines.index("quantisation methods of experts, of which none is a target:")
    states = {words[0]: " ".join(words[1:3]) for words in map(str.split, lines[:heading])}
    assert states.pop("qwen3_vl_moe") == "file absent"
    assert states.pop("compressed_tensors_wna16") == "refuses EPLB"
    assert states == dict.fromkeys(("qwen2_moe", "qwen3_moe", "llama4"), "added by")
    methods = lines[heading + 1 :]
    assert any(re.match(r"  EPLB runs with it: .*Fp8MoEMethod.* \(.*layer", m) for m in methods)
    assert any(re.match(r"  vLLM refuses EPLB with it: .*AWQMoEMethod", m) for m in methods)
    assert not any("WNA16MoEMethod" in m for m in methods)
    assert list(run.folder.iterdir()) == []


WNA16 = "compressed_tensors_wna16"


@pytest.mark.parametrize(
    "version, told, code",
    [
        ("0.11.0", f"{WNA16}: left as it is: vLLM refuses EPLB with it: .* only", 3),
        ("0.11.2", f"{WNA16}: written: compressed_tensors_moe.py", 0),
        ("0.12.0", None, 0),
    ],
)
def test_a_family_brings_its_quantisation_method_along(
    run: Any, version: str, told: str | None, code: int
) -> None:
    done = run("apply", "qwen3_vl_moe", "--vllm", version)
    assert (done.code, done.err) == (0, "")
    assert "qwen3_vl_moe: written: qwen3_vl_moe.py" in done.out
    assert (WNA16 in done.out) == (told is not None)
    assert told is None or re.search(told, done.out)
    folder = run.folder / "generated" / version
    assert (folder / "compressed_tensors_moe.py").exists() == (version == "0.11.2")
    # asked for by its own name, what cannot be had is a refusal
    assert run("apply", WNA16, "--vllm", version).code == code
    shown = run("apply", "qwen3_vl_moe", "--vllm", version, "--diff")
    assert shown.code == 1
    assert ("compressed_tensors_moe.py\n+++ b/" in shown.out) == (version == "0.11.2")


def test_list_of_what_is_not_recognised(run: Any) -> None:
    done = run("list", "llama", "qwen2_moe", "--vllm", OLD)
    assert done.code == 3
    assert re.search(r"llama +not recognised +.*llama\.py:\d+: .*experts", done.out)
    assert re.search(r"qwen2_moe +added by us", done.out)


def test_list_for_programs(run: Any) -> None:
    done = run("list", "--json", "--vllm", NEW)
    document = json.loads(done.out)
    assert (done.code, done.err, document["vllm"]) == (0, "", NEW)
    targets = {t["family"]: t for t in document["targets"]}
    assert {name: (t["state"], t["files"]) for name, t in targets.items()} == {
        "qwen2_moe": ("added by us", ["qwen2_moe.py"]),
        "qwen3_moe": ("native but faulty", ["qwen3_moe.py"]),
        "qwen3_vl_moe": ("native but faulty", ["qwen3_vl_moe.py"]),
        "llama4": ("native but faulty", ["llama4.py", "mllama4.py"]),
        "compressed_tensors_wna16": ("native and sound", []),
    }
    methods = {m["name"]: m for m in document["methods"]}
    assert methods["Fp8MoEMethod"]["supports"] == "yes"
    assert methods["AutoAWQMoEMethod"]["supports"] == "no"
    assert all(t["reason"] for t in targets.values())
    assert targets["qwen2_moe"]["faults"] == []
    first = targets["qwen3_moe"]["faults"][0]
    assert (first["name"], list(first)) == ("fused-replicas", ["name", "what", "where", "effect"])
    assert first["where"].startswith("vllm/model_executor/models/qwen3_moe.py:")


def test_list_tells_the_four_states_apart(run: Any, checkout: Callable[..., Path]) -> None:
    """And of a faulty one what is wrong with it, where, a line for each fault."""
    models = "vllm/model_executor/models"
    checkout("0.24.0", changes={f"{models}/qwen3_vl_moe.py": None})
    broken = (run.folder / "src" / models / "llama4.py").read_text()
    broken = broken.replace("[\n                            local_expert_indices\n", "[(\n", 1)
    (run.folder / "src" / models / "llama4.py").write_text(broken)
    done = run("list", "--source", "src")
    lines = done.out.splitlines()[1:]
    states = [line for line in lines if not line.startswith("     ")]
    assert [re.split("  +", line.strip())[:2] for line in states[:3]] == [
        ["qwen2_moe", "added by us"],
        ["qwen3_moe", "native but faulty"],
        ["qwen3_vl_moe", "file absent"],
    ]
    assert done.code == 3 and re.match(r" +llama4 +not recognised +.*llama4\.py", states[3])
    told = [line.split()[0] for line in lines if line.startswith("     ")]
    assert told[:4] == ["second-replica:", "empty-stage:", "other-stages:", "doubled-weights:"]
    assert re.search(r"other-stages: .*\(qwen3_moe\.py:\d+\)", done.out)


def test_apply_for_programs(run: Any) -> None:
    done = run("apply", "llama4", "llama", "--json", "--vllm", OLD, "--out", "here")
    document = json.loads(done.out)
    assert (done.code, document["folder"]) == (3, f"here/{OLD}")
    good, bad = document["targets"]
    assert (good["action"], good["exit"], good["diff"]) == ("written", 0, None)
    assert good["files"] == ["llama4.py", "mllama4.py"]
    assert (bad["action"], bad["exit"]) == ("refused", 3)
    assert "llama.py:" in bad["message"]
    assert (run.folder / "here" / OLD / "mllama4.py").exists()


def test_the_version_names_the_folder_of_a_checkout(
    run: Any, checkout: Callable[..., Path]
) -> None:
    checkout()
    done = run("apply", "qwen2_moe", "--source", "src")
    assert done.code == 0
    assert f"checkout {run.folder / 'src'} -> generated/{OLD}" in done.out
    assert (run.folder / "generated" / OLD / "qwen2_moe.py").exists()


def test_the_installed_vllm_is_used_and_never_imported(
    run: Any, checkout: Callable[..., Path]
) -> None:
    site = checkout(name="site")
    (site / "torch.py").write_text("raise SystemExit('torch was imported')\n")
    env = {"PYTHONPATH": os.pathsep.join([str(site), os.environ.get("PYTHONPATH", "")])}
    for name in ("vllm", "torch"):  # a control: they do end a process that imports them
        assert f"{name} was imported" in run("list", code=f"import {name}", env=env).err
    assert run("list", env=env).code == 0
    done = run("apply", "--all", env=env)
    assert (done.code, done.err) == (0, "")
    assert len(list((run.folder / "generated" / OLD).glob("*.py"))) == 4


def test_no_network(run: Any) -> None:
    env = {
        **{name: "" for name in os.environ if name.startswith("PIP_")},
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_INDEX_URL": "http://127.0.0.1:9/simple/",
        "EPLB_CODEGEN_CACHE": str(run.folder / "cache"),
    }
    done = run("apply", "--all", "--vllm", "0.10.0", env=env)
    assert done.code == 2
    assert "127.0.0.1" in done.err
    assert not (run.folder / "generated").exists()
