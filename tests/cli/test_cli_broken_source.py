"""Sources that are damaged, incomplete or odd: a message and nothing written, or the right file."""

from __future__ import annotations

import ast
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

MODELS = "vllm/model_executor/models"
VICTIM = f"{MODELS}/qwen3_moe.py"


def chained(data: bytes) -> bytes:
    """A chain of attributes as deep as Python reads."""
    return data.replace(
        b"self.experts = ", b"x = self" + b".a" * 970 + b"\n        self.experts = "
    )


@pytest.mark.parametrize(
    "change, code, says",
    [
        pytest.param(lambda d: d + b"def f(:\n", 3, r"moe\.py:\d+: not valid Python", id="syntax"),
        pytest.param(lambda d: d + b"\0", 3, r"qwen3_moe\.py:\d+: not valid Python", id="NUL"),
        pytest.param(lambda d: d + b"# \xff\n", 2, r"qwen3_moe\.py is not UTF-8", id="not UTF-8"),
        pytest.param(lambda d: b"", 3, r"class Qwen3MoeForCausalLM.*not found", id="empty"),
        pytest.param(
            lambda d: d[: d.index(b"self.experts = FusedMoE(") + 60], 3, r"moe\.py:\d+", id="cut"
        ),
        pytest.param(
            lambda d: d[: d.index(b"class Qwen3MoeForCausalLM")],
            *(3, r"qwen3_moe\.py: class Qwen3MoeForCausalLM.*not found"),
            id="without its last class",
        ),
        pytest.param(lambda d: d + b"#" * 4_000_001, 2, r"moe\.py is larger than 4 MB", id="large"),
        pytest.param(lambda d: d + b"x = " + b"(" * 9999 + b"1" + b")" * 9999, 3, "", id="nested"),
        pytest.param(lambda d: d + b"x = " + b"-" * 99_999 + b"1\n", 3, "", id="long expression"),
        pytest.param(chained, 3, "", id="deep chain"),
        pytest.param(None, 3, r"qwen3_moe\.py is not there", id="missing"),
    ],
)
def test_a_broken_model_file_is_refused(
    run: Any, checkout: Callable[..., Path], change: object, code: int, says: str
) -> None:
    checkout(changes={VICTIM: change})
    done = run("apply", "qwen3_moe", "--source", "src")
    assert done.code == code, done
    assert re.search(says, done.err) and "qwen3_moe" in done.err, done
    assert [p.name for p in run.folder.iterdir()] == ["src"]


@pytest.mark.parametrize("kind", ["folder", "dangling link", "link to itself", "pipe"])
def test_something_else_in_the_place_of_a_model_file(
    run: Any, checkout: Callable[..., Path], kind: str
) -> None:
    file = checkout(changes={VICTIM: None}) / VICTIM
    if kind == "folder":
        file.mkdir()
    elif kind == "pipe":
        os.mkfifo(file)
    else:
        file.symlink_to("qwen3_moe.py" if kind == "link to itself" else "nowhere")
    done = run("apply", "qwen3_moe", "--source", "src")
    assert done.code in (2, 3)
    assert "qwen3_moe.py" in done.err
    assert not (run.folder / "generated").exists()


