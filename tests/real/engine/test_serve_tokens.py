"""vLLM 0.32.0's own server on CPU ranks: generated models say what upstream's classes say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from conftest import FAMILIES, TWO_RANKS, ServerFailed, eplb

OPTIONS = {"qwen3_vl_moe": ["--language-model-only"]}


@pytest.fixture(scope="module")
def upstream_tokens(serve: Any, checkpoint: Any) -> Any:
    """What upstream's class says with EPLB off, by family and layout."""
    told: dict[tuple[str, str], list[list[int]]] = {}

    def tokens(family: str, layout: str) -> list[list[int]]:
        if (family, layout) not in told:
            options = OPTIONS.get(family, [])
            with serve(checkpoint(family, layout), *TWO_RANKS, *options) as server:
                told[family, layout] = server.tokens()
                assert server.runs == {f"vllm.model_executor.models.{family}"}
                assert "eplb-codegen: " in server.log and "is served from" not in server.log
        return told[family, layout]

    return tokens


def test_eplb_off(serve: Any, checkpoint: Any, generated: Path, upstream_tokens: Any) -> None:
    model = checkpoint("qwen2_moe", "per-expert")
    with serve(model, *TWO_RANKS, EPLB_CODEGEN_DIR=str(generated)) as server:
        assert server.tokens() == upstream_tokens("qwen2_moe", "per-expert")
        assert server.runs == {"eplb_codegen_generated.qwen2_moe"}


@pytest.mark.parametrize(
    ("family", "layout"),
    [("qwen2_moe", "per-expert"), *((family, "fused") for family in FAMILIES)],
)
def test_eplb_on_through_rearrangements(
    serve: Any, checkpoint: Any, generated: Path, upstream_tokens: Any, family: str, layout: str
) -> None:
    model = checkpoint(family, layout)
    options = [*eplb(4), *OPTIONS.get(family, [])]
    extra = {"EPLB_CODEGEN_DIR": str(generated)}
    if layout == "per-expert":
        extra["VLLM_WORKER_MULTIPROCESSING_METHOD"] = "spawn"
    with serve(model, *options, **extra) as server:
        assert server.tokens() == upstream_tokens(family, layout)
        assert server.runs == {f"eplb_codegen_generated.{family}"}
        # two rearrangements that moved something, told of by both ranks
        assert sum(n > 0 for n in server.moved) >= 4
        served = [line for line in server.log.splitlines() if f"{family}.py" in line]
    for process in ("EngineCore", "VllmWorker-0", "VllmWorker-1"):
        assert any(process in line for line in served), process
    # the API server sets its log up later: its line bears no name
    assert any(line.startswith("eplb-codegen: ") for line in served)


def test_upstream_repaired_family_goes_wrong(
    serve: Any, checkpoint: Any, upstream_tokens: Any
) -> None:
    """The control: without the repair the redundant experts are never written."""
    with serve(checkpoint("qwen3_moe", "fused"), *eplb(4)) as server:
        assert server.runs == {"vllm.model_executor.models.qwen3_moe"}
        assert server.tokens() != upstream_tokens("qwen3_moe", "fused")


def test_upstream_is_no_mixture_of_experts(serve: Any, checkpoint: Any) -> None:
    """The control: without the generated class there is nothing to balance."""
    with (
        pytest.raises(ServerFailed, match="the model is not a MixtureOfExperts"),
        serve(checkpoint("qwen2_moe", "per-expert"), *eplb(4)),
    ):
        pass
