"""Damaged and unusual variants of the toy: a name, and what is changed of its source."""

from __future__ import annotations

import re
import textwrap
from typing import Any, NamedTuple

from transforms_toy import (
    BACKBONE_LOADER,
    EXPERTS_CALL,
    LOAD_CALL,
    LOOP,
    MAPPING,
    MODEL,
    WRAPPER,
    Change,
    change,
    yapf_style,
)


class Variant(NamedTuple):
    source: str
    options: dict[str, Any] = {}  # noqa: RUF012


def _mapping_called(name: str, source: str = MODEL) -> str:
    return re.sub(r"\bexpert_params_mapping", name, source)


def _v(*changes: Change, **options: Any) -> Variant:
    return Variant(change(MODEL, *changes), options)


SUCCESS_LOOP = """\
            is_expert_weight = False
            for mapping in expert_params_mapping:
                param_name, weight_name, expert_id, shard_id = mapping
                if weight_name not in name:
                    continue
                is_expert_weight = True
                name_mapped = name.replace(weight_name, param_name)
                if is_pp_missing_parameter(name_mapped, self):
                    continue
                param = params_dict[name_mapped]
                weight_loader = param.weight_loader
                success = weight_loader(
                    param,
                    loaded_weight,
                    name_mapped,
                    shard_id=shard_id,
                    expert_id=expert_id,
                    return_success=True,
                )
                if success:
                    name = name_mapped
                    break
            else:
                if is_expert_weight or is_pp_missing_parameter(name, self):
                    continue
                param = params_dict[name]
                param.weight_loader(param, loaded_weight)
"""

NEVER_LOOP = """\
            loaded = False
            for mapping in expert_params_mapping:
                param_name, weight_name, expert_id, shard_id = mapping
                if weight_name not in name:
                    continue
                name_mapped = name.replace(weight_name, param_name)
                if is_pp_missing_parameter(name_mapped, self):
                    continue
                param = params_dict[name_mapped]
                param.weight_loader(
                    param,
                    loaded_weight,
                    name_mapped,
                    shard_id=shard_id,
                    expert_id=expert_id,
                )
                loaded = True
            if loaded or is_pp_missing_parameter(name, self):
                continue
            params_dict[name].weight_loader(params_dict[name], loaded_weight)
"""

HEAD_LOOP = LOOP.replace(
    "            for mapping in expert_params_mapping:\n"
    "                param_name, weight_name, expert_id, shard_id = mapping\n",
    "            for param_name, weight_name, expert_id, shard_id in expert_params_mapping:\n",
)

HANDED = """\
    def load_expert(
        self,
        name: str,
        loaded_weight: torch.Tensor,
        params_dict: dict[str, nn.Parameter],
        expert_params_mapping: list[tuple[str, str, int, str]],
    ) -> bool:
        loaded = False
        for param_name, weight_name, expert_id, shard_id in expert_params_mapping:
            if weight_name not in name:
                continue
            full_name = name.replace(weight_name, param_name)
            if is_pp_missing_parameter(full_name, self):
                continue
            param = params_dict[full_name]
            param.weight_loader(
                param,
                loaded_weight,
                full_name,
                shard_id=shard_id,
                expert_id=expert_id,
            )
            loaded = True
        return loaded

    def load_weights("""

HANDED_CALL = """\
            if self.load_expert(
                name,
                loaded_weight,
                params_dict,
                expert_params_mapping,
            ):
                continue
            if is_pp_missing_parameter(name, self):
                continue
            params_dict[name].weight_loader(params_dict[name], loaded_weight)
"""

_BACKBONE_DEF = (
    "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
    "        expert_params_mapping"
)


def handed(method: str = HANDED, call: str = HANDED_CALL) -> str:
    """The toy whose expert loop is in a method of its own."""
    source = change(MODEL, (LOOP, call))
    return change(
        source, (_BACKBONE_DEF, method + _BACKBONE_DEF.removeprefix("    def load_weights("))
    )


RANGE_METHOD = """\
    def load_fused(
        self,
        name: str,
        params_dict: dict[str, nn.Parameter],
        loaded_weight: torch.Tensor,
        shard_id: str,
        num_experts: int,
    ) -> bool:
        param = params_dict[name]
        loaded = False
        for expert_id in range(num_experts):
            curr_expert_weight = loaded_weight[expert_id]
            success = param.weight_loader(
                param, curr_expert_weight, name, shard_id, expert_id, return_success=True
            )
            if success:
                loaded = True
        return loaded

    def load_weights("""

RANGE_LOOP = SUCCESS_LOOP.replace(
    "                param = params_dict[name_mapped]\n"
    "                weight_loader = param.weight_loader\n"
    "                success = weight_loader(\n"
    "                    param,\n"
    "                    loaded_weight,\n"
    "                    name_mapped,\n"
    "                    shard_id=shard_id,\n"
    "                    expert_id=expert_id,\n"
    "                    return_success=True,\n"
    "                )\n",
    """\
                if is_fused_expert:
                    loaded_weight = loaded_weight.transpose(-1, -2)
                    if "experts.gate_up_proj" in name:
                        gate, up = loaded_weight.chunk(2, dim=-2)
                        success_w1 = self.load_fused(
                            name_mapped, params_dict, gate, "w1", self.config.num_experts
                        )
                        success_w3 = self.load_fused(
                            name_mapped, params_dict, up, "w3", self.config.num_experts
                        )
                        success = success_w1 and success_w3
                    else:
                        success = self.load_fused(
                            name_mapped,
                            params_dict,
                            loaded_weight,
                            shard_id,
                            self.config.num_experts,
                        )
                else:
                    param = params_dict[name_mapped]
                    weight_loader = param.weight_loader
                    success = weight_loader(
                        param,
                        loaded_weight,
                        name_mapped,
                        shard_id=shard_id,
                        expert_id=expert_id,
                        return_success=True,
                    )
""",
)

FUSED_SWITCH = """\
            if "experts.gate_up_proj" in name or "experts.down_proj" in name:
                is_fused_expert = True
                expert_params_mapping = fused_expert_params_mapping
"""


def fused_range() -> str:
    """The toy with a loader for fused tensors that goes over the logical experts."""
    source = change(
        MODEL,
        (LOOP, FUSED_SWITCH + RANGE_LOOP),
        (
            "        loaded_params: set[str] = set()\n",
            "        loaded_params: set[str] = set()\n"
            "        is_fused_expert = False\n"
            "        fused_expert_params_mapping = [\n"
            '            ("experts.w13_weight", "experts.gate_up_proj", 0, "w1"),\n'
            '            ("experts.w2_weight", "experts.down_proj", 0, "w2"),\n'
            "        ]\n",
        ),
    )
    return change(
        source, (_BACKBONE_DEF, RANGE_METHOD + _BACKBONE_DEF.removeprefix("    def load_weights("))
    )


MAPPING_METHOD = (
    "    def get_expert_mapping(self) -> list[tuple[str, str, int, str]]:\n"
    + MAPPING.replace("expert_params_mapping =", "return")
    + "\n    def load_weights("
)


def mapping_method() -> str:
    source = change(
        MODEL,
        (MAPPING, "        expert_params_mapping = self.get_expert_mapping()\n"),
    )
    head = "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
    body = "        expert_params_mapping = self.get"
    return change(
        source,
        (head + body, MAPPING_METHOD + head.removeprefix("    def load_weights(") + body),
    )


def indent(code: str, by: int = 4) -> str:
    return textwrap.indent(code, " " * by)


BLOCK_INIT = "        super().__init__()\n        self.hidden_size = config.hidden_size\n"

