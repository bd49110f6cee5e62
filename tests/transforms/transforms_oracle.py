"""Runs generated model files in plain Python and watches which slot gets which expert's tensor.

No torch and no vLLM: every module of theirs is a stub. Only what loading depends on is modelled
(the expert layer and its slots, the expert mapping, pipeline stages, the weights loader), written
here from its documented behaviour; the MixtureOfExperts protocol is the release's own text.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import math
import random
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

MODELS = "vllm.model_executor.models"
FAKED = {"vllm", "torch", "transformers", "einops", "numpy", "PIL", "huggingface_hub", "regex"}
HIDDEN, INNER = 8, 6
UNSEEN = {"Llama4VisionModel", "Llama4MultiModalProjector"}
"""Classes of model files that are left out."""


@dataclass(frozen=True)
class World:
    """One rank's view: E logical and R redundant experts on `ep` ranks."""

    experts: int = 4
    redundant: int = 0
    ep: int = 1
    rank: int = 0
    eplb: bool = True
    layers: int = 2
    mine: tuple[int, int] = (0, 2)
    """The layers of this pipeline stage, from and to."""
    dense: frozenset[int] = frozenset()

    @property
    def local(self) -> int:
        return (self.experts + self.redundant) // self.ep

    def logical(self, local_slot: int) -> int:
        """Which logical expert a local slot starts with."""
        physical = self.rank * self.local + local_slot
        return physical if physical < self.experts else (physical - self.experts) % self.experts


SHAPES = [(4, 0, 2), (4, 2, 2), (4, 6, 2), (8, 4, 4), (5, 3, 4)]
"""(E, R, ep); with (4, 6, 2) two replicas of one expert sit on one rank."""


def worlds(shapes: Iterable[tuple[int, int, int]] = SHAPES) -> Iterator[World]:
    for experts, redundant, ep in shapes:
        for rank in range(ep):
            yield World(experts, redundant, ep, rank)


class Dtype(str):
    """torch.dtype, by name."""

    __slots__ = ()
    is_floating_point = True


class Device(str):
    """torch.device, by name."""

    __slots__ = ()

    @property
    def type(self) -> str:
        return str(self)


BF16, FP16, FP8, CPU = Dtype("bf16"), Dtype("fp16"), Dtype("fp8"), Device("cpu")


class Indices(list):  # type: ignore[type-arg]
    """An index tensor."""

    device = CPU

    def flatten(self) -> Indices:
        return self

    def to(self, _: object) -> Indices:
        return self

    def __mod__(self, n: int) -> Indices:
        return Indices(i % n for i in self)

    def __getitem__(self, index: Any) -> Any:
        return SimpleNamespace(item=lambda: list.__getitem__(self, index))


class ExpertMap:
    """expert_map: -1 where an expert is not on this rank."""

    def __init__(self, world: World) -> None:
        first = world.rank * world.local
        self.mine = list(range(first, first + world.local))

    def __ne__(self, other: object) -> Any:
        assert other == -1
        return SimpleNamespace(nonzero=lambda: Indices(self.mine))

    __hash__ = None  # type: ignore[assignment]


@dataclass(frozen=True)
class Tensor:
    """The part of a checkpoint that a tensor holds; `out` is the axis of its output."""

    experts: tuple[int, ...]
    part: str
    ndim: int
    out: int
    dtype: Dtype = BF16
    device: Device = CPU

    @property
    def shape(self) -> tuple[int, ...]:
        sizes = {"gate_up": 2 * INNER, "down": HIDDEN}.get(self.part, INNER)
        inputs = INNER if self.part == "down" else HIDDEN
        pair = (sizes, inputs) if self.out == self.ndim - 2 else (inputs, sizes)
        return (len(self.experts), *pair) if self.ndim == 3 else pair

    def dim(self) -> int:
        return self.ndim

    def size(self, axis: int) -> int:
        return self.shape[axis]

    def transpose(self, a: int, b: int) -> Tensor:
        assert {a % self.ndim, b % self.ndim} == {self.ndim - 1, self.ndim - 2}
        return replace(self, out=2 * self.ndim - 3 - self.out)

    def chunk(self, n: int, dim: int) -> tuple[Tensor, ...]:
        assert n == 2 and self.part == "gate_up", "only the fused projection is split"
        assert dim % self.ndim == self.out, "split along the wrong axis"
        return replace(self, part="gate"), replace(self, part="up")

    def element_size(self) -> int:
        return 1 if self.dtype == FP8 else 2

    def numel(self) -> int:
        return math.prod(self.shape)

    def to(self, target: Any) -> Tensor:
        return replace(self, dtype=target) if isinstance(target, Dtype) else self

    def __getitem__(self, index: Any) -> Tensor:
        assert self.ndim == 3
        if isinstance(index, Indices):
            # as torch does on a CPU before 2.11
            assert self.dtype != FP8, "index_cpu not implemented for Float8_e4m3fn"
            return replace(self, experts=tuple(self.experts[i] for i in list(iter(index))))
        return replace(self, experts=(self.experts[index],), ndim=2, out=self.out - 1)

    def unbind(self) -> list[Tensor]:
        return [self[i] for i in range(len(self.experts))]


