"""A tiny tree in vLLM's style, and a model file with interchangeable parts."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import transforms_oracle as oracle
from eplb_codegen.families import Family
from eplb_codegen.generate import Generator, Result
from eplb_codegen.planning.plan import State
from eplb_codegen.source.tree import SourceTree

Change = tuple[str, str]

MODEL_PATH = "vllm/model_executor/models/toy_moe.py"

PARALLEL = """
from dataclasses import dataclass

@dataclass
class EPLBConfig:
    num_redundant_experts: int = 0

@dataclass
class ParallelConfig:
    enable_eplb: bool = False
    {where}

@dataclass
class VllmConfig:
    parallel_config: ParallelConfig = None
    model_config: object = None
    quant_config: object = None

def get_current_vllm_config() -> VllmConfig: ...
"""

LAYER = """
class FusedMoE:
    def __init__(self, num_experts, top_k, hidden_size, intermediate_size, prefix="",
                 num_expert_group=None, topk_group=None, enable_eplb=False,
                 num_redundant_experts=0): ...

    def get_expert_weights(self): ...
    def update_expert_map(self): ...
{load}
    @classmethod
    def make_expert_params_mapping(cls, ckpt_gate_proj_name, ckpt_down_proj_name,
                                   ckpt_up_proj_name, num_experts, num_redundant_experts=0): ...
"""

LAYER_FILLS = """
    def load_weights(self, weights):
        for name, tensor in weights:
            yield name
"""

LAYER_LOADS = """
    def load_weights(self, weights):
        transposed = self.is_fused_checkpoint_transposed
        for name, tensor in weights:
            for expert_id, one in enumerate(tensor, start=0):
                yield name
"""

INTERFACES = """
from typing import Protocol, runtime_checkable

class SupportsPP(Protocol):
    ...

@runtime_checkable
class MixtureOfExperts(Protocol):
    expert_weights: list
    num_moe_layers: int
    num_expert_groups: int
    num_logical_experts: int
    num_physical_experts: int
    num_local_physical_experts: int
    num_routed_experts: int
    num_shared_experts: int
    num_redundant_experts: int
    moe_layers: list

    def set_eplb_state(self, expert_load_view, logical_to_physical_map,
                       logical_replica_count) -> None:
        {setter}

    def update_physical_experts_metadata(self, num_physical_experts,
                                         num_local_physical_experts) -> None: ...

def is_mixture_of_experts(model: object) -> bool:
    return isinstance(model, MixtureOfExperts)
