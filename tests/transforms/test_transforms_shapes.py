"""Every shape that the tool knows, on the toy: what is inserted, and that it loads right."""

from __future__ import annotations

import io
import tokenize
from collections import Counter
from difflib import unified_diff
from pathlib import Path

import pytest
import transforms_oracle as oracle
import transforms_toy as toy
from transforms_damage import DAMAGE, SHAPES, Variant


@pytest.mark.parametrize("name", SHAPES)
def test_a_known_shape_is_right(tmp_path: Path, name: str) -> None:
    variant = SHAPES[name]
    assert toy.upstream_works(variant.source, variant.options) == ""
    assert toy.verdict(tmp_path, variant.source, **variant.options) == "right"


@pytest.mark.parametrize("setting", toy.SETTERS)
@pytest.mark.parametrize("in_eplb_config", [True, False])
@pytest.mark.parametrize("style", ["ruff", "yapf"])
def test_every_protocol_and_config(
    tmp_path: Path, setting: str, in_eplb_config: bool, style: str
) -> None:
    model = toy.MODEL if style == "ruff" else toy.yapf_style(toy.MODEL)
    found = toy.verdict(tmp_path, model, setting=setting, in_eplb_config=in_eplb_config)
    assert found == "right"


def _hunks(tmp_path: Path, variant: Variant | str, **options: object) -> str:
    """Added and removed lines, without the file's head."""
    if isinstance(variant, str):
        variant = Variant(variant, dict(options))
    keys = ("setting", "in_eplb_config", "layer_loads", "served")
    kept = {k: v for k, v in variant.options.items() if k in keys}
    after = toy.patched(toy.tree(tmp_path, variant.source, **kept))
    lines = unified_diff(variant.source.split("\n"), after.split("\n"), n=0, lineterm="")
    return "\n".join(line for line in lines if not line.startswith(("@@", "---", "+++")))


def test_the_toy_follows_ruff_before_and_behind(tmp_path: Path) -> None:
    after = toy.patched(toy.tree(tmp_path, toy.MODEL))
    assert toy.ruff_format(toy.MODEL) == toy.MODEL
    assert toy.ruff_format(after) == after


def test_block_settings_and_expert_layer_arguments(tmp_path: Path) -> None:
    assert """\
+
+        # Load balancing settings.
+        parallel_config = get_current_vllm_config().parallel_config
+        self.enable_eplb = parallel_config.enable_eplb
+        self.ep_size = get_ep_group().device_group.size()
+
+        self.n_routed_experts = config.num_experts
+        self.n_logical_experts = self.n_routed_experts
+        eplb_config = parallel_config.eplb_config
+        self.n_redundant_experts = eplb_config.num_redundant_experts
+        self.n_physical_experts = self.n_logical_experts + self.n_redundant_experts
""" in _hunks(tmp_path, toy.MODEL)


def test_redundant_experts_where_parallel_config_has_them(tmp_path: Path) -> None:
    found = _hunks(tmp_path, toy.MODEL, in_eplb_config=False)
    assert "+        self.n_redundant_experts = parallel_config.num_redundant_experts\n" in found
    assert "+        self.num_redundant_experts = parallel_config.num_redundant_experts\n" in found
    assert "eplb_config" not in found


def test_grouped_experts(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["grouped"])
    assert "+        self.n_expert_groups = config.n_group\n" in found
    assert "+            self.num_expert_groups = moe.n_expert_groups\n" in found


ALIGNED = toy.change(
    toy.yapf_style(toy.MODEL),
    (
        toy.EXPERTS_CALL,
        """\
        self.experts = FusedMoE(num_experts=config.num_experts,
                                top_k=config.num_experts_per_tok,
                                hidden_size=config.hidden_size,
                                intermediate_size=config.moe_intermediate_size,
                                prefix=f"{prefix}.experts")
""",
    ),
)