CAUSAL_END = "        self.is_last = get_pp_group().is_last_rank\n"
CONFIG_LINE = "        self.config = config\n        self.start_layer"
TENSORS = "        for name, loaded_weight in weights:\n"

SHAPES: dict[str, Variant] = {
    "plain": _v(),
    "yapf": Variant(yapf_style(MODEL)),
    "own 0.9.2 config": _v(in_eplb_config=False, setting="abstract"),
    "stops on success": _v((LOOP, SUCCESS_LOOP)),
    "never stops": _v((LOOP, NEVER_LOOP)),
    "entry in the head of the loop": _v((LOOP, HEAD_LOOP)),
    "mapping in a method": Variant(mapping_method()),
    "mapping handed on": Variant(handed()),
    "fused range, per-expert tensors": Variant(fused_range()),
    "fused range, fused tensors": Variant(fused_range(), {"tensors": "fused"}),
    "layer loads": _v((BACKBONE_LOADER, ""), layer_loads=True),
    "layer loads, fused": _v((BACKBONE_LOADER, ""), layer_loads=True, tensors="fused", out=1),
    "wrapper": Variant(
        MODEL + WRAPPER,
        {"served": "ToyForConditionalGeneration", "root": "language_model.model."},
    ),
    "feed_forward": _v(("self.mlp", "self.feed_forward"), attribute="feed_forward"),
    "grouped": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n'
            "            num_expert_group=config.n_group,\n",
        )
    ),
    "layer_type": _v(
        (
            'vllm_config: VllmConfig, prefix: str = ""):\n        super().__init__()\n'
            "        config =",
            'vllm_config: VllmConfig, prefix: str = "", '
            "layer_type=ToyDecoderLayer):\n        super().__init__()\n        config =",
        ),
        ("lambda prefix: ToyDecoderLayer(", "lambda prefix: layer_type("),
    ),
    "_init_model": _v(
        ("self.model = ToyModel(", "self.model = self._init_model("),
        (
            CAUSAL_END,
            CAUSAL_END
            + "\n    def _init_model(self, vllm_config, prefix):\n"
            + "        return ToyModel(vllm_config=vllm_config, prefix=prefix)\n",
        ),
    ),
}
"""Shapes that must be right: nothing may be refused here."""