"""

APPENDS = """for i, layer in enumerate(self.moe_layers):
            self.expert_weights.append(layer.get_expert_weights())
            layer.set_eplb_state(moe_layer_idx=i, expert_load_view=expert_load_view,
                                 logical_to_physical_map=logical_to_physical_map,
                                 logical_replica_count=logical_replica_count)"""

SETTERS = {
    "abstract": "...",
    "appends": APPENDS,
    "resets": f"self.expert_weights = []\n        {APPENDS}",
}

UTILS = """
class PPMissingLayer: ...
class AutoWeightsLoader: ...
def is_pp_missing_parameter(name, model): ...
def make_layers(n, fn, prefix): ...
def maybe_prefix(a, b): ...
"""

REGISTRY = '_TEXT = {{"ToyForCausalLM": ("toy_moe", "{served}")}}\n'

MODEL = '''
# SPDX-License-Identifier: Apache-2.0
"""A toy mixture of experts."""

from collections.abc import Iterable

import torch
from torch import nn

from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.fused_moe import FusedMoE

from .interfaces import SupportsPP
from .utils import AutoWeightsLoader, is_pp_missing_parameter, make_layers, maybe_prefix


class ToyMLP(nn.Module):
    def __init__(self, config, prefix: str = ""):
        super().__init__()
        self.prefix = prefix


class ToyMoE(nn.Module):
    def __init__(self, config, prefix: str = ""):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.experts = FusedMoE(
            num_experts=config.num_experts,
            top_k=config.num_experts_per_tok,
            hidden_size=config.hidden_size,
            intermediate_size=config.moe_intermediate_size,
            prefix=f"{prefix}.experts",
        )

    def forward(self, hidden_states):
        return self.experts(hidden_states, hidden_states)


class ToyDecoderLayer(nn.Module):
    def __init__(self, config, layer_idx: int, prefix: str = ""):
        super().__init__()
        if layer_idx in config.mlp_only_layers:
            self.mlp = ToyMLP(config, prefix=f"{prefix}.mlp")
        else:
            self.mlp = ToyMoE(config, prefix=f"{prefix}.mlp")


class ToyModel(nn.Module):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        config = vllm_config.model_config.hf_config
        self.config = config
        self.start_layer, self.end_layer, self.layers = make_layers(
            config.num_hidden_layers,
            lambda prefix: ToyDecoderLayer(
                config, layer_idx=int(prefix.split(".")[-1]), prefix=prefix
            ),
            prefix=f"{prefix}.layers",
        )

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        expert_params_mapping = FusedMoE.make_expert_params_mapping(
            ckpt_gate_proj_name="gate_proj",
            ckpt_down_proj_name="down_proj",
            ckpt_up_proj_name="up_proj",
            num_experts=self.config.num_experts,
        )
        params_dict = dict(self.named_parameters())
        loaded_params: set[str] = set()
        for name, loaded_weight in weights:
            for mapping in expert_params_mapping:
                param_name, weight_name, expert_id, shard_id = mapping
                if weight_name not in name:
                    continue
                name = name.replace(weight_name, param_name)
                if is_pp_missing_parameter(name, self):
                    continue
                param = params_dict[name]
                weight_loader = param.weight_loader
                weight_loader(
                    param,
                    loaded_weight,
                    name,
                    shard_id=shard_id,
                    expert_id=expert_id,
                )
                break
            else:
                if is_pp_missing_parameter(name, self):
                    continue
                param = params_dict[name]
                param.weight_loader(param, loaded_weight)
            loaded_params.add(name)
        return loaded_params


class ToyForCausalLM(nn.Module, SupportsPP):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.config = vllm_config.model_config.hf_config
        self.model = ToyModel(
            vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model")
        )
        self.is_last = get_pp_group().is_last_rank

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights)
'''.lstrip()

LOOP = MODEL[
    MODEL.index("            for mapping in") : MODEL.index("            loaded_params.add")
]
MAPPING = MODEL[
    MODEL.index("        expert_params_mapping =") : MODEL.index("        params_dict =")
]
LOAD_CALL = LOOP[
    LOOP.index("                weight_loader(\n") : LOOP.index("                break")
]
EXPERTS_CALL = MODEL[
    MODEL.index("        self.experts =") : MODEL.index("    def forward")
].rstrip()
BACKBONE_LOADER = MODEL[
    MODEL.index("    def load_weights") : MODEL.index("\n\nclass ToyForCausalLM")
]

WRAPPER = """

class ToyForConditionalGeneration(nn.Module, SupportsPP):
    def __init__(self, *, vllm_config: VllmConfig, prefix: str = ""):
        super().__init__()
        self.language_model = ToyForCausalLM(vllm_config=vllm_config, prefix=prefix)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loader = AutoWeightsLoader(self)
        return loader.load_weights(weights)