def test_arguments_of_an_aligned_call(tmp_path: Path) -> None:
    assert """\
-                                prefix=f"{prefix}.experts")
+                                prefix=f"{prefix}.experts",
+                                enable_eplb=self.enable_eplb,
+                                num_redundant_experts=self.n_redundant_experts)
""" in _hunks(tmp_path, ALIGNED)


def test_arguments_of_a_hanging_call_with_a_trailing_comma(tmp_path: Path) -> None:
    assert """\
+            enable_eplb=self.enable_eplb,
+            num_redundant_experts=self.n_redundant_experts,
""" in _hunks(tmp_path, toy.MODEL)


def test_arguments_of_a_hanging_call_without_a_trailing_comma(tmp_path: Path) -> None:
    model = toy.change(
        toy.yapf_style(toy.MODEL),
        (
            '            prefix=f"{prefix}.experts",\n        )',
            '            prefix=f"{prefix}.experts")',
        ),
    )
    assert """\
-            prefix=f"{prefix}.experts")
+            prefix=f"{prefix}.experts",
+            enable_eplb=self.enable_eplb,
+            num_redundant_experts=self.n_redundant_experts)
""" in _hunks(tmp_path, model)


def test_arguments_of_a_call_on_one_line(tmp_path: Path) -> None:
    model = toy.change(
        toy.yapf_style(toy.MODEL),
        (
            toy.EXPERTS_CALL,
            "        args = config\n        self.experts = FusedMoE("
            "num_experts=args.n, top_k=1, hidden_size=1, intermediate_size=1)\n",
        ),
        ("        args = config\n", ""),
        ("args.n", "config.num_experts"),
    )
    found = _hunks(tmp_path, model)
    assert (
        "+        self.experts = FusedMoE(num_experts=config.num_experts, top_k=1, hidden_size=1, "
        "intermediate_size=1, enable_eplb=self.enable_eplb, "
        "num_redundant_experts=self.n_redundant_experts)\n"
    ) in found


def test_mapping_call(tmp_path: Path) -> None:
    found = _hunks(tmp_path, toy.MODEL)
    assert "+            num_redundant_experts=self.num_redundant_experts,\n" in found


def test_stopping_loop(tmp_path: Path) -> None:
    found = _hunks(tmp_path, toy.MODEL)
    assert (
        """\
-            for mapping in expert_params_mapping:
+            candidates = expert_params.get(expert_key(name), [])
+            for mapping in candidates:
"""
        in found
    )
    assert "+                # Every replica of the expert loads this weight.\n" in found


def test_success_loop(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["stops on success"])
    assert "+                    success |= weight_loader(\n" in found


def test_exhaustive_loop_keeps_its_body(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["never stops"])
    assert "+            for mapping in candidates:\n" in found
    assert "Every replica" not in found


def test_handed_mapping(tmp_path: Path) -> None:
    assert """\
+            candidates = expert_params.get(expert_key(name), [])
-                expert_params_mapping,
+                candidates,
""" in _hunks(tmp_path, SHAPES["mapping handed on"])


def test_fused_range(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["fused range, fused tensors"])
    assert (
        """\
-        for expert_id in range(num_experts):
-            curr_expert_weight = loaded_weight[expert_id]
+        for expert_id in range(num_experts + self.num_redundant_experts):
+            # Physical experts beyond the logical ones are replicas of these.
+            curr_expert_weight = loaded_weight[expert_id % num_experts]
"""
        in found
    )
    assert "+            if is_fused_expert:\n+                candidates =" in found


def test_fused_tensors_that_the_layer_code_loads(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["layer loads, fused"])
    assert "+def split_fused_experts(\n" in found
    assert "+        if self.num_redundant_experts > 0:\n" in found
    assert "expert_params" not in found


def test_wrapper(tmp_path: Path) -> None:
    found = _hunks(tmp_path, SHAPES["wrapper"])
    assert "+class ToyForCausalLM(nn.Module, SupportsPP, MixtureOfExperts):\n" in found
    assert "+class ToyForConditionalGeneration(nn.Module, SupportsPP, MixtureOfExperts):\n" in found
    assert "+        self.moe_layers = self.language_model.moe_layers\n" in found
    assert "+        self.expert_weights = self.language_model.expert_weights\n" in found


