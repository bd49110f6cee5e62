"""Which class serves a model, and what is said of it, in real releases."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.doctor.config import ModelConfig
from eplb_codegen.doctor.serves import class_findings, served_by

OLD, NEW = "0.10.0", "0.32.0"


@pytest.fixture
def says(
    modules: Callable[[str], Modules], config: Callable[..., ModelConfig]
) -> Callable[..., str]:
    """The finding about the class as a text; fields of the configuration by keyword."""

    def of(name: str, version: str, *, strained: bool = True, **changes: Any) -> str:
        of_release = modules(version)
        model = config(name, **changes)
        served = served_by(of_release, model)
        (found,) = class_findings(of_release.tree, of_release, model, served, (), None, strained)
        return f"{found.level.value} {found.message} -> {found.advice}"

    return of


def test_families(says: Callable[..., str]) -> None:
    # not in 0.10.0; in 0.32.0 right without redundant experts and with a single stage
    moe = "qwen3-235b-a22b"
    assert re.match("problem .*does not support EPLB: .*not a Mixture", says(moe, OLD))
    assert re.match("warning .*but is faulty.*-> eplb-cod", says(moe, NEW, strained=False))
    assert re.match("problem .*but is faulty.*-> eplb-codegen apply qwen3_moe", says(moe, NEW))


@pytest.mark.parametrize(
    "changes, version, expected",
    [
        (
            {"architectures": ["NoSuchMoeForCausalLM"]},
            NEW,
            "warning .*does not know NoSuchMoe.*TransformersMoEForCausalLM, a Mixture",
        ),
        (
            {"architectures": ["NoSuchMoeForCausalLM"]},
            OLD,
            "problem .*TransformersForCausalLM, not a Mixt",
        ),
        (
            {"architectures": ["X"], "auto_map": {"AutoModel": "x.X"}},
            NEW,
            r"warning .*own code \(auto_map\)",
        ),
        (
            {"architectures": ["X", "DeepseekV3ForCausalLM"]},
            NEW,
            r"warning .*DeepseekV3ForCausalLM of vllm/model_executor/models/deepseek_v2\.py "
            "supports EPLB itself; whether it is sound is not known",
        ),
        ({"architectures": ["LlamaForCausalLM"]}, NEW, "problem .*no experts -> Dense models"),
        (
            {"architectures": ["DeepseekV4ForCausalLM"]},
            NEW,
            r"warning .* of vllm/models/deepseek_v4/__init__\.py supports EPLB itself",
        ),
        ({"architectures": None}, NEW, "problem .*names no architecture"),
    ],
)
def test_other_classes(
    says: Callable[..., str], changes: dict[str, Any], version: str, expected: str
) -> None:
    found = says("mixtral-8x7b", version, **changes)
    assert re.match(expected, found), found