class Module:
    """torch.nn.Module as far as names of parameters go."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def children_of(self) -> Iterator[tuple[str, Any]]:
        yield from vars(self).items()

    def named_parameters(self, **_: Any) -> Iterator[tuple[str, Any]]:
        seen: set[int] = set()
        yield from self._walk("", seen)

    def _walk(self, prefix: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
        for name, value in self.children_of():
            if isinstance(value, Param):
                yield prefix + name, value
            elif isinstance(value, Module) and id(value) not in seen:
                seen.add(id(value))
                yield from value._walk(f"{prefix}{name}.", seen)

    def register_buffer(self, name: str, value: object, **_: object) -> None:
        setattr(self, name, value)


class ModuleList(Module):
    def __init__(self, items: Iterable[Any] = ()) -> None:
        super().__init__()
        self.items = list(items)

    def children_of(self) -> Iterator[tuple[str, Any]]:
        yield from ((str(i), m) for i, m in enumerate(self.items))

    def __iter__(self) -> Iterator[Any]:
        return iter(self.items)

    def __len__(self) -> int:
        return len(self.items)

    def __getitem__(self, index: Any) -> Any:
        return self.items[index]


class PPMissingLayer(Module):
    """A layer of another pipeline stage: it has none of a layer's attributes."""


class Param:
    """A parameter. `got` is what its loader put where."""

    def __init__(self, loader: Callable[..., Any] | None = None) -> None:
        self.got: dict[Any, Any] = {}
        self.data = self
        if loader is not None:
            self.weight_loader = loader
        else:
            self.weight_loader = self._whole

    def _whole(self, _: Any, tensor: Any, *args: Any) -> None:
        self.got[args] = tensor


class Multimodal:
    """What a multimodal class has from its base."""

    def _mark_tower_model(self, *_: Any) -> Any:
        return nullcontext()

    _mark_language_model = _mark_tower_model

    def _init_video_pruning(self, _: Any) -> None:
        pass


class Norm(Module):
    def __init__(self, *_: Any, **__: Any) -> None:
        super().__init__()
        self.weight = Param()


class Recorder:
    """What happened in a run."""

    def __init__(self) -> None:
        self.loader_calls = 0
        self.layers: list[Any] = []
        self.looked_at = 0
        self.dtypes: set[str] = set()
        self.states: list[tuple[Any, ...]] = []
        self.updated: list[Any] = []


class Entries(list):  # type: ignore[type-arg]
    """A mapping that counts the entries looked at once it is armed."""

    recorder: ClassVar[Recorder]

    def __iter__(self) -> Iterator[Any]:
        for entry in list.__iter__(self):
            Entries.recorder.looked_at += 1
            yield entry