"""


def change(source: str, *changes: Change) -> str:
    """The source with each text replaced, everywhere; a text that is not there is an error."""
    for old, new in changes:
        assert old in source, f"not in the source: {old!r}"
        source = source.replace(old, new)
    return source


def ruff_format(source: str) -> str:
    done = subprocess.run(
        [str(Path(sys.executable).parent / "ruff"), "format", "--isolated", "--no-cache", "-"],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout


def yapf_style(source: str) -> str:
    """Blank lines below `class`, as files had them until 0.11.0."""
    lines = []
    for line in source.split("\n"):
        lines.append(line)
        if line.startswith("class "):
            lines.append("")
    return "\n".join(lines)


def interfaces(setting: str) -> str:
    return INTERFACES.format(setter=SETTERS[setting])


def tree(
    folder: Path,
    model: str,
    setting: str = "appends",
    in_eplb_config: bool = True,
    layer_loads: bool | str = False,
    served: str = "ToyForCausalLM",
    others: dict[str, str] | None = None,
) -> SourceTree:
    where = "eplb_config: EPLBConfig = None" if in_eplb_config else "num_redundant_experts: int = 0"
    files = {
        "vllm/__init__.py": "",
        "vllm/config.py": PARALLEL.format(where=where),
        "vllm/distributed/__init__.py": "def get_ep_group(): ...\ndef get_pp_group(): ...\n",
        "vllm/model_executor/__init__.py": "",
        "vllm/model_executor/layers/__init__.py": "",
        "vllm/model_executor/layers/fused_moe/__init__.py": (
            "from vllm.model_executor.layers.fused_moe.layer import FusedMoE\n"
        ),
        "vllm/model_executor/layers/fused_moe/layer.py": LAYER.format(
            load={"fills": LAYER_FILLS, True: LAYER_LOADS, False: ""}[layer_loads]
        ),
        "vllm/model_executor/models/__init__.py": "",
        "vllm/model_executor/models/interfaces.py": interfaces(setting),
        "vllm/model_executor/models/utils.py": UTILS,
        "vllm/model_executor/models/registry.py": REGISTRY.format(served=served),
        MODEL_PATH: model,
        **(others or {}),
    }
    for path, text in files.items():
        file = folder / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(text.encode())
    return SourceTree(folder, "0.0.0", "toy")


def generate(source_tree: SourceTree, files: Iterable[str] = ("toy_moe.py",)) -> Result:
    return Generator(source_tree).generate(Family("toy_moe", tuple(files)))


def patched(source_tree: SourceTree) -> str:
    result = generate(source_tree)
    assert result.state is State.ADDED, result.reason
    return result.files[0].patched


def machine(source: str, setting: str = "appends", in_eplb_config: bool = True) -> oracle.Machine:
    return oracle.Machine(
        protocol_source=interfaces(setting),
        in_eplb_config=in_eplb_config,
        sources={"toy_moe": source},
    )


def verdict(
    folder: Path,
    model: str,
    *,
    setting: str = "appends",
    in_eplb_config: bool = True,
    layer_loads: bool | str = False,
    served: str = "ToyForCausalLM",
    attribute: str = "mlp",
    root: str = "model.",
    tensors: str = "per_expert",
    out: int = 2,
    shapes: Iterable[tuple[int, int, int]] = oracle.SHAPES,
    experts: str = "experts",
) -> str:
    """What the tool makes of a model: "right", "refused: why", "native: ..." or "WRONG: how"."""
    at = tree(folder, model, setting, in_eplb_config, layer_loads, served)
    result = generate(at)
    if result.state is State.UNRECOGNISED:
        return f"refused: {result.reason}"
    if result.state is not State.ADDED:
        return f"{result.state.value}: {result.reason}"
    try:
        wrong = check(
            machine(result.files[0].patched, setting, in_eplb_config),
            served,
            attribute,
            root,
            tensors,
            out,
            shapes,
        )
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    return f"WRONG: {wrong[0]}" if wrong else "right"


def check(
    fake: oracle.Machine,
    served: str,
    attribute: str = "mlp",
    root: str = "model.",
    tensors: str = "per_expert",
    out: int = 2,
    shapes: Iterable[tuple[int, int, int]] = oracle.SHAPES,
    stem: str = "toy_moe",
) -> list[str]:
    """All that a generated model must do; what it does not."""
    module = fake.load(stem)
    wrong: list[str] = []
    with fake.installed():
        cls = getattr(module, served)
        for world in oracle.worlds(shapes):
            model = fake.build(cls, world)
            model.load_weights(oracle.shuffled(feed(world, tensors, attribute, root, out)))
            if len(fake.recorder.layers) != world.layers:
                wrong.append("not every layer was built")
            wrong += oracle.faults(fake)
            wrong += members(fake, model)
        wrong += off(fake, cls)
        wrong += empty_stage(fake, cls)
        wrong += uneven(fake, cls)
    return wrong


def feed(world: oracle.World, tensors: str, attribute: str, root: str, out: int) -> list[Any]:
    """The checkpoint's tensors; "packed" ones are fused under a name that is not vLLM's."""
    if tensors == "per_expert":
        return oracle.per_expert(world, attribute, root)
    given = oracle.fused(world, attribute, root, out)
    if tensors == "packed":
        return [(name.replace("experts.", "packed_"), tensor) for name, tensor in given]
    return given


def members(fake: oracle.Machine, model: Any) -> list[str]:
    """The protocol's members and methods, and what they do when they are called again."""
    world = fake.world
    mine = set(range(*world.mine)) - world.dense
    want = {
        "num_moe_layers": len(mine),
        "num_logical_experts": world.experts,
        "num_physical_experts": world.experts + world.redundant,
        "num_local_physical_experts": world.local,
        "num_routed_experts": world.experts,
        "num_redundant_experts": world.redundant,
        "moe_layers": fake.recorder.layers,
    }
    wrong = [
        f"{world}: {name} is {getattr(model, name, 'missing')}, wanted {value}"
        for name, value in want.items()
        if getattr(model, name, None) != value
    ]
    for name in ("num_shared_experts", "num_expert_groups"):
        if not isinstance(getattr(model, name, None), int):
            wrong.append(f"{name} is not set")
    if not sys.modules[f"{oracle.MODELS}.interfaces"].is_mixture_of_experts(model):
        wrong.append("not a mixture of experts by the release's own test")
    return wrong or [*state_set_twice(fake, model), *updated(fake, model)]


