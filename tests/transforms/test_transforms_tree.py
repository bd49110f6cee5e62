"""A damaged tree around a sound model file: refused with the place, or right."""

from __future__ import annotations

from pathlib import Path

import pytest
import transforms_toy as toy

INTERFACES = "vllm/model_executor/models/interfaces.py"
UTILS = "vllm/model_executor/models/utils.py"
REGISTRY = "vllm/model_executor/models/registry.py"
LAYER = "vllm/model_executor/layers/fused_moe/layer.py"
FUSED = "vllm/model_executor/layers/fused_moe/__init__.py"
CONFIG = "vllm/config.py"
DISTRIBUTED = "vllm/distributed/__init__.py"

REFUSED: dict[str, tuple[str, str, str]] = {
    "no enable_eplb": (CONFIG, "enable_eplb: bool = False", "other: bool = False"),
    "no redundant experts": (CONFIG, "num_redundant_experts", "zz"),
    "no ParallelConfig": (CONFIG, "class ParallelConfig", "class Zz"),
    "no get_current_vllm_config": (CONFIG, "def get_current_vllm_config", "def zz"),
    "no get_ep_group": (DISTRIBUTED, "def get_ep_group", "def zz"),
    "no protocol": (INTERFACES, "class MixtureOfExperts", "class Zz"),
    "no set_eplb_state": (INTERFACES, "def set_eplb_state", "def zz"),
    "an unknown member": (INTERFACES, "num_moe_layers: int", "num_moe_layers: int\n    zz: int"),
    "an unknown method": (
        INTERFACES,
        "\ndef is_mixture",
        "    def zz(self) -> None: ...\n\ndef is_mixture",
    ),
    "no update_expert_map": (LAYER, "def update_expert_map", "def zz"),
    "no get_expert_weights": (LAYER, "def get_expert_weights", "def zz"),
    "no enable_eplb in the layer": (LAYER, "enable_eplb=False", "zz=False"),
    "no num_redundant_experts in the layer": (
        LAYER,
        "                 num_redundant_experts=0",
        "zz=0",
    ),
    "no FusedMoE": (LAYER, "class FusedMoE", "class Zz"),
    "FusedMoE not handed on": (FUSED, "import FusedMoE", "import Zz"),
    "another class served": (REGISTRY, 'ToyForCausalLM")', 'Zz")'),
    "nothing served": (REGISTRY, "toy_moe", "zz"),
    "interfaces not Python": (INTERFACES, "class MixtureOfExperts(Protocol):", "class MixtureOf("),
    "layer not Python": (LAYER, "class FusedMoE:", "class FusedMoE("),
    "config not Python": (CONFIG, "class ParallelConfig:", "class ParallelConfig("),
    "registry not Python": (REGISTRY, "= {", "= ("),
}


def _texts(folder: Path, path: str, old: str, new: str) -> dict[str, str]:
    toy.tree(folder, toy.MODEL)
    text = (folder / path).read_text(encoding="utf-8")
    assert old in text
    return {path: text.replace(old, new)}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(tmp_path: Path, name: str) -> None:
    others = _texts(tmp_path / "a", *REFUSED[name])
    result = toy.generate(toy.tree(tmp_path / "b", toy.MODEL, others=others))
    assert result.state.value == "not recognised"
    assert "vllm" in result.reason


FAKE_PROTOCOL = (
    '\n\nEXAMPLE = """\nclass MixtureOfExperts:\n    def set_eplb_state(self):\n        ...\n\n'
    'class Other:\n    pass\n"""\n'
)

FAKE_LAYER = '\n\nEXAMPLE = """\nclass FusedMoE:\n    pass\n"""\n'

FAKE_CONFIG = '\n\nEXAMPLE = """\nclass ParallelConfig:\n    num_redundant_experts: int = 0\n"""\n'


@pytest.mark.parametrize(
    ("path", "more"),
    [(INTERFACES, FAKE_PROTOCOL), (LAYER, FAKE_LAYER), (CONFIG, FAKE_CONFIG)],
    ids=["protocol", "layer", "config"],
)
def test_a_string_at_the_margin_that_looks_like_code(tmp_path: Path, path: str, more: str) -> None:
    toy.tree(tmp_path / "a", toy.MODEL)
    text = (tmp_path / "a" / path).read_text(encoding="utf-8")
    plain = toy.patched(toy.tree(tmp_path / "b", toy.MODEL))
    assert toy.patched(toy.tree(tmp_path / "c", toy.MODEL, others={path: text + more})) == plain


@pytest.mark.parametrize("path", [INTERFACES, LAYER, CONFIG])
def test_the_tree_may_have_other_newlines(tmp_path: Path, path: str) -> None:
    toy.tree(tmp_path / "a", toy.MODEL)
    text = (tmp_path / "a" / path).read_text(encoding="utf-8")
    plain = toy.patched(toy.tree(tmp_path / "b", toy.MODEL))
    others = {path: text.replace("\n", "\r\n")}
    assert toy.patched(toy.tree(tmp_path / "c", toy.MODEL, others=others)) == plain


SERVED_TWICE = toy.MODEL + (
    "\n\nclass ToySequence(ToyForCausalLM):\n"
    '    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):\n'
    "        super().__init__(vllm_config=vllm_config, prefix=prefix)\n"
    "        self.score = None\n"
)


def test_two_served_classes_that_share_a_model(tmp_path: Path) -> None:
    registry = {
        REGISTRY: '_TEXT = {\n    "A": ("toy_moe", "ToyForCausalLM"),\n'
        '    "B": ("toy_moe", "ToySequence"),\n}\n'
    }
    result = toy.generate(toy.tree(tmp_path, SERVED_TWICE, others=registry))
    if result.files:
        fake = toy.machine(result.files[0].patched)
        assert toy.check(fake, "ToyForCausalLM") == []
        assert toy.check(toy.machine(result.files[0].patched), "ToySequence") == []
    else:
        assert result.reason.startswith("vllm/")


def test_a_dense_class_beside_the_mixture(tmp_path: Path) -> None:
    dense = (
        "\n\nclass ToyDense(nn.Module):\n"
        '    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):\n'
        "        super().__init__()\n        self.mlp = ToyMLP(None)\n"
    )
    registry = {
        REGISTRY: '_TEXT = {\n    "A": ("toy_moe", "ToyForCausalLM"),\n'
        '    "B": ("toy_moe", "ToyDense"),\n}\n'
    }
    result = toy.generate(toy.tree(tmp_path, toy.MODEL + dense, others=registry))
    if result.files:
        assert toy.check(toy.machine(result.files[0].patched), "ToyForCausalLM") == []
        assert "class ToyDense(nn.Module):\n" in result.files[0].patched
    else:
        assert result.reason.startswith("vllm/")