@pytest.mark.parametrize(
    "path, change, says",
    [
        (f"{MODELS}/registry.py", None, "registry.py not found"),
        (f"{MODELS}/registry.py", b"", "registry serves no class from qwen3_moe.py"),
        (f"{MODELS}/registry.py", b"def f(:\n", r"registry\.py:1: not valid Python"),
        (f"{MODELS}/interfaces.py", None, "vllm.model_executor.models.interfaces"),
        (f"{MODELS}/interfaces.py", b"", "interfaces.py: class MixtureOfExperts not found"),
        (f"{MODELS}/interfaces.py", b"\xff", "interfaces.py is not UTF-8"),
        (
            f"{MODELS}/interfaces.py",
            lambda d: d.replace(b"num_moe_layers: int", b"num_moe_layers: int\n    novelty: int"),
            "members that are not known: novelty",
        ),
        (
            f"{MODELS}/interfaces.py",
            lambda d: d.replace(b"def set_eplb_state", b"def set_state"),
            r"set_eplb_state|set_state",
        ),
        (
            "vllm/distributed/parallel_state.py",
            lambda d: d.replace(b"get_ep_group", b"get_group"),
            "vllm.distributed has no get_ep_group",
        ),
        ("vllm/config.py", None, "vllm.config"),
        ("vllm/config.py", lambda d: d.replace(b"enable_eplb", b"eplb"), r"config\.py:\d+: .*eplb"),
        (
            "vllm/config.py",
            lambda d: d.replace(b"num_redundant_experts", b"redundancy"),
            r"config\.py:\d+: ParallelConfig has no num_redundant_experts",
        ),
        (
            "vllm/model_executor/layers/fused_moe/layer.py",
            None,
            r"qwen3_moe\.py:\d+: .*no (MoE block|experts)",
        ),
        (
            "vllm/model_executor/layers/fused_moe/layer.py",
            lambda d: d.replace(b"def get_expert_weights", b"def expert_weights"),
            "no get_expert_weights",
        ),
    ],
)
def test_a_broken_file_that_the_patch_depends_on_is_refused(
    run: Any, checkout: Callable[..., Path], path: str, change: object, says: str
) -> None:
    checkout(changes={path: change})
    done = run("apply", "qwen3_moe", "--source", "src")
    assert done.code in (2, 3), done
    assert re.search(says, done.err), done
    assert not (run.folder / "generated").exists()


def test_what_one_target_meets_does_not_hide_the_others(
    run: Any, checkout: Callable[..., Path]
) -> None:
    checkout(changes={VICTIM: lambda data: data + b"# \xff\n"})
    done = run("apply", "qwen2_moe", "qwen3_moe", "llama4", "--source", "src")
    assert done.code == 2
    assert "qwen3_moe.py is not UTF-8" in done.err
    assert "qwen2_moe: written" in done.out
    assert "llama4: written" in done.out


def test_list_shows_the_others_beside_an_unreadable_file(
    run: Any, checkout: Callable[..., Path]
) -> None:
    checkout(changes={VICTIM: lambda data: data + b"# \xff\n"})
    done = run("list", "--source", "src")
    assert done.code in (2, 3)
    assert "qwen3_moe.py is not UTF-8" in done.text
    assert re.search("qwen2_moe +added by us", done.out)


@pytest.mark.parametrize("version", ["0.10.0", "0.33.0"], ids=["yapf", "ruff"])
@pytest.mark.parametrize(
    "odd",
    [
        pytest.param("# Pages end\x0chere.\n", id="form feed"),
        pytest.param("# Lines end\u2028here.\n", id="U+2028"),
        pytest.param("# Lines end\x85here.\n", id="U+0085"),
        pytest.param("\x0c\n", id="form feed alone"),
    ],
)
def test_only_newlines_end_lines(
    run: Any,
    checkout: Callable[..., Path],
    results: Callable[..., Any],
    version: str,
    odd: str,
) -> None:
    """Characters at which str.splitlines() splits, and Python's own reader does not."""
    path = f"{MODELS}/qwen2_moe.py"
    marker = "from collections.abc import Iterable\n"
    checkout(version, changes={path: lambda d: d.replace(marker.encode(), (odd + marker).encode())})
    done = run("apply", "qwen2_moe", "--source", "src")
    if done.code == 3:
        assert not (run.folder / "generated").exists()
        return
    assert done.code == 0
    (file,) = results(version)["qwen2_moe"].files
    written = (run.folder / "generated" / version / "qwen2_moe.py").read_bytes().decode()
    ast.parse(written)
    assert written.count(odd) == 1
    # ruff's formatter would change such a file, so it may follow yapf
    assert ast.dump(ast.parse(written.replace(odd, ""))) == ast.dump(ast.parse(file.output))


@pytest.mark.parametrize("version", ["0.10.0", "0.33.0"], ids=["yapf", "ruff"])
def test_windows_newlines_are_kept_or_refused(
    run: Any, checkout: Callable[..., Path], version: str
) -> None:
    path = f"{MODELS}/qwen2_moe.py"
    checkout(version, changes={path: lambda data: data.replace(b"\n", b"\r\n")})
    done = run("apply", "qwen2_moe", "--source", "src")
    if done.code == 3:
        assert not (run.folder / "generated").exists()
        return
    assert done.code == 0
    written = (run.folder / "generated" / version / "qwen2_moe.py").read_bytes()
    compile(written, "qwen2_moe.py", "exec")
    assert written.count(b"\n") == written.count(b"\r\n")
