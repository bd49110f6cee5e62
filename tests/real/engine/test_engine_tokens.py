"""vLLM 0.32.0's own engine on CPU ranks: the generated Qwen2-MoE says what upstream's says."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from conftest import EngineFailed
from eplb_codegen.cli import main

ARCHITECTURE = "Qwen2MoeForCausalLM"
EXPERTS = 8
TWO_RANKS: dict[str, Any] = {"tensor_parallel_size": 2, "enable_expert_parallel": True}


def eplb(redundant: int) -> dict[str, Any]:
    return {
        **TWO_RANKS,
        "enable_eplb": True,
        "eplb_config": {
            "num_redundant_experts": redundant,
            "window_size": 8,
            "step_interval": 8,
            "use_async": False,
            "communicator": "torch_nccl",
        },
    }


@pytest.fixture(scope="module")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file that `apply` writes for the vLLM of this environment."""
    out = tmp_path_factory.mktemp("generated")
    assert main(["apply", "qwen2_moe", "--out", str(out)]) == 0
    return out / "0.32.0"


@pytest.fixture(scope="module", params=["per-expert", "fused"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoint") / request.param
    code = (
        "from pathlib import Path; from worker import checkpoint, families; import sys; "
        "checkpoint.write(Path(sys.argv[1]), families.FAMILIES['qwen2_moe'], "
        f"{EXPERTS}, sys.argv[2], 0)"
    )
    verify = Path(__file__).parents[3] / "codegen" / "verify"
    subprocess.run([sys.executable, "-c", code, str(folder), request.param], cwd=verify, check=True)
    return folder


@pytest.fixture(scope="module")
def upstream_tokens(engine: Callable[..., Any], checkpoint: Path) -> list[list[int]]:
    run = engine(checkpoint, TWO_RANKS)
    assert run.served == {"vllm.model_executor.models.qwen2_moe"}
    return run.tokens


def test_eplb_off(
    engine: Callable[..., Any], checkpoint: Path, generated: Path, upstream_tokens: list[list[int]]
) -> None:
    run = engine(checkpoint, TWO_RANKS, generated, f"{ARCHITECTURE}=qwen2_moe:{ARCHITECTURE}")
    assert run.served == {"qwen2_moe"}
    assert run.tokens == upstream_tokens


def test_eplb_on_through_rearrangements(
    engine: Callable[..., Any], checkpoint: Path, generated: Path, upstream_tokens: list[list[int]]
) -> None:
    run = engine(checkpoint, eplb(4), generated, f"{ARCHITECTURE}=qwen2_moe:{ARCHITECTURE}")
    assert run.served == {"qwen2_moe"}
    # two rearrangements that moved something, told of by both ranks
    assert sum(n > 0 for n in run.moved) >= 4
    assert run.tokens == upstream_tokens


def test_upstream_is_no_mixture_of_experts(engine: Callable[..., Any], checkpoint: Path) -> None:
    """The control: without the generated class there is nothing to balance."""
    if checkpoint.name == "fused":
        pytest.skip("the layout does not matter here")
    with pytest.raises(EngineFailed, match="the model is not a MixtureOfExperts"):
        engine(checkpoint, eplb(4))