DAMAGE: dict[str, Variant] = {
    # name collisions
    "candidates used": _v(
        (TENSORS, "        candidates = 0\n" + TENSORS + "            candidates += 1\n"),
    ),
    "candidates used behind": _v(
        (TENSORS, "        candidates = {'a'}\n" + TENSORS),
        (
            "        return loaded_params\n",
            "        loaded_params |= candidates\n"
            "        assert 'a' in loaded_params\n        return loaded_params\n",
        ),
    ),
    "expert_params used": _v(
        (TENSORS, "        expert_params = set(params_dict)\n" + TENSORS),
        (
            "        return loaded_params\n",
            "        assert isinstance(expert_params, set)\n        return loaded_params\n",
        ),
    ),
    "mapping called expert_params": Variant(_mapping_called("expert_params")),
    "mapping called candidates": Variant(_mapping_called("candidates")),
    "mapping called candidates, success": Variant(
        _mapping_called("candidates", change(MODEL, (LOOP, SUCCESS_LOOP)))
    ),
    "loop variable called candidates": _v(
        ("for mapping in", "for candidates in"), ("= mapping\n", "= candidates\n")
    ),
    "underscore for the result": _v(
        (LOAD_CALL, LOAD_CALL.replace("weight_loader(\n", "_ = weight_loader(\n", 1))
    ),
    "underscore for the shard": _v(
        ("expert_id, shard_id = mapping", "expert_id, _ = mapping"), ("=shard_id", "=_")
    ),
    "result of a loader that returns None": _v(
        (LOAD_CALL, LOAD_CALL.replace("weight_loader(\n", "done = weight_loader(\n", 1))
    ),
    "group_by_expert defined behind": _v(
        (
            "class ToyForCausalLM",
            "def group_by_expert(x):\n    return {1: x}\n\n\nassert group_by_expert(2) == {1: 2}\n"
            "\n\nclass ToyForCausalLM",
        )
    ),
    "expert_key imported": _v(
        (
            "import torch\n",
            "import torch\nfrom os.path import basename as expert_key\n",
        ),
        ("self.prefix = prefix", "self.prefix = expert_key(prefix + '/a')"),
    ),
    "parallel_config of another kind in the block": _v(
        (BLOCK_INIT, BLOCK_INIT + "        parallel_config = config.mlp_only_layers\n"),
    ),
    "parallel_config overwritten in the block": _v(
        (BLOCK_INIT, BLOCK_INIT + "        parallel_config = 7\n"),
        (EXPERTS_CALL, EXPERTS_CALL + "\n        assert parallel_config == 7\n"),
    ),
    "parallel_config parameter of the block": _v(
        (
            'class ToyMoE(nn.Module):\n    def __init__(self, config, prefix: str = ""):\n',
            "class ToyMoE(nn.Module):\n"
            '    def __init__(self, config, prefix: str = "", parallel_config=7):\n',
        ),
        (EXPERTS_CALL, EXPERTS_CALL + "\n        assert parallel_config == 7\n"),
    ),
    "parallel_config in a branch of the block": _v(
        (
            BLOCK_INIT,
            BLOCK_INIT + "        if config.hidden_size < 0:\n"
            "            parallel_config = config.parallel_config\n",
        ),
    ),
    "eplb_config used in the block": _v(
        (BLOCK_INIT, BLOCK_INIT + "        eplb_config = 7\n"),
        (EXPERTS_CALL, EXPERTS_CALL + "\n        assert eplb_config == 7\n"),
    ),
    "vllm_config of another kind in the block": _v(
        (BLOCK_INIT, "        vllm_config = 7\n" + BLOCK_INIT),
        (EXPERTS_CALL, EXPERTS_CALL + "\n        assert vllm_config == 7\n"),
    ),
    "vllm_config None by default in the block": _v(
        (
            'class ToyMoE(nn.Module):\n    def __init__(self, config, prefix: str = ""):\n',
            "class ToyMoE(nn.Module):\n"
            '    def __init__(self, config, prefix: str = "", vllm_config=None):\n',
        ),
    ),
    "parallel_config behind self.config": _v(
        (
            CONFIG_LINE,
            "        self.config = config\n"
            "        parallel_config = vllm_config.parallel_config\n"
            "        self.parallel = parallel_config\n        self.start_layer",
        ),
    ),
    "parallel_config of another kind in the backbone": _v(
        (
            CONFIG_LINE,
            "        parallel_config = 7\n        self.config = config\n        self.start_layer",
        ),
    ),
    "eplb_config used in the backbone": _v(
        (
            CONFIG_LINE,
            "        eplb_config = parallel_config = 7\n        self.config = config\n"
            "        self.seven = eplb_config\n        assert eplb_config == 7\n"
            "        self.start_layer",
        ),
    ),
    "num_redundant_experts of another kind in the backbone": _v(
        (
            CONFIG_LINE,
            "        self.num_redundant_experts = 0\n" + CONFIG_LINE,
        ),
        (
            '            prefix=f"{prefix}.layers",\n        )\n',
            '            prefix=f"{prefix}.layers",\n        )\n'
            "        self.num_redundant_experts = 0\n",
        ),
    ),
    "moe and layer used in the causal class": _v(
        (
            CAUSAL_END,
            "        moe = layer = 1\n        self.both = lambda: (moe, layer)\n"
            + CAUSAL_END
            + "        assert self.both() == (1, 1)\n",
        ),
    ),
    "closure over layer in the causal class": _v(
        (
            CAUSAL_END,
            "        layer = 1\n        self.one = lambda: layer\n" + CAUSAL_END,
        ),
        (
            "        loader = AutoWeightsLoader(self)\n",
            "        assert self.one() == 1\n        loader = AutoWeightsLoader(self)\n",
        ),
    ),
    "moe_layers used in the causal class": _v(
        (CAUSAL_END, "        self.moe_layers = [7]\n" + CAUSAL_END),
        (
            "        loader = AutoWeightsLoader(self)\n",
            "        assert self.moe_layers == [7]\n        loader = AutoWeightsLoader(self)\n",
        ),
    ),
    "set_eplb_state there already": _v(
        (
            CAUSAL_END,
            CAUSAL_END
            + "\n    def set_eplb_state(self, a, b, c):\n        raise NotImplementedError\n",
        ),
    ),
    "expert_weights there already": _v(
        (CAUSAL_END, "        self.expert_weights = (1,)\n" + CAUSAL_END),
    ),
    "num_redundant_experts a property": _v(
        (
            CAUSAL_END,
            CAUSAL_END
            + "\n    @property\n    def num_redundant_experts(self):\n        return 0\n",
        ),
    ),
    "n_routed_experts of the block used by its forward": _v(
        (BLOCK_INIT, BLOCK_INIT + "        self.n_routed_experts = 7\n"),
    ),
    # constructors
    "early return": _v(
        (
            CAUSAL_END,
            "        if not get_pp_group().is_last_rank or True:\n            return\n"
            + CAUSAL_END,
        ),
    ),
    "returns at the end": _v((CAUSAL_END, CAUSAL_END + "        return\n")),
    "model built in the last statement's branch": _v(
        (
            CAUSAL_END,
            "        if get_pp_group().is_last_rank:\n            self.is_last = True\n",
        ),
    ),
    "one-line constructor suite": _v(
        (
            CONFIG_LINE,
            "        if config is not None: self.config = config\n        self.start_layer",
        ),
    ),
    "experts built in a one-line suite": _v(
        (
            EXPERTS_CALL,
            "        if config: " + re.sub(r"\s*\n\s*", " ", EXPERTS_CALL.strip()) + "\n",
        ),
    ),
    "config set behind a semicolon": _v(
        (CONFIG_LINE, "        self.config = config; self.x = 1\n        self.start_layer"),
    ),
    "trailing semicolon": _v(
        (CONFIG_LINE, "        self.config = config;\n        self.start_layer"),
    ),
    "config set in a branch": _v(
        (
            CONFIG_LINE,
            "        if config.hidden_size < 0:\n            self.config = None\n"
            "        else:\n            self.config = config\n        self.start_layer",
        ),
    ),
    "no self.config in the backbone": _v(
        (CONFIG_LINE, "        self.start_layer"),
        ("num_experts=self.config.num_experts", "num_experts=4"),
        shapes=[(4, 2, 2)],
    ),
    "self.config of the causal class set behind the model": _v(
        (
            "        self.config = vllm_config.model_config.hf_config\n"
            "        self.model = ToyModel(\n"
            '            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")\n'
            "        )\n",
            "        self.model = ToyModel(\n"
            '            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")\n        )\n'
            "        self.config = vllm_config.model_config.hf_config\n",
        ),
    ),
    "backbone does not take vllm_config": _v(
        (
            "class ToyModel(nn.Module):\n    def __init__(self, *, vllm_config: VllmConfig, "
            'prefix: str = ""):\n        super().__init__()\n'
            "        config = vllm_config.model_config.hf_config\n",
            'class ToyModel(nn.Module):\n    def __init__(self, *, config, prefix: str = ""):\n'
            "        super().__init__()\n",
        ),
        (
            "            vllm_config=vllm_config, prefix=maybe_prefix",
            "            config=self.config, prefix=maybe_prefix",
        ),
    ),
    # the expert layer
    "positional arguments": _v(
        (
            "            num_experts=config.num_experts,\n            top_k=",
            "            config.num_experts,\n            top_k=",
        ),
    ),
    "keywords of a dictionary": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            **{"num_expert_group": None},\n',
        ),
    ),
    "keywords of a dictionary that has them": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            **{"enable_eplb": False},\n',
        ),
    ),
    "enable_eplb there already": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            enable_eplb=False,\n',
        ),
    ),
    "num_redundant_experts there already": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            num_redundant_experts=0,\n',
        ),
    ),
    "both there, as constants": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            enable_eplb=False,\n'
            "            num_redundant_experts=0,\n",
        ),
    ),
    "both there, enable_eplb a parameter that nobody gives": _v(
        (
            'class ToyMoE(nn.Module):\n    def __init__(self, config, prefix: str = ""):\n',
            "class ToyMoE(nn.Module):\n"
            '    def __init__(self, config, prefix: str = "", enable_eplb: bool = False):\n',
        ),
        (
            BLOCK_INIT,
            BLOCK_INIT
            + "        self.n_routed_experts = self.n_logical_experts = config.num_experts\n"
            "        self.n_redundant_experts = 2 if enable_eplb else 0\n"
            "        self.n_physical_experts = config.num_experts + self.n_redundant_experts\n"
            "        self.n_local_physical_experts = self.n_physical_experts\n",
        ),
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            enable_eplb=enable_eplb,\n'
            "            num_redundant_experts=self.n_redundant_experts,\n",
        ),
    ),
    "experts in two branches": _v(
        (
            EXPERTS_CALL,
            "        if config.hidden_size < 0:\n"
            + indent(EXPERTS_CALL)
            + "\n        else:\n"
            + indent(EXPERTS_CALL),
        ),
    ),
    "experts in one branch only": _v(
        (
            EXPERTS_CALL,
            "        if config.num_experts > 1:\n"
            + indent(EXPERTS_CALL)
            + "\n        else:\n            self.gate = None\n",
        ),
    ),
    "experts in a conditional expression": _v(
        ("self.experts = FusedMoE(", "self.experts = None if not config else FusedMoE("),
    ),
    "experts in a local variable": _v(
        ("self.experts = FusedMoE(", "experts = FusedMoE("),
        (
            "    def forward(",
            "        self.experts = experts\n\n    def forward(",
        ),
    ),
    "experts in a helper": _v(
        (
            "        self.experts = FusedMoE(",
            "        self._make(config, prefix)\n\n"
            "    def _make(self, config, prefix):\n        self.experts = FusedMoE(",
        ),
    ),
    "experts wrapped": _v(("self.experts = FusedMoE(", "self.experts = (FusedMoE)(")),
    "experts through an alias": _v(
        ("class ToyMLP", "Experts = FusedMoE\n\n\nclass ToyMLP"),
        ("self.experts = FusedMoE(", "self.experts = Experts("),
    ),
    "FusedMoE imported under another name": _v(
        ("import FusedMoE\n", "import FusedMoE as Experts\n"),
        ("= FusedMoE(", "= Experts("),
        ("FusedMoE.make", "Experts.make"),
    ),
    "comment behind the last argument": _v(
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",  # where it hangs\n',
        ),
    ),
    "comment on the argument before the last": _v(
        (
            "            intermediate_size=config.moe_intermediate_size,\n",
            "            intermediate_size=config.moe_intermediate_size,  # only here\n",
        ),
    ),
    # the decoder
    "mlp only where it is MoE": _v(
        (
            '            self.mlp = ToyMLP(config, prefix=f"{prefix}.mlp")\n',
            '            self.dense = ToyMLP(config, prefix=f"{prefix}.mlp")\n',
        ),
    ),
    "mlp deleted again": _v(
        (
            "class ToyModel(",
            "class Hybrid(ToyDecoderLayer):\n    def __init__(self, *args, **kwargs):\n"
            "        super().__init__(*args, **kwargs)\n        del self.mlp\n\n\nclass ToyModel(",
        ),
    ),
    "two decoder classes, one without mlp": _v(
        (
            "class ToyModel(",
            "class Attention(nn.Module):\n    def __init__(self, config):\n"
            "        super().__init__()\n\n\nclass ToyModel(",
        ),
        (
            "            lambda prefix: ToyDecoderLayer(\n"
            '                config, layer_idx=int(prefix.split(".")[-1]), prefix=prefix\n'
            "            ),\n",
            "            lambda prefix: Attention(config)\n"
            '            if int(prefix.split(".")[-1]) in config.mlp_only_layers\n'
            "            else ToyDecoderLayer(\n"
            '                config, layer_idx=int(prefix.split(".")[-1]), prefix=prefix\n'
            "            ),\n",
        ),
    ),
    "block built by a variable": _v(
        (
            "        if layer_idx in config.mlp_only_layers:\n"
            '            self.mlp = ToyMLP(config, prefix=f"{prefix}.mlp")\n        else:\n'
            '            self.mlp = ToyMoE(config, prefix=f"{prefix}.mlp")\n',
            "        cls = ToyMLP if layer_idx in config.mlp_only_layers else ToyMoE\n"
            '        self.mlp = cls(config, prefix=f"{prefix}.mlp")\n',
        ),
    ),
    "block in a conditional expression": _v(
        (
            "        if layer_idx in config.mlp_only_layers:\n"
            '            self.mlp = ToyMLP(config, prefix=f"{prefix}.mlp")\n        else:\n'
            '            self.mlp = ToyMoE(config, prefix=f"{prefix}.mlp")\n',
            "        self.mlp = (\n            ToyMLP(config)\n"
            "            if layer_idx in config.mlp_only_layers\n"
            '            else ToyMoE(config, prefix=f"{prefix}.mlp")\n        )\n',
        ),
    ),
    "layer list in a nested function": _v(
        (
            "            lambda prefix: ToyDecoderLayer(\n"
            '                config, layer_idx=int(prefix.split(".")[-1]), prefix=prefix\n'
            "            ),\n",
            "            get_layer,\n",
        ),
        (
            CONFIG_LINE,
            "        self.config = config\n\n        def get_layer(prefix):\n"
            "            return ToyDecoderLayer(\n"
            '                config, layer_idx=int(prefix.split(".")[-1]), prefix=prefix\n'
            "            )\n\n        self.start_layer",
        ),
    ),
    "layers in a plain list": _v(
        (
            "self.start_layer, self.end_layer, self.layers = make_layers(",
            "self.a, self.b, self.layers = build_layers(",
        ),
        (
            "class ToyMLP",
            "def build_layers(*args, **kwargs):\n"
            "    return make_layers(*args, **kwargs)\n\n\nclass ToyMLP",
        ),
    ),
    "nested wrappers": Variant(
        MODEL
        + WRAPPER
        + WRAPPER.replace("ToyForCausalLM", "X")
        .replace("ToyForConditionalGeneration", "Outer")
        .replace("X", "ToyForConditionalGeneration"),
        {"served": "Outer", "root": "language_model.language_model.model."},
    ),
    "wrapper that assigns behind a return": Variant(
        change(
            MODEL + WRAPPER,
            ("prefix=prefix)\n\n    def load", "prefix=prefix)\n        return\n\n    def load"),
        ),
        {"served": "ToyForConditionalGeneration", "root": "language_model.model."},
    ),
    "wrapper with expert_weights of its own": Variant(
        change(
            MODEL + WRAPPER,
            (
                "prefix=prefix)\n\n    def load",
                "prefix=prefix)\n\n    def set_eplb_state(self, *args):\n        return None\n"
                "\n    def load",
            ),
        ),
        {"served": "ToyForConditionalGeneration", "root": "language_model.model."},
    ),
    # the loop
    "two loads": _v(
        (
            LOAD_CALL,
            '                if "gate" in weight_name:\n'
            + indent(LOAD_CALL)
            + "                else:\n"
            + indent(LOAD_CALL),
        ),
    ),
    "load only where the expert is local": _v(
        (
            LOAD_CALL,
            "                if expert_id in self.mine(name):\n" + indent(LOAD_CALL),
        ),
        (
            "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
            "        expert",
            "    def mine(self, name):\n"
            "        layer = self.layers[int(name.split('layers.')[1].split('.')[0])]\n"
            "        held = layer.mlp.experts.expert_map\n"
            "        return range(99) if held is None else held.mine\n\n"
            "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
            "        expert",
        ),
    ),
    "argument computed from the expert id": _v(
        (
            LOAD_CALL,
            "                target = expert_id\n"
            + LOAD_CALL.replace("shard_id=shard_id,", "shard_id=shard_id,").replace(
                "expert_id=expert_id", "expert_id=target"
            ),
        ),
    ),
    "loader gets a closure over the expert id": _v(
        (
            LOAD_CALL,
            "                where = {'expert_id': expert_id}\n"
            + LOAD_CALL.replace("expert_id=expert_id,", "**where,"),
        ),
    ),
    "expert id by position": _v(
        (
            LOAD_CALL,
            LOAD_CALL.replace("shard_id=shard_id", "shard_id").replace(
                "expert_id=expert_id", "expert_id"
            ),
        ),
    ),
    "break replaced by a flag": _v(
        (
            LOOP,
            NEVER_LOOP.replace(
                "                if weight_name not in name:\n",
                "                if loaded or weight_name not in name:\n",
            ),
        ),
    ),
    "never stops, name replaced in place": _v(
        (LOOP, NEVER_LOOP.replace("name_mapped", "name")),
    ),
    "handed, returns at the first": Variant(
        handed(change(HANDED, ("            loaded = True\n", "            return True\n")))
    ),
    "handed, name replaced in place": Variant(handed(change(HANDED, ("full_name", "name")))),
    "handed another name": Variant(
        handed(
            HANDED,
            change(HANDED_CALL, ("                name,\n", "                key,\n")).replace(
                "            if self.load_expert(",
                "            key = name\n            if self.load_expert(",
            ),
        )
    ),
    "handed a key that was renamed": Variant(
        handed(
            HANDED,
            change(HANDED_CALL, ("                name,\n", "                key,\n")).replace(
                "            if self.load_expert(",
                '            key = name.replace("moe.x", "experts")\n'
                "            if self.load_expert(",
            ),
        ),
        {},
    ),
    "handed twice": Variant(handed(HANDED, HANDED_CALL + HANDED_CALL)),
    "handed through a variable": Variant(
        handed(
            HANDED,
            "            entries = expert_params_mapping\n"
            + change(HANDED_CALL, ("expert_params_mapping", "entries")),
        )
    ),
    "breaks in an else": _v(
        (
            "                break\n",
            "                if loaded_weight is not None:\n                    break\n",
        ),
    ),
    "loop over a slice": _v(
        ("for mapping in expert_params_mapping", "for mapping in expert_params_mapping[:]")
    ),
    "loop over enumerate": _v(
        (
            "for mapping in expert_params_mapping",
            "for _, mapping in enumerate(expert_params_mapping)",
        )
    ),
    "tensors enumerated": _v(
        (TENSORS, "        for number, (name, loaded_weight) in enumerate(weights):\n"),
    ),
    "tensors in groups": _v(
        (
            TENSORS,
            "        for group, some in [('all', list(weights))]:\n"
            "          for name, loaded_weight in some:\n",
        ),
        (LOOP, indent(LOOP, 1)),
        ("            loaded_params.add(name)\n", "             loaded_params.add(name)\n"),
    ),
    "tensor as one variable": _v(
        (TENSORS, "        for tensor in weights:\n            name, loaded_weight = tensor\n"),
    ),
    "name renamed before the loop": _v(
        (
            TENSORS,
            "        for key, loaded_weight in weights:\n"
            '            name = key.replace("mlp.moe_", "mlp.experts.")\n',
        ),
    ),
    "name matched under another variable": _v(
        (
            "            for mapping in expert_params_mapping:\n",
            '            key = name.replace("expert.", "experts.")\n'
            "            for mapping in expert_params_mapping:\n",
        ),
        ("if weight_name not in name:", "if weight_name not in key:"),
        (
            "name = name.replace(weight_name, param_name)",
            "name = key.replace(weight_name, param_name)",
        ),
    ),
    "mapping made in the tensor loop": _v(
        (MAPPING, ""),
        (TENSORS, TENSORS + indent(MAPPING)),
    ),
    "mapping made between": _v(
        (MAPPING, ""),
        (LOOP, indent(MAPPING) + LOOP),
    ),
    "mapping extended": _v(
        (
            "        params_dict = dict",
            "        expert_params_mapping = [\n"
            '            (p, w.replace("experts.", "experts.e"), e, s)\n'
            "            for p, w, e, s in expert_params_mapping\n"
            "        ] + expert_params_mapping\n"
            "        params_dict = dict",
        ),
    ),
    "mapping re-assigned to hand-made entries": _v(
        (
            "        params_dict = dict",
            "        expert_params_mapping = [\n"
            '            (p, w.replace("experts.", "mlp.experts."), e, s)\n'
            "            for p, w, e, s in expert_params_mapping\n        ]\n"
            "        params_dict = dict",
        ),
        (
            "name = name.replace(weight_name, param_name)",
            'name = name.replace(weight_name, "mlp." + param_name)',
        ),
    ),
    "weight names cut": _v(
        (
            "        params_dict = dict",
            "        expert_params_mapping = [\n"
            '            (p, w.removeprefix("experts"), e, '
            "s) for p, w, e, s in expert_params_mapping\n"
            "        ]\n        params_dict = dict",
        ),
        (
            "name = name.replace(weight_name, param_name)",
            'name = name.replace("experts" + weight_name, param_name)',
        ),
    ),
    "mapping reversed in place": _v(
        (
            "        params_dict = dict",
            "        expert_params_mapping.reverse()\n        params_dict = dict",
        ),
    ),
    "mapping appended to in the tensor loop": _v(
        (
            TENSORS,
            "        mapping_of_all = expert_params_mapping\n        expert_params_mapping = []\n"
            + TENSORS
            + "            expert_params_mapping = mapping_of_all\n",
        ),
    ),
    "mapping call by position": _v(
        (
            '            ckpt_gate_proj_name="gate_proj",\n'
            '            ckpt_down_proj_name="down_proj",\n'
            '            ckpt_up_proj_name="up_proj",\n'
            "            num_experts=self.config.num_experts,\n",
            '            "gate_proj", "down_proj", "up_proj", self.config.num_experts\n',
        ),
    ),
    "mapping call by position, with R": _v(
        (
            '            ckpt_gate_proj_name="gate_proj",\n'
            '            ckpt_down_proj_name="down_proj",\n'
            '            ckpt_up_proj_name="up_proj",\n'
            "            num_experts=self.config.num_experts,\n",
            '            "gate_proj", "down_proj", "up_proj", self.config.num_experts, 0\n',
        ),
    ),
    "mapping call with keywords of a dictionary": _v(
        (
            "            num_experts=self.config.num_experts,\n",
            "            num_experts=self.config.num_experts,\n"
            '            **{"num_redundant_experts": 0},\n',
        ),
    ),
    "mapping call with R = 0": _v(
        (
            "            num_experts=self.config.num_experts,\n",
            "            num_experts=self.config.num_experts,\n"
            "            num_redundant_experts=0,\n",
        ),
    ),
    "mapping call twice": _v((MAPPING, MAPPING + MAPPING)),
    "mapping of two kinds": _v(
        (
            MAPPING,
            MAPPING
            + MAPPING.replace("        expert_params_mapping", "        other").replace(
                '"gate_proj"', '"w1"'
            ),
        ),
        ("for mapping in expert_params_mapping", "for mapping in expert_params_mapping + other"),
    ),
    "mapping in a conditional expression": _v(
        (
            "= FusedMoE.make_expert_params_mapping(",
            "= [] if not weights else FusedMoE.make_expert_params_mapping(",
        ),
    ),
    "mapping bound by functools": _v(
        ("FusedMoE.make_expert_params_mapping(\n", "(FusedMoE.make_expert_params_mapping)(\n"),
    ),
    "no mapping": _v((MAPPING, "        expert_params_mapping = []\n")),
    "no loop": _v((LOOP, "            pass\n")),
    "no FusedMoE": _v((EXPERTS_CALL, "        self.experts = None\n")),
    "no bases": _v(
        ("class ToyForCausalLM(nn.Module, SupportsPP)", "class ToyForCausalLM"),
        ("        loader = AutoWeightsLoader(self)\n", ""),
        (
            "return loader.load_weights(weights)",
            'return self.model.load_weights((n.removeprefix("model."), w) for n, w in weights)',
        ),
        ("AutoWeightsLoader, ", ""),
    ),
    "no load_weights in the causal class": _v(
        (
            "\n"
            "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            "",
        ),
        ("AutoWeightsLoader, ", ""),
        (
            "class ToyForCausalLM(nn.Module, SupportsPP):\n",
            "class ToyForCausalLM(nn.Module, SupportsPP):\n    def load_weights(self, weights):\n"
            "        return self.model.load_weights(\n"
            "            (n.removeprefix('model.'), w) for n, w in weights\n        )\n\n",
        ),
    ),
    "no weight name check": _v(
        ("                if weight_name not in name:\n                    continue\n", ""),
        (
            "name = name.replace(weight_name, param_name)",
            "if (name := name.replace(weight_name, param_name)) not in params_dict:\n"
            "                    continue",
        ),
    ),
    "second loop by position": _v(
        (
            LOOP,
            LOOP.replace(
                "            else:\n",
                "            else:\n"
                "                self.again(name, loaded_weight, "
                "expert_params_mapping, params_dict)\n",
                1,
            ),
        ),
        (
            "class ToyForCausalLM(",
            "def unused():\n    pass\n\n\nclass ToyForCausalLM(",
        ),
    ),
    # loops that are no loading
    "a range over something else": _v(
        (
            CAUSAL_END,
            CAUSAL_END + "\n    def forward(self, states, out):\n        for i in range(2):\n"
            "            state = states[i]\n            out(state, i)\n\n"
            "    def check(self):\n        seen = []\n"
            "        self.forward([5, 6], lambda s, i: seen.append((s, i)))\n"
            "        assert seen == [(5, 0), (6, 1)]\n",
        ),
        (
            "        loader = AutoWeightsLoader(self)\n",
            "        self.check()\n        loader = AutoWeightsLoader(self)\n",
        ),
    ),
    "a slice by an expert map that is none": _v(
        (
            CAUSAL_END,
            CAUSAL_END + "\n    def forward(self, table, expert_map):\n"
            "        rows = (expert_map != -1).nonzero().flatten()\n"
            "        return table[rows]\n",
        ),
    ),
    # layer code that loads
    "layer loads, backbone has a loader of its own": _v(
        (
            BACKBONE_LOADER,
            "    def load_weights(self, weights):\n        params = dict(self.named_parameters())\n"
            "        for name, tensor in weights:\n"
            "            expert = int(name.split('experts.')[1].split('.')[0])\n"
            "            kind = {'gate_proj': 'w1', 'up_proj': 'w3', 'down_proj': 'w2'}\n"
            "            shard = kind[name.split('.')[-2]]\n"
            "            head = name.split('experts.')[0]\n"
            "            mine = params[head + ('experts.w2_weight' if shard == 'w2' else "
            "'experts.w13_weight')]\n"
            "            mine.weight_loader(mine, tensor, name, shard, expert)\n"
            "        return set()\n",
        ),
        layer_loads=True,
    ),
    "layer loads, backbone renames": _v(
        (
            BACKBONE_LOADER,
            "    def load_weights(self, weights):\n        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(\n"
            "            (n.replace('packed_', 'experts.'), w) for n, w in weights\n        )\n",
        ),
        layer_loads=True,
        tensors="packed",
        out=1,
    ),
    "layer loads, weights renamed behind": _v(
        (BACKBONE_LOADER, ""),
        (
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(\n"
            "            (n.replace('packed_', 'experts.'), w) for n, w in weights\n        )\n",
        ),
        layer_loads=True,
        tensors="packed",
        out=1,
    ),
    "layer loads, weights renamed before": _v(
        (BACKBONE_LOADER, ""),
        (
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            "        weights = ((n.replace('packed_', 'experts.'), w) for n, w in weights)\n"
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
        ),
        layer_loads=True,
        tensors="packed",
        out=1,
    ),
    "layer loads, names of their own": _v(
        (BACKBONE_LOADER, ""),
        (
            '            prefix=f"{prefix}.experts",\n',
            '            prefix=f"{prefix}.experts",\n            ckpt_names=("w1", "w2", "w3"),\n',
        ),
        layer_loads=True,
    ),
    "layer loads, two loaders": _v(
        (BACKBONE_LOADER, ""),
        (
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            "        if self.is_last:\n            loader = AutoWeightsLoader(self)\n"
            "            return loader.load_weights(weights)\n"
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
        ),
        layer_loads=True,
        tensors="fused",
        out=1,
    ),
    "layer loads, weights held by another name": _v(
        (BACKBONE_LOADER, ""),
        (
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            "        mine = list(weights)\n        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(mine)\n",
        ),
        layer_loads=True,
        tensors="fused",
        out=1,
    ),
    # text
    "CRLF": Variant(MODEL.replace("\n", "\r\n")),
    "CRLF, yapf": Variant(yapf_style(MODEL).replace("\n", "\r\n")),
    "CR": Variant(MODEL.replace("\n", "\r")),
    "tabs": Variant(re.sub(r"^( {4})+", lambda m: "\t" * (len(m[0]) // 4), MODEL, flags=re.M)),
    "two spaces": Variant(
        re.sub(r"^( {4})+", lambda m: "  " * (len(m[0]) // 4), MODEL, flags=re.M)
    ),
    "no newline at the end": Variant(MODEL.rstrip("\n")),
    "form feed": Variant(MODEL.replace("\n\nclass", "\n\f\nclass")),
    "BOM": Variant("\ufeff" + MODEL),
    "null byte": Variant(MODEL + "\0"),
    "docstring that looks like code": Variant(
        change(
            MODEL,
            (
                '"""A toy mixture of experts."""',
                '"""A toy.\n\nclass ToyMoE:\n    def __init__(self): ...\n'
                "\nfrom .utils import nothing\n"
                'import torch\n"""',
            ),
        )
    ),
    "docstring that looks like code, behind": Variant(
        MODEL
        + '\n\nEXAMPLE = """\nclass ToyMoE:\n    def __init__(self):\n        self.experts = 1\n\n'
        'class ToyForCausalLM:\n    pass\n\nfrom .utils import nothing\n"""\n'
    ),
    "code points beyond ASCII": Variant(change(MODEL, ("A toy mixture", "Ein Gemisch öäü 专家"))),
    "decorated": _v(
        ("class ToyForCausalLM", "@keep\nclass ToyForCausalLM"),
        ("class ToyModel", "@keep\nclass ToyModel"),
        ("class ToyMoE", "@keep\nclass ToyMoE"),
        ("class ToyMLP", "def keep(cls):\n    return cls\n\n\nclass ToyMLP"),
    ),
    "comments in the bases": _v(
        (
            "class ToyForCausalLM(nn.Module, SupportsPP):",
            "class ToyForCausalLM(\n    nn.Module,  # as ever\n    SupportsPP,\n):",
        ),
    ),
    "comments in an import": _v(
        (
            "from .utils import AutoWeightsLoader, "
            "is_pp_missing_parameter, make_layers, maybe_prefix\n",
            "from .utils import (\n    AutoWeightsLoader,  # noqa: F401\n"
            "    is_pp_missing_parameter,\n    make_layers,\n    maybe_prefix,\n)\n",
        ),
    ),
    "comments in an import, yapf": Variant(
        yapf_style(
            change(
                MODEL,
                (
                    "from .utils import AutoWeightsLoader, is_pp_missing_parameter, make_layers, "
                    "maybe_prefix\n",
                    "from .utils import (AutoWeightsLoader,  # needed\n"
                    "                    is_pp_missing_parameter, make_layers, maybe_prefix)\n",
                ),
            )
        )
    ),
    "absolute imports": _v(
        ("from .interfaces", "from vllm.model_executor.models.interfaces"),
        ("from .utils", "from vllm.model_executor.models.utils"),
    ),
    "imports in a try": _v(
        (
            "from .interfaces import SupportsPP\n",
            "try:\n    from .interfaces import SupportsPP\nexcept ImportError:\n    raise\n",
        ),
    ),
    "PPMissingLayer from elsewhere": _v(
        ("import torch\n", "import torch\n\nPPMissingLayer = object\n"),
    ),
    "get_ep_group of another kind": _v(
        (
            "class ToyMLP",
            "def get_ep_group():\n    return None\n\n\n"
            "assert get_ep_group() is None\n\n\nclass ToyMLP",
        ),
    ),
    "MixtureOfExperts of another kind": _v(
        (
            "class ToyMLP",
            "class MixtureOfExperts:\n    pass\n\n\nassert MixtureOfExperts()\n\n\nclass ToyMLP",
        ),
    ),
    "future annotations": Variant(
        change(
            MODEL,
            ("from collections.abc", "from __future__ import annotations\n\nfrom collections.abc"),
        )
    ),
    "torch not imported": _v(("import torch\n", ""), ("torch.Tensor", "nn.Tensor")),
    "block class twice": _v(
        (
            "class ToyDecoderLayer",
            MODEL[MODEL.index("class ToyMoE") : MODEL.index("class ToyDecoderLayer")]
            + "class ToyDecoderLayer",
        ),
    ),
    "two blocks": _v(
        (
            "class ToyDecoderLayer",
            MODEL[MODEL.index("class ToyMoE") : MODEL.index("class ToyDecoderLayer")].replace(
                "ToyMoE", "OtherMoE"
            )
            + "class ToyDecoderLayer",
        ),
        (
            "            self.mlp = ToyMLP(config, prefix",
            "            self.mlp = OtherMoE(config, prefix",
        ),
    ),
    "a subclass of the block": _v(
        (
            "class ToyDecoderLayer",
            "class SubMoE(ToyMoE):\n    pass\n\n\nclass ToyDecoderLayer",
        ),
        ("self.mlp = ToyMoE(", "self.mlp = SubMoE("),
    ),
    "block in a base class": _v(
        (
            "class ToyMoE(nn.Module):",
            "class Base(nn.Module):",
        ),
        ("class ToyDecoderLayer", "class ToyMoE(Base):\n    pass\n\n\nclass ToyDecoderLayer"),
    ),
    "classes the other way round": Variant(
        (
            lambda parts: (
                parts[0]
                + "\n\n\nclass "
                + "\n\n\nclass ".join(p.rstrip() for p in reversed(parts[1:]))
                + "\n"
            )
        )(MODEL.split("\n\n\nclass "))
    ),
    "two loops": _v(
        (
            LOOP,
            NEVER_LOOP[: NEVER_LOOP.index("            if loaded or")] + NEVER_LOOP,
        ),
    ),
}
"""Right or refused; nothing else."""

DAMAGE |= {
    "expert id read behind the loop": _v(
        (
            "                break\n            else:\n",
            "                assert int(weight_name.split('.')[1]) == expert_id\n"
            "                break\n            else:\n",
        ),
    ),
    "mapping made in the constructor, before the config": _v(
        (
            MAPPING,
            "        expert_params_mapping = self.entries\n",
        ),
        (
            CONFIG_LINE,
            MAPPING.replace("expert_params_mapping =", "self.entries =").replace(
                "self.config.num_experts", "config.num_experts"
            )
            + CONFIG_LINE,
        ),
    ),
    "mapping made in the constructor": _v(
        (MAPPING, "        expert_params_mapping = self.entries\n"),
        (
            CONFIG_LINE,
            "        self.config = config\n"
            + MAPPING.replace("expert_params_mapping =", "self.entries =")
            + "        self.start_layer",
        ),
    ),
    "loop over an attribute": _v(
        (MAPPING, ""),
        ("for mapping in expert_params_mapping", "for mapping in self.entries"),
        (
            CONFIG_LINE,
            "        self.config = config\n"
            + MAPPING.replace("expert_params_mapping =", "self.entries =")
            + "        self.start_layer",
        ),
    ),
    "mapping made by the causal class": _v(
        (MAPPING, ""),
        (
            "    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:\n"
            "        params_dict",
            "    def load_weights(self, weights, expert_params_mapping) -> set[str]:\n"
            "        params_dict",
        ),
        (
            "        loader = AutoWeightsLoader(self)\n"
            "        return loader.load_weights(weights)\n",
            MAPPING
            + "        pairs = ((n.removeprefix('model.'), w) for n, w in weights)\n"
            + "        return self.model.load_weights(pairs, expert_params_mapping)\n",
        ),
        ("AutoWeightsLoader, ", ""),
    ),
    "loading in a nested function": _v(
        (
            LOOP,
            "            def load(name=name, loaded_weight=loaded_weight):\n"
            "                for mapping in expert_params_mapping:\n"
            "                    param_name, weight_name, expert_id, shard_id = mapping\n"
            "                    if weight_name not in name:\n                        continue\n"
            "                    full = name.replace(weight_name, param_name)\n"
            "                    if is_pp_missing_parameter(full, self):\n"
            "                        continue\n"
            "                    params_dict[full].weight_loader(\n"
            "                        params_dict[full], loaded_weight, full, shard_id=shard_id,\n"
            "                        expert_id=expert_id,\n                    )\n"
            "                    return\n\n            load()\n",
        ),
    ),
    "block may end early": _v(
        (
            BLOCK_INIT,
            BLOCK_INIT + "        if int(prefix.split('.')[-2]) in config.mlp_only_layers:\n"
            "            return\n",
        ),
        ("        if layer_idx in config.mlp_only_layers:\n", "        if layer_idx < 0:\n"),
    ),
    "block dense in some layers": _v(
        (
            EXPERTS_CALL,
            "        if int(prefix.split('.')[-2]) in config.mlp_only_layers:\n"
            "            self.experts = ToyMLP(config)\n        else:\n" + indent(EXPERTS_CALL),
        ),
        ("        if layer_idx in config.mlp_only_layers:\n", "        if layer_idx < 0:\n"),
    ),
    "block without experts in some layers": _v(
        (
            EXPERTS_CALL,
            "        self.experts = None\n"
            "        if int(prefix.split('.')[-2]) not in config.mlp_only_layers:\n"
            + indent(EXPERTS_CALL),
        ),
        ("        if layer_idx in config.mlp_only_layers:\n", "        if layer_idx < 0:\n"),
    ),
    "mlp wrapped behind": _v(
        (
            '            self.mlp = ToyMoE(config, prefix=f"{prefix}.mlp")\n',
            '            self.mlp = ToyMoE(config, prefix=f"{prefix}.mlp")\n'
            "        self.mlp = Checked(self.mlp)\n",
        ),
        (
            "class ToyDecoderLayer",
            "class Checked(nn.Module):\n    def __init__(self, inner):\n"
            "        super().__init__()\n        self.__dict__.update(vars(inner))\n\n\n"
            "class ToyDecoderLayer",
        ),
    ),
    "experts wrapped behind": _v(
        (
            EXPERTS_CALL,
            EXPERTS_CALL + "\n        self.experts = Checked(self.experts)\n",
        ),
        (
            "class ToyMoE",
            "class Checked(nn.Module):\n    def __init__(self, inner):\n"
            "        super().__init__()\n        self.__dict__.update(vars(inner))\n\n\n"
            "class ToyMoE",
        ),
    ),
    "layers taken in another order": _v(
        (
            '            prefix=f"{prefix}.layers",\n        )\n',
            '            prefix=f"{prefix}.layers",\n        )\n'
            "        self.layers = nn.ModuleList(list(self.layers))\n",
        ),
    ),
    "model built twice": _v(
        (
            CAUSAL_END,
            "        if self.config is None:\n            self.model = ToyModel(\n"
            "                vllm_config=vllm_config, prefix=prefix\n            )\n" + CAUSAL_END,
        ),
    ),
    "model replaced behind": _v(
        (
            CAUSAL_END,
            "        self.model = self.compiled(self.model)\n"
            + CAUSAL_END
            + "\n    def compiled(self, model):\n        return model\n",
        ),
    ),
    "members set in a base class": _v(
        (
            "class ToyForCausalLM(nn.Module, SupportsPP):\n",
            "class Base(nn.Module):\n    def __init__(self, vllm_config):\n"
            "        super().__init__()\n        self.num_redundant_experts = 0\n"
            "        self.moe_layers = 'mine'\n\n    def check(self):\n"
            "        assert self.moe_layers == 'mine'\n\n\n"
            "class ToyForCausalLM(Base, SupportsPP):\n",
        ),
        (
            "        super().__init__()\n        self.config = vllm_config",
            "        super().__init__(vllm_config)\n        self.config = vllm_config",
        ),
        (
            "        loader = AutoWeightsLoader(self)\n",
            "        self.check()\n        loader = AutoWeightsLoader(self)\n",
        ),
    ),
    "constructor of a base class": _v(
        (
            "class ToyForCausalLM(nn.Module, SupportsPP):\n",
            "class Base(nn.Module):\n",
        ),
        (
            CAUSAL_END,
            CAUSAL_END + "\n\nclass ToyForCausalLM(Base, SupportsPP):\n"
            "    def more(self):\n        return 1\n",
        ),
    ),
    "base line continued by a backslash": _v(
        (
            "class ToyForCausalLM(nn.Module, SupportsPP):",
            "class ToyForCausalLM(nn.Module, \\\n                     SupportsPP):",
        ),
    ),
    "import continued by a backslash": _v(
        (
            "from .utils import AutoWeightsLoader, is_pp_missing_parameter, ",
            "from .utils import AutoWeightsLoader, is_pp_missing_parameter, \\\n    ",
        ),
        ("from vllm.config import VllmConfig\n", "from vllm.config import \\\n    VllmConfig\n"),
    ),
    "call continued by a backslash": _v(
        (LOAD_CALL, LOAD_CALL.replace("weight_loader(\n", "weight_loader \\\n(\n", 1)),
    ),
    "load call on one line": _v(
        (
            LOAD_CALL,
            "                " + re.sub(r"\s*\n\s*", " ", LOAD_CALL.strip()) + "  # noqa: E501\n",
        ),
    ),
    "comments in the load call": _v(
        (
            LOAD_CALL,
            LOAD_CALL.replace(
                "loaded_weight,\n", "loaded_weight,  # as it is\n                    # by name\n"
            ),
        ),
    ),
    "string in the load call over lines": _v(
        (
            LOAD_CALL,
            LOAD_CALL.replace(
                "                    name,\n", '                    """a\nb""" and name,\n'
            ),
        ),
    ),
    "load call in a with": _v(
        (
            LOAD_CALL,
            "                with self.quiet():\n" + indent(LOAD_CALL),
        ),
        (
            BACKBONE_LOADER[: BACKBONE_LOADER.index("\n") + 1],
            "    def quiet(self):\n        import contextlib\n\n"
            "        return contextlib.nullcontext()\n\n"
            + BACKBONE_LOADER[: BACKBONE_LOADER.index("\n") + 1],
        ),
    ),
    "load call in a try": _v(
        (
            LOAD_CALL,
            "                try:\n"
            + indent(LOAD_CALL)
            + "                except KeyError:\n                    raise\n",
        ),
    ),
    "load returns what is added up": _v(
        (
            LOAD_CALL,
            "                total = 0\n"
            + LOAD_CALL.replace("weight_loader(\n", "total = weight_loader(\n", 1).replace(
                "expert_id=expert_id,\n",
                "expert_id=expert_id,\n                    return_success=True,\n",
            ),
        ),
    ),
    "loader chosen by the expert": _v(
        (
            "                weight_loader = param.weight_loader\n",
            "                weight_loader = self.loader_of(param, expert_id)\n",
        ),
        (
            BACKBONE_LOADER[: BACKBONE_LOADER.index("\n") + 1],
            "    def loader_of(self, param, expert_id):\n"
            "        def load(p, w, n, shard_id, **_):\n"
            "            return param.weight_loader(p, w, n, shard_id, expert_id)\n\n"
            "        return load\n\n" + BACKBONE_LOADER[: BACKBONE_LOADER.index("\n") + 1],
        ),
    ),
    "stacked loop shadows the expert's names": _v(
        (
            LOOP,
            LOOP.replace(
                "            for mapping in",
                "            for expert_id, weight_name in enumerate(['no']):\n"
                "                if weight_name in name.split('.'):\n"
                "                    name = str(expert_id)\n"
                "            for mapping in",
            ),
        ),
    ),
    "loop in a while": _v(
        (
            TENSORS,
            "        pending = list(weights)\n        while pending:\n"
            "            name, loaded_weight = pending.pop()\n",
        ),
    ),
    "tensors sorted": _v(
        (TENSORS, "        for name, loaded_weight in sorted(weights, key=str):\n")
    ),
    "tensors without names": _v(
        (TENSORS, "        for name, (loaded_weight,) in [(n, (w,)) for n, w in weights]:\n"),
    ),
    "three names in the tensor loop": _v(
        (TENSORS, "        for name, loaded_weight, _ in [(n, w, 0) for n, w in weights]:\n"),
    ),
    "async constructor of a nested class": _v(
        (
            "class ToyMoE(nn.Module):\n",
            "class ToyMoE(nn.Module):\n    class Inner:\n        def __init__(self):\n"
            "            self.experts = None\n\n",
        ),
    ),
    "type comment and overloads": _v(
        (
            "class ToyMLP(nn.Module):\n",
            "class ToyMLP(nn.Module):\n    def forward(self):  # type: () -> None\n"
            "        return None\n\n",
        ),
    ),
    "layer loads, own loop over ranges": _v(
        (
            BACKBONE_LOADER,
            "    def load_weights(self, weights):\n"
            "        params = dict(self.named_parameters())\n"
            "        entries = [\n"
            '            ("experts.w13_weight", "experts.gate_up_proj"),\n'
            '            ("experts.w2_weight", "experts.down_proj"),\n        ]\n'
            "        for name, tensor in weights:\n"
            "            for param_name, weight_name in entries:\n"
            "                if weight_name not in name:\n                    continue\n"
            "                param = params[name.replace(weight_name, param_name)]\n"
            "                parts = {'w2': tensor}\n"
            "                if 'gate_up' in name:\n"
            "                    parts = dict(zip(('w1', 'w3'), tensor.chunk(2, dim=1)))\n"
            "                for shard, part in parts.items():\n"
            "                    for expert_id in range(part.shape[0]):\n"
            "                        one = part[expert_id]\n"
            "                        param.weight_loader(\n"
            "                            param, one, name, shard_id=shard, expert_id=expert_id\n"
            "                        )\n"
            "                break\n"
            "        return set()\n",
        ),
        layer_loads=True,
        tensors="fused",
        out=1,
    ),
    "layer fills, own loop over ranges": _v(
        (
            BACKBONE_LOADER,
            "    def load_weights(self, weights):\n"
            "        params = dict(self.named_parameters())\n"
            "        entries = [\n"
            '            ("experts.w13_weight", "experts.gate_up_proj"),\n'
            '            ("experts.w2_weight", "experts.down_proj"),\n        ]\n'
            "        for name, tensor in weights:\n"
            "            for param_name, weight_name in entries:\n"
            "                if weight_name not in name:\n                    continue\n"
            "                param = params[name.replace(weight_name, param_name)]\n"
            "                parts = {'w2': tensor}\n"
            "                if 'gate_up' in name:\n"
            "                    parts = dict(zip(('w1', 'w3'), tensor.chunk(2, dim=1)))\n"
            "                for shard, part in parts.items():\n"
            "                    for expert_id in range(part.shape[0]):\n"
            "                        one = part[expert_id]\n"
            "                        param.weight_loader(\n"
            "                            param, one, name, shard_id=shard, expert_id=expert_id\n"
            "                        )\n"
            "                break\n"
            "        return set()\n",
        ),
        layer_loads="fills",
        tensors="fused",
        out=1,
    ),
    "names in other scripts": _v(("ToyMLP", "Täy_MLP"), ("hidden_states", "ä")),
    "a class of the same name inside a function": Variant(
        MODEL + "\n\ndef make():\n    class ToyMoE:\n        experts = None\n\n    return ToyMoE\n"
    ),
    "a class redefined in a branch": Variant(
        MODEL
        + "\n\nif not MODELS_ON:\n\n    class ToyForCausalLM:\n        pass\n".replace(
            "MODELS_ON", "isinstance(1, int)"
        )
    ),
    "served class assigned to another name": Variant(
        change(MODEL, ("class ToyForCausalLM(", "class _Toy(")) + "\n\nToyForCausalLM = _Toy\n"
    ),
}