def state_set_twice(fake: oracle.Machine, model: Any) -> list[str]:
    wrong = []
    for _ in range(2):
        fake.recorder.states.clear()
        model.set_eplb_state("loads", "map", "counts")
        if len(model.expert_weights) != len(fake.recorder.layers):
            wrong.append("set_eplb_state twice: expert_weights doubled")
        if [s[0] for s in fake.recorder.states] != fake.recorder.layers:
            wrong.append("set_eplb_state did not reach every layer once")
    return wrong


def updated(fake: oracle.Machine, model: Any) -> list[str]:
    """Twice as many ranks of the same size: what changes is R, here and in every block."""
    world = fake.world
    if not hasattr(model, "update_physical_experts_metadata"):
        return []
    physical = 2 * (world.experts + world.redundant)
    model.update_physical_experts_metadata(physical, world.local)
    wrong = []
    if fake.recorder.updated != fake.recorder.layers:
        wrong.append("update_physical_experts_metadata did not reach every layer")
    new = (physical, world.local, physical - world.experts)
    kinds = ("physical_experts", "local_physical_experts", "redundant_experts")
    if tuple(getattr(model, f"num_{k}") for k in kinds) != new:
        wrong.append("the model's own numbers are the old ones")
    if any(tuple(getattr(b, f"n_{k}") for k in kinds) != new for b in oracle.blocks(model)):
        wrong.append("a block's numbers are the old ones")
    return wrong


def off(fake: oracle.Machine, cls: type) -> list[str]:
    """Without EPLB."""
    fake.build(cls, oracle.World(4, 0, 1, eplb=False))
    return []


STAGE = oracle.World(4, 2, 2, 1, layers=4, mine=(1, 3))
"""A stage between layers of others."""
EMPTY = oracle.World(4, 2, 2, layers=4, mine=(1, 3), dense=frozenset({0, 1, 2}))
"""A stage of dense layers between layers of others."""
BEHIND = oracle.World(4, 2, 2, layers=6, mine=(2, 6), dense=frozenset({0, 2, 4}))
"""A stage that begins with a dense layer."""


def empty_stage(fake: oracle.Machine, cls: type) -> list[str]:
    """A pipeline stage that has dense layers only, and one that has such, too."""
    model = fake.build(cls, EMPTY)
    wrong = []
    if fake.recorder.layers or model.num_moe_layers != 0 or list(model.moe_layers):
        wrong.append("a stage without MoE layers reports some")
    if hasattr(model, "update_physical_experts_metadata"):
        model.update_physical_experts_metadata(6, 3)
    model.set_eplb_state("loads", "map", "counts")
    if list(model.expert_weights):
        wrong.append("a stage without MoE layers has experts' weights")
    wrong += members(fake, fake.build(cls, BEHIND))
    return wrong


def uneven(fake: oracle.Machine, cls: type) -> list[str]:
    """(E + R) not divisible by ep is told before anything is built on it."""
    try:
        fake.build(cls, oracle.World(6, 3, 4))
    except ValueError as error:
        told = str(error)
        missing = [n for n in ("6", "3", "4", "6.") if n not in told]
        return [f"the error for uneven experts does not say {missing}"] if missing else []
    except AssertionError:
        pass
    return ["uneven experts are not told"]


def upstream_works(model: str, options: dict[str, object]) -> str:
    """Why a variant is of no use for a test: it does not work even before it is patched."""
    fake = machine(model, str(options.get("setting", "appends")))
    fake.strict = False
    try:
        module = fake.load("toy_moe")
        with fake.installed():
            for world in oracle.worlds([(4, 0, 1), (4, 0, 2)]):
                built = fake.build(
                    getattr(module, str(options.get("served", "ToyForCausalLM"))), world
                )
                given = feed(
                    world,
                    str(options.get("tensors", "per_expert")),
                    str(options.get("attribute", "mlp")),
                    str(options.get("root", "model.")),
                    int(str(options.get("out", 2))),
                )
                built.load_weights(oracle.shuffled(given))
                if len(fake.recorder.layers) != world.layers:
                    return "not every layer was built"
                if found := oracle.faults(fake):
                    return found[0]
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""