class Anything(type):
    """Metaclass of the stubs for all that loading does not depend on."""

    def __getattr__(cls, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Anything(name, (Stub,), {})

    def __iter__(cls) -> Iterator[Any]:
        return iter(())


class Stub(metaclass=Anything):
    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub()

    def __call__(self, *args: Any, **_: Any) -> Any:
        if len(args) == 1 and callable(args[0]) and not isinstance(args[0], Stub):
            return args[0]
        return Stub()

    def __class_getitem__(cls, _: Any) -> Any:
        return cls

    def __getitem__(self, _: Any) -> Any:
        return Stub()

    def __or__(self, other: Any) -> Any:
        return self

    def __iter__(self) -> Iterator[Any]:
        return iter(())

    def __int__(self) -> int:
        return 1

    __mul__ = __rmul__ = __add__ = __sub__ = __rsub__ = __truediv__ = __pow__ = __or__


class StubModule(ModuleType):
    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = Anything(name, (Stub,), {})
        setattr(self, name, value)
        return value


def _decorator(*args: Any, **_: Any) -> Any:
    return args[0] if args and isinstance(args[0], type) else (lambda cls: cls)


@dataclass
class Machine:
    """A fake installation of one release, with one rank's view at a time."""

    protocol_source: str = ""
    in_eplb_config: bool = True
    routed_prefix: str = ""
    sources: dict[str, str] = field(default_factory=dict)
    """Module below vllm.model_executor.models -> text to run instead of a stub."""
    world: World = field(default_factory=World)
    extra: dict[str, dict[str, Any]] = field(default_factory=dict)
    hf: dict[str, Any] = field(default_factory=dict)
    strict: bool = True
    """Whether blocks must hand on what the world says; upstream's cannot."""
    told_by_shape: bool = False
    """Whether the layer tells transposed fused tensors by their shape (0.25 to 0.27)."""
    layer_loads: bool = False
    """Whether models leave the loading of experts to the layer (from 0.25)."""
    layer_fills: bool = False
    """Whether the layer fills replicas from fused tensors, too."""
    modules: dict[str, ModuleType] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.recorder = Recorder()

    # --- what the world looks like from the model's side ---

    def vllm_config(self) -> Any:
        w = self.world
        parallel = SimpleNamespace(
            enable_eplb=w.eplb,
            enable_expert_parallel=True,
            enable_multimodal_encoder_data_parallel=False,
            use_sequence_parallel_moe=False,
            pipeline_parallel_size=1,
        )
        if self.in_eplb_config:
            parallel.eplb_config = SimpleNamespace(num_redundant_experts=w.redundant)
            parallel.num_redundant_experts = None
        else:
            parallel.num_redundant_experts = w.redundant
        hf: Any = SimpleNamespace(
            num_experts=w.experts,
            num_local_experts=w.experts,
            n_routed_experts=w.experts,
            num_hidden_layers=w.layers,
            mlp_only_layers=sorted(w.dense),
            decoder_sparse_step=1,
            interleave_moe_layer_step=self._interleave_step(),
            first_k_dense_replace=0,
            num_experts_per_tok=1,
            hidden_size=HIDDEN,
            intermediate_size=INNER,
            intermediate_size_mlp=INNER,
            moe_intermediate_size=INNER,
            shared_expert_intermediate_size=INNER,
            hidden_act="silu",
            norm_topk_prob=True,
            num_attention_heads=2,
            num_key_value_heads=2,
            head_dim=4,
            attn_temperature_tuning=False,
            floor_scale=1.0,
            attn_scale=1.0,
            attention_chunk_size=None,
            pad_token_id=0,
            router_jitter_noise=0.0,
            no_rope_layers=[1] * w.layers,
            use_qk_norm=False,
            attention_bias=False,
            bias=False,
            vocab_size=32,
            rms_norm_eps=1e-6,
            max_position_embeddings=64,
            tie_word_embeddings=False,
            rope_theta=1.0,
            rope_scaling=None,
            rope_parameters={"rope_type": "default"},
            qkv_bias=True,
            model_type="toy",
            vision_config=SimpleNamespace(
                deepstack_visual_indexes=[], out_hidden_size=HIDDEN, patch_size=1
            ),
            n_group=2,
            topk_group=1,
        )
        vars(hf).update(self.hf)
        hf.text_config = hf.get_text_config = hf
        multimodal = SimpleNamespace(
            mm_encoder_tp_mode="weights",
            get_limit_per_prompt=lambda _: 0,
            video_pruning_rate=0.0,
            is_multimodal_pruning_enabled=lambda: False,
        )
        config: Any = SimpleNamespace(
            parallel_config=parallel,
            quant_config=None,
            cache_config=None,
            lora_config=None,
            compilation_config=SimpleNamespace(
                static_forward_context={}, pass_config=SimpleNamespace()
            ),
            scheduler_config=SimpleNamespace(max_num_batched_tokens=8),
            speculative_config=None,
            device_config=SimpleNamespace(device="cpu"),
            model_config=SimpleNamespace(
                hf_config=hf,
                hf_text_config=hf,
                max_model_len=64,
                dtype="bf16",
                try_get_generation_config=dict,
                override_generation_config={},
                multimodal_config=multimodal,
                get_multimodal_config=lambda: multimodal,
            ),
        )
        config.with_hf_config = lambda *_, **__: config
        self.config = config
        return config

    def _interleave_step(self) -> int:
        """Llama 4's way to say which layers are dense, where it can say it."""
        w = self.world
        moe = set(range(w.layers)) - w.dense
        steps = range(1, w.layers + 1)
        fits = (s for s in steps if {i for i in range(w.layers) if (i + 1) % s == 0} == moe)
        return next(fits, 1)

    def build(self, cls: type, world: World, **kwargs: Any) -> Any:
        """A model as this rank has it; `recorder` starts anew."""
        self.world = world
        self.recorder = Recorder()
        Entries.recorder = self.recorder
        return cls(vllm_config=self.vllm_config(), prefix="", **kwargs)

    # --- vLLM's own parts ---

    def expert_layer(self) -> type:
        machine = self

        class ExpertLayer(Module):
            def __init__(self, num_experts: int, **kwargs: Any) -> None:
                super().__init__()
                world = machine.world
                extra = kwargs.get("num_redundant_experts", 0)
                self.enable_eplb = kwargs.get("enable_eplb", False)
                if machine.strict:
                    assert self.enable_eplb or extra == 0, "redundant experts without EPLB"
                    assert self.enable_eplb == world.eplb, "EPLB asked for, block not told"
                    assert extra == world.redundant
                extra = world.redundant
                assert (num_experts + extra) % world.ep == 0
                assert num_experts == world.experts
                self.transposed = kwargs.get("is_fused_checkpoint_transposed", False)
                self.expert_map = ExpertMap(world) if world.ep > 1 else None
                self.first = world.rank * world.local
                self.logical_to_physical = {
                    e: [
                        p
                        for p in range(num_experts + extra)
                        if (p if p < num_experts else (p - num_experts) % num_experts) == e
                    ]
                    for e in range(num_experts)
                }
                holder: Any = self
                if machine.routed_prefix:
                    holder = self.routed_experts = Module()
                holder.w13_weight = self.w13 = Param(self._load)
                holder.w2_weight = self.w2 = Param(self._load)
                self.stray: list[Any] = []
                machine.recorder.layers.append(self)

            def _load(
                self,
                param: Param,
                loaded_weight: Tensor,
                weight_name: str,
                shard_id: str,
                expert_id: int,
                return_success: bool = False,
            ) -> bool | None:
                machine.recorder.loader_calls += 1
                machine.recorder.dtypes.add(loaded_weight.dtype)
                shards = {"w1": self.w13, "w3": self.w13, "w2": self.w2}
                assert shards[shard_id] is param, "a shard of the wrong parameter"
                want = {"w1": "gate", "w3": "up", "w2": "down"}[shard_id]
                assert loaded_weight.part == want, (loaded_weight.part, shard_id)
                assert loaded_weight.out == loaded_weight.ndim - 2, "not [out, in]"
                local = expert_id - self.first
                if not 0 <= local < machine.world.local:
                    return False if return_success else None
                if loaded_weight.ndim == 3:
                    assert local == 0 and len(loaded_weight.experts) == machine.world.local
                    for slot, expert in enumerate(loaded_weight.experts):
                        param.got[slot, shard_id] = expert
                else:
                    param.got[local, shard_id] = loaded_weight.experts[0]
                return True if return_success else None

            def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[str]:
                """As from 0.18.0: an expert's own tensor to all replicas, fused by position."""
                for name, tensor in weights:
                    head, _, rest = name.partition(".")
                    if tensor.ndim == 3:
                        to_hidden = -2 if head == "down_proj" else -1
                        if (
                            tensor.shape[to_hidden] != HIDDEN
                            if machine.told_by_shape
                            else self.transposed
                        ):
                            tensor = tensor.transpose(-1, -2)
                        if head == "gate_up_proj":
                            todo = zip(("w1", "w3"), tensor.chunk(2, dim=1), strict=True)
                        else:
                            assert head == "down_proj", name
                            todo = zip(("w2",), (tensor,), strict=True)
                        slots = self.logical_to_physical if machine.layer_fills else {}
                        pairs = [
                            (shard, p, one)
                            for shard, t in todo
                            for i, one in enumerate(t.unbind())
                            for p in slots.get(i, [i])
                        ]
                    else:
                        proj, _, what = rest.partition(".")
                        assert what == "weight", f"{name} is no weight"
                        shard = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}[proj]
                        pairs = [(shard, p, tensor) for p in self.logical_to_physical[int(head)]]
                    for shard, physical, one in pairs:
                        param = self.w2 if shard == "w2" else self.w13
                        self._load(param, one, name, shard, physical)
                    yield name

            def must_reduce_shared_expert_outputs(self) -> bool:
                return False

            def get_expert_weights(self) -> list[Any]:
                return [SimpleNamespace(element_size=lambda: 2, layer=self)]

            def set_eplb_state(self, *args: Any, **kwargs: Any) -> None:
                machine.recorder.states.append((self, args, kwargs))

            def update_expert_map(self) -> None:
                machine.recorder.updated.append(self)

            @classmethod
            def make_expert_params_mapping(cls, *args: Any, **kwargs: Any) -> Any:
                return machine.mapping(*args, **kwargs)

        return ExpertLayer

    def mapping(self, *args: Any, **kwargs: Any) -> Any:
        names = (
            "ckpt_gate_proj_name",
            "ckpt_down_proj_name",
            "ckpt_up_proj_name",
            "num_experts",
            "num_redundant_experts",
        )
        given = dict(zip(names, [a for a in args if not isinstance(a, Module)], strict=False))
        assert not given.keys() & kwargs.keys(), "an argument given twice"
        given.update(kwargs)
        gate, down, up, experts = (given[n] for n in names[:4])
        prefix = f"{self.routed_prefix}." if self.routed_prefix else ""
        return Entries(
            (
                f"experts.{prefix}{'w2' if weight == down else 'w13'}_",
                f"experts.{p if p < experts else (p - experts) % experts}.{weight}.",
                p,
                shard,
            )
            for p in range(experts + given.get("num_redundant_experts", 0))
            for shard, weight in (("w1", gate), ("w2", down), ("w3", up))
        )

    def make_layers(self, count: int, build: Callable[..., Any], prefix: str = "") -> Any:
        first, last = self.world.mine
        layers = ModuleList(
            build(prefix=f"{prefix}.{i}") if first <= i < last else PPMissingLayer()
            for i in range(count)
        )
        return first, last, layers

    def is_missing(self, name: str, _: Any) -> bool:
        parts = name.split(".")
        if "layers" in parts:
            index = int(parts[parts.index("layers") + 1])
            return not self.world.mine[0] <= index < self.world.mine[1]
        return False

    def auto_loader(self) -> type:
        class AutoWeightsLoader:
            def __init__(self, module: Any, *_: Any, **__: Any) -> None:
                self.module = module

            def load_weights(self, weights: Iterable[Any], **_: Any) -> set[str]:
                return set(self._load(self.module, list(weights), ""))

            def _load(self, module: Any, weights: list[Any], prefix: str) -> Iterator[str]:
                own = getattr(module, "load_weights", None)
                if module is not self.module and callable(own):
                    yield from (prefix + n for n in own(weights) or ())
                    return
                children = dict(module.children_of()) if isinstance(module, Module) else {}
                groups: dict[str, list[Any]] = {}
                for name, tensor in weights:
                    head, _, rest = name.partition(".")
                    groups.setdefault(head, []).append((rest, tensor))
                for head, group in groups.items():
                    child = children.get(head)
                    if isinstance(child, Param):
                        child.weight_loader(child, group[0][1])
                        yield prefix + head
                    elif isinstance(child, Module) and not isinstance(child, PPMissingLayer):
                        yield from self._load(child, group, f"{prefix}{head}.")

        return AutoWeightsLoader

    def _members(self) -> dict[str, dict[str, Any]]:
        layer = self.expert_layer()
        layers = dict.fromkeys(
            ("FusedMoE", "SharedFusedMoE", "FusedMoEFactory", "RoutedExperts"), layer
        ) | {"fused_moe_make_expert_params_mapping": self.mapping}

        def ep_group() -> Any:
            w = self.world
            ranks = SimpleNamespace(size=lambda: w.ep, rank=lambda: w.rank)
            return SimpleNamespace(device_group=ranks, rank_in_group=w.rank, world_size=w.ep)

        def pp_group() -> Any:
            return SimpleNamespace(
                is_first_rank=self.world.mine[0] == 0,
                is_last_rank=self.world.mine[1] == self.world.layers,
                world_size=1,
            )

        distributed = {
            "get_ep_group": ep_group,
            "get_pp_group": pp_group,
            "get_tensor_model_parallel_world_size": lambda: 1,
            "get_tensor_model_parallel_rank": lambda: 0,
        }
        utils = {
            "PPMissingLayer": PPMissingLayer,
            "make_layers": self.make_layers,
            "is_pp_missing_parameter": self.is_missing,
            "AutoWeightsLoader": self.auto_loader(),
            "maybe_prefix": lambda a, b: f"{a}.{b}" if a else b,
            "extract_layer_index": lambda name: int(name.split("layers.")[1].split(".")[0]),
            "make_empty_intermediate_tensors_factory": lambda *_: None,
            "get_layer_index": lambda i, _: i,
        }
        nn = {"Module": Module, "ModuleList": ModuleList, "Identity": PPMissingLayer}
        return {
            "torch": {
                "Tensor": Tensor,
                "float8_e4m3fn": FP8,
                "float16": FP16,
                "uint8": Dtype("u8"),
            },
            "torch.nn": nn,
            "vllm.config": {
                "get_current_vllm_config": lambda: self.config,
                "set_current_vllm_config": nullcontext,
            },
            "vllm.compilation.backends": {"set_model_tag": lambda *_, **__: nullcontext()},
            "vllm.compilation.decorators": {"support_torch_compile": _decorator},
            "vllm.distributed": distributed,
            "vllm.distributed.parallel_state": distributed,
            "vllm.model_executor.layers.fused_moe": layers,
            "vllm.model_executor.layers.fused_moe.layer": layers,
            "vllm.model_executor.layers.shared_fused_moe": layers,
            "vllm.model_executor.layers.layernorm": {"RMSNorm": Norm},
            "vllm.model_executor.model_loader.utils": {
                "initialize_model": lambda vllm_config, model_class, prefix="": model_class(
                    vllm_config=vllm_config, prefix=prefix
                )
            },
            "vllm.platforms": {"current_platform": SimpleNamespace(fp8_dtype=lambda: FP8)},
            "vllm.utils.torch_utils": {"is_torch_equal_or_newer": lambda _: False},
            "vllm.model_executor.model_loader.weight_utils": {
                "default_weight_loader": lambda param, tensor: param._whole(param, tensor),
                "maybe_remap_kv_scale_name": lambda name, _: name,
                "maybe_remap_moe_expert_param_name": lambda name, _: name,
            },
            f"{MODELS}.utils": utils,
            f"{MODELS}.interfaces": {"SupportsMultiModal": Multimodal},
            f"{MODELS}.qwen3_vl": {
                "Qwen3VLForConditionalGeneration": type(
                    "Qwen3VL",
                    (Multimodal, Module),
                    {"load_weights": lambda model, w: self.auto_loader()(model).load_weights(w)},
                )
            },
            **self.extra,
        }

    # --- imports ---

    def find_spec(self, name: str, path: object = None, target: object = None) -> Any:
        if name.partition(".")[0] not in FAKED:
            return None
        return importlib.util.spec_from_loader(name, self, is_package=True)  # type: ignore[arg-type]

    def create_module(self, spec: Any) -> ModuleType:
        if spec.name == f"{MODELS}.interfaces":
            return _Interfaces(spec.name)
        return (ModuleType if self._source(spec.name) is not None else StubModule)(spec.name)

    def _source(self, name: str) -> str | None:
        head, _, stem = name.rpartition(".")
        return self.sources.get(stem) if head == MODELS else None

    def exec_module(self, module: ModuleType) -> None:
        name = module.__name__
        for key, value in self._members().get(name, {}).items():
            setattr(module, key, value)
        if name == "torch":
            module.nn = importlib.import_module("torch.nn")  # type: ignore[attr-defined]
        if name == f"{MODELS}.interfaces":
            _protocol(module, self.protocol_source)
        source = self._source(name)
        if source is not None:
            module.__package__ = MODELS
            exec(compile(source, f"<{name}>", "exec", dont_inherit=True), module.__dict__)
            for unseen in module.__dict__.keys() & UNSEEN:
                setattr(module, unseen, Stub)

    @contextmanager
    def installed(self) -> Iterator[Machine]:
        """With the stubs in place of torch and vLLM."""

        def mine(name: str) -> bool:
            return name.partition(".")[0] in FAKED

        before = {n: sys.modules.pop(n) for n in list(sys.modules) if mine(n)}
        sys.modules.update(self.modules)
        sys.meta_path.insert(0, self)  # type: ignore[arg-type]
        try:
            yield self
        finally:
            sys.meta_path.remove(self)  # type: ignore[arg-type]
            self.modules = {n: sys.modules.pop(n) for n in list(sys.modules) if mine(n)}
            sys.modules.update(before)

    def load(self, stem: str) -> ModuleType:
        with self.installed():
            return importlib.import_module(f"{MODELS}.{stem}")