@pytest.mark.parametrize(
    ("setting", "present", "absent"),
    [
        ("abstract", "+            self.expert_weights.append(", "super().set_eplb_state("),
        ("appends", "+        super().set_eplb_state(", "self.expert_weights.append("),
        ("resets", "+    def update_physical_experts_metadata(", "set_eplb_state"),
    ],
)
def test_protocol_methods(tmp_path: Path, setting: str, present: str, absent: str) -> None:
    found = _hunks(tmp_path, toy.MODEL, setting=setting)
    assert present in found
    assert absent not in found


def test_imports_are_merged_in_order_or_stand_in_a_new_line(tmp_path: Path) -> None:
    found = _hunks(tmp_path, toy.MODEL)
    assert (
        """\
-from vllm.config import VllmConfig
-from vllm.distributed import get_pp_group
+from vllm.config import VllmConfig, get_current_vllm_config
+from vllm.distributed import get_ep_group, get_pp_group
"""
        in found
    )
    assert "+from .interfaces import MixtureOfExperts, SupportsPP\n" in found


def test_a_new_import_line(tmp_path: Path) -> None:
    model = toy.change(
        toy.MODEL,
        ("from vllm.distributed import get_pp_group\n", ""),
        ("get_pp_group().is_last_rank", "True"),
    )
    assert """\
+from vllm.config import VllmConfig, get_current_vllm_config
+from vllm.distributed import get_ep_group
""" in _hunks(tmp_path, model)


def test_an_import_that_is_there_already(tmp_path: Path) -> None:
    model = toy.change(
        toy.MODEL,
        ("import get_pp_group\n", "import get_ep_group, get_pp_group\n"),
        (toy.MODEL[-40:], toy.MODEL[-40:] + "\n\nRANKS = get_ep_group\n"),
    )
    assert "vllm.distributed" not in _hunks(tmp_path, model)


SHARED = {
    "always": ("        self.shared_expert = ToyMLP(config)\n", 1),
    "none": ("", 0),
    "or None, there": (
        "        if config.num_experts:\n            self.shared_expert = ToyMLP(config)\n"
        "        else:\n            self.shared_expert = None\n",
        1,
    ),
    "or None, not there": (
        "        self.shared_expert = None\n        if config.num_experts < 0:\n"
        "            self.shared_expert = ToyMLP(config)\n",
        0,
    ),
    "in a branch without else, there": (
        "        if config.num_experts:\n            self.shared_expert = ToyMLP(config)\n",
        1,
    ),
    "in a branch without else, not there": (
        "        if config.num_experts < 0:\n            self.shared_expert = ToyMLP(config)\n",
        0,
    ),
    "a gate only": ("        self.shared_expert_gate = nn.Linear(1, 1)\n", 0),
    "a number": ("        self.num_shared_experts = config.num_experts\n", 0),
    "conditional expression": (
        "        self.shared_expert = ToyMLP(config) if config.num_experts < 0 else None\n",
        0,
    ),
}


@pytest.mark.parametrize("name", SHARED)
def test_shared_experts(tmp_path: Path, name: str) -> None:
    code, count = SHARED[name]
    model = toy.change(toy.MODEL, (toy.EXPERTS_CALL, code + toy.EXPERTS_CALL))
    result = toy.generate(toy.tree(tmp_path, model))
    if not result.files:
        assert result.reason.startswith("vllm/")
        return
    fake = toy.machine(result.files[0].patched)
    assert toy.check(fake, "ToyForCausalLM") == []
    module = fake.load("toy_moe")
    with fake.installed():
        built = fake.build(module.ToyForCausalLM, oracle.World(4, 2, 2))
        assert built.num_shared_experts == count