class _Interfaces(ModuleType):
    """Its other protocols are empty classes: a model must not find an attribute there."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        value = type(name, (), {})
        setattr(self, name, value)
        return value


def _protocol(module: ModuleType, source: str) -> None:
    wanted = {"MixtureOfExperts", "is_mixture_of_experts"}
    tree = ast.parse(source)
    tree.body = [n for n in tree.body if getattr(n, "name", "") in wanted]
    text = "from __future__ import annotations\nfrom typing import *\n" + ast.unparse(tree)
    exec(compile(text, "<interfaces>", "exec", dont_inherit=True), module.__dict__)


# --- what goes in, and what must come out ---


def per_expert(world: World, attribute: str = "mlp", root: str = "model.") -> list[Any]:
    parts = {"gate_proj": "gate", "up_proj": "up", "down_proj": "down"}
    return [
        (f"{root}layers.{i}.{attribute}.experts.{e}.{name}.weight", Tensor((e,), part, 2, 0))
        for i in range(world.layers)
        if i not in world.dense
        for e in range(world.experts)
        for name, part in parts.items()
    ]


def fused(
    world: World,
    attribute: str = "mlp",
    root: str = "model.",
    out: int = 2,
    dtype: Dtype = BF16,
) -> list[Any]:
    every = tuple(range(world.experts))
    return [
        (f"{root}layers.{i}.{attribute}.experts.{name}", Tensor(every, part, 3, out, dtype))
        for i in range(world.layers)
        if i not in world.dense
        for name, part in (("gate_up_proj", "gate_up"), ("down_proj", "down"))
    ]


def blocks(model: Any) -> list[Any]:
    """The MoE blocks of a model, in order."""
    found: list[Any] = []
    pending, seen = [model], set()
    while pending:
        module = pending.pop(0)
        if id(module) in seen:
            continue
        seen.add(id(module))
        if hasattr(module, "n_physical_experts"):
            found.append(module)
        children = module.children_of() if isinstance(module, Module) else vars(module).items()
        pending[:0] = [m for _, m in children if isinstance(m, Module)]
    return found


def shuffled(tensors: list[Any], seed: int = 0) -> list[Any]:
    mixed = list(tensors)
    random.Random(seed).shuffle(mixed)
    return mixed


def faults(machine: Machine) -> list[str]:
    """Slots of this rank that do not hold what they must."""
    world = machine.world
    wrong = []
    for number, layer in enumerate(machine.recorder.layers):
        for slot in range(world.local):
            for shard, param in (("w1", layer.w13), ("w3", layer.w13), ("w2", layer.w2)):
                got = param.got.get((slot, shard), "nothing")
                if got != world.logical(slot):
                    wrong.append(
                        f"{world}: layer {number} slot {slot} {shard}: {got}, "
                        f"wanted {world.logical(slot)}"
                    )
    return wrong