def test_class_bases(tmp_path: Path) -> None:
    assert """\
-class ToyForCausalLM(nn.Module, SupportsPP):
+class ToyForCausalLM(nn.Module, SupportsPP, MixtureOfExperts):
""" in _hunks(tmp_path, toy.MODEL)


def test_nothing_is_taken_away_but_what_is_changed(tmp_path: Path) -> None:
    removed = [
        line[1:].strip() for line in _hunks(tmp_path, toy.MODEL).split("\n") if line.startswith("-")
    ]
    # the call of the loader moves into the loop over the replicas
    moved = {line.strip() for line in toy.LOAD_CALL.split("\n")}
    assert {line for line in removed if line not in moved} <= {
        "from vllm.config import VllmConfig",
        "from vllm.distributed import get_pp_group",
        "from .interfaces import SupportsPP",
        "from .utils import AutoWeightsLoader, is_pp_missing_parameter, make_layers, maybe_prefix",
        "for mapping in expert_params_mapping:",
        "class ToyForCausalLM(nn.Module, SupportsPP):",
    }


def test_a_patched_file_is_native_when_it_is_applied_to(tmp_path: Path) -> None:
    first = toy.patched(toy.tree(tmp_path / "a", toy.MODEL))
    again = toy.generate(toy.tree(tmp_path / "b", first))
    assert again.state.value == "native and sound"


def test_the_same_input_gives_the_same_file(tmp_path: Path) -> None:
    one = toy.patched(toy.tree(tmp_path / "a", toy.MODEL))
    assert toy.patched(toy.tree(tmp_path / "b", toy.MODEL)) == one


@pytest.mark.parametrize(
    "name",
    ["plain", "stops on success", "never stops", "mapping handed on", "mapping in a method"],
)
def test_the_loader_costs_what_the_replicas_cost(tmp_path: Path, name: str) -> None:
    """Weight loader calls and mapping entries per tensor, for more and more experts."""
    source = toy.patched(toy.tree(tmp_path, SHAPES[name].source))
    fake = toy.machine(source)
    module = fake.load("toy_moe")
    costs = []
    with fake.installed():
        for experts in (8, 64):
            world = oracle.World(experts, experts // 2, 2, 1, layers=1, mine=(0, 1))
            model = fake.build(module.ToyForCausalLM, world)
            tensors = oracle.per_expert(world)
            model.load_weights(oracle.shuffled(tensors))
            assert oracle.faults(fake) == []
            seen = fake.recorder.looked_at - 3 * (experts + experts // 2)  # grouped once
            costs.append((fake.recorder.loader_calls / len(tensors), max(seen, 0)))
    assert costs[0] == costs[1]
    assert costs[0][0] <= 2.5


def _comments(source: str) -> Counter[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return Counter(t.string for t in tokens if t.type == tokenize.COMMENT)


OURS = {
    line.strip()
    for file in (Path(__file__).parents[2] / "templates").glob("*.j2")
    for line in file.read_text(encoding="utf-8").split("\n")
    if line.strip().startswith("# ")
}
"""The comments of the code that is inserted."""


@pytest.mark.parametrize(
    "name",
    [
        "comments in the bases",
        "comments in an import",
        "comments in an import, yapf",
        "comment behind the last argument",
        "comment on the argument before the last",
        "CRLF",
        "CRLF, yapf",
        "tabs",
        "form feed",
        "no newline at the end",
        "code points beyond ASCII",
    ],
)
def test_text_around_stays(tmp_path: Path, name: str) -> None:
    before = DAMAGE[name].source
    result = toy.generate(toy.tree(tmp_path, before))
    if not result.files:
        return  # refused: test_transforms_damage looks at the message
    after = result.files[0].patched
    assert _comments(before) - _comments(after) == Counter(), "comments were lost"
    assert set(_comments(after) - _comments(before)) <= OURS, "comments were doubled"
    assert after.count("\r") == (after.count("\n") if "\r" in before else 0), "mixed newlines"
    assert after.endswith("\n") == before.endswith("\n")
    assert after.count("\f") == before.count("\f")
