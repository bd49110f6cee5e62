"""Building a model through a release's own config classes and loader."""

from __future__ import annotations

import importlib
import importlib.machinery
import importlib.util
import random
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from . import tree

LENGTH = 128
STEPS = 2
"""Forward passes between rearrangements, and the load window: every pass is recorded."""


def vllm_config(model: Path, ranks: int, redundant: int | None, device: str) -> Any:
    """EPLB is off where `redundant` is None."""
    config = importlib.import_module("vllm.config")
    path = str(model)
    scheduler = {
        "max_model_len": LENGTH,
        "max_num_batched_tokens": LENGTH,
        "max_num_seqs": 8,
        "is_encoder_decoder": False,
    }
    quiet = {"use_tqdm_on_load": False} if tree.takes(config.LoadConfig, "use_tqdm_on_load") else {}
    return config.VllmConfig(
        model_config=config.ModelConfig(
            model=path,
            tokenizer=path,
            skip_tokenizer_init=True,
            dtype="float32",
            enforce_eager=True,
            max_model_len=LENGTH,
            seed=0,
        ),
        parallel_config=_parallel_config(config, ranks, redundant),
        cache_config=config.CacheConfig(),
        load_config=config.LoadConfig(**quiet),
        device_config=config.DeviceConfig(device),
        scheduler_config=config.SchedulerConfig(
            **{k: v for k, v in scheduler.items() if tree.takes(config.SchedulerConfig, k)}
        ),
    )


def _parallel_config(config: Any, ranks: int, redundant: int | None) -> Any:
    options: dict[str, Any] = {}
    made = tree.find("vllm.config.parallel:EPLBConfig", "vllm.config:EPLBConfig")
    if redundant is not None and made is not None:
        eplb = {
            "num_redundant_experts": redundant,
            "window_size": STEPS,
            "step_interval": STEPS,
            "use_async": False,
            # On CPU tensors this one uses the CPU group, and asks for no stream.
            "communicator": "torch_nccl",
        }
        known = tree.fields(made)
        options["eplb_config"] = made(**{k: v for k, v in eplb.items() if k in known})
    elif redundant is not None:
        options = {
            "num_redundant_experts": redundant,
            "eplb_window_size": STEPS,
            "eplb_step_interval": STEPS,
        }
    return config.ParallelConfig(
        tensor_parallel_size=ranks,
        enable_expert_parallel=True,
        enable_eplb=redundant is not None,
        distributed_executor_backend="mp",
        **options,
    )


class Subject:
    """The classes under test: vLLM's own, or those of a generated folder."""

    def __init__(
        self,
        module: str | None,
        architecture: str,
        upstream: str,
        methods: Mapping[str, str],
        adapt: Callable[[], None],
    ) -> None:
        """Imports upstream's class.

        Args:
            methods: generated files of quantisation methods, by the module that each replaces.
            adapt: is called after such a module was replaced.
        """
        self.architecture = architecture
        self.methods, self.adapt = methods, adapt
        self.upstream_module = f"vllm.model_executor.models.{upstream}"
        self.upstream = self._upstream_class()
        self.module = module

    def _upstream_class(self) -> Any:
        registry = tree.need("vllm.model_executor.models:ModelRegistry")
        entry = registry.models.get(self.architecture)
        if entry is None:
            return tree.need(f"{self.upstream_module}:{self.architecture}")
        return entry.load_model_cls()

    def select(self, which: str) -> Any:
        """Have vLLM's registry give this class; as a class, so that no process inspects it."""
        chosen = self.upstream
        if which == "generated":
            assert self.module is not None
            chosen = _load(Path(self.module), self.architecture)
        for name, path in self.methods.items():
            _exec_in_place(name, Path(path) if which == "generated" else None)
            self.adapt()
        tree.need("vllm.model_executor.models:ModelRegistry").register_model(
            self.architecture, chosen
        )
        # Keyed by the checkpoint, not by what is registered: would give the class of a case before.
        remembered = tree.find("vllm.model_executor.model_loader.utils:_MODEL_ARCH_BY_HASH")
        if remembered is not None:
            remembered.clear()
        return chosen


def _exec_in_place(name: str, path: Path | None) -> None:
    """Give a module the code of a generated file, as the plugin does, or its own again."""
    module = importlib.import_module(name)
    assert module.__file__ is not None
    file = path or Path(module.__file__)
    exec(compile(file.read_text(encoding="utf-8"), str(file), "exec"), module.__dict__)


def _load(path: Path, architecture: str) -> Any:
    """The class from a generated file, whose siblings are imported relative to it."""
    package = "eplb_generated"
    if package not in sys.modules:
        spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
        spec.submodule_search_locations = [str(path.parent)]
        sys.modules[package] = importlib.util.module_from_spec(spec)
    return getattr(importlib.import_module(f"{package}.{path.stem}"), architecture)


def load(
    config: Any,
    seed: int,
    before: Callable[[Any], None],
    after: Callable[[Any, BaseException | None], None],
) -> Any:
    """The release's get_model, told when weights are about to be loaded, and when they are.

    The checkpoint's tensors reach the model in an order shuffled by the seed. `after` is called
    before weights are processed for kernels, also when loading fails, with what it failed with.
    """
    loader = tree.need("vllm.model_executor.model_loader.default_loader:DefaultModelLoader")
    real_load, real_weights = loader.load_weights, loader.get_all_weights

    def get_all_weights(self: Any, *given: Any, **named: Any) -> Any:
        tensors: list[Any] = list(real_weights(self, *given, **named))
        random.Random(seed).shuffle(tensors)
        return iter(tensors)

    def load_weights(self: Any, model: Any, *given: Any, **named: Any) -> Any:
        before(model)
        error: BaseException | None = None
        try:
            return real_load(self, model, *given, **named)
        except Exception as problem:
            error = problem
            raise
        finally:
            after(model, error)

    loader.load_weights, loader.get_all_weights = load_weights, get_all_weights
    try:
        get_model = tree.need("vllm.model_executor.model_loader:get_model")
        return get_model(vllm_config=config).eval()
    finally:
        loader.load_weights, loader.get_all_weights = real_load, real_weights


def join(ranks: int, rank: int, store: Path, device: str) -> None:
    """The world of all ranks, who meet at a file: a free port may be taken meanwhile."""
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device == "cuda" else "gloo",
        init_method=f"file://{store}",
        world_size=ranks,
        rank=rank,
    )


def initialise(ranks: int, rank: int, device: str) -> None:
    """vLLM's process groups, made anew for the current config."""
    state = importlib.import_module("vllm.distributed.parallel_state")
    _without_message_queues(state)
    backend = "nccl" if device == "cuda" else "gloo"
    state.init_distributed_environment(ranks, rank, "env://", rank, backend)
    if state.model_parallel_is_initialized():
        state.destroy_model_parallel()
    state.initialize_model_parallel(ranks)


def _without_message_queues(state: Any) -> None:
    """No engine broadcasts here, and the queues' shared memory would outlive a killed rank."""
    make = state.init_model_parallel_group
    if tree.takes(make, "use_message_queue_broadcaster"):

        def init_model_parallel_group(*given: Any, **named: Any) -> Any:
            named.pop("use_message_queue_broadcaster", None)
            return make(*given, **named)

        state.init_model_parallel_group = init_model_parallel_group


def current(config: Any) -> Any:
    """The context in which this config is vLLM's current one."""
    return tree.need("vllm.config:set_current_vllm_config")(config)


def forward(model: Any, config: Any, tokens: torch.Tensor) -> torch.Tensor | None:
    """The logits of one sequence; None on ranks to which vLLM does not gather them."""
    context = tree.need("vllm.forward_context:set_forward_context")
    positions = torch.arange(len(tokens), device=tokens.device)
    with torch.no_grad(), context(None, config, num_tokens=len(tokens)):
        hidden = model(tokens, _positions(model, positions))
        options = {"sampling_metadata": None}
        given = {k: v for k, v in options.items() if tree.takes(model.compute_logits, k)}
        logits: torch.Tensor | None = model.compute_logits(hidden, **given)
    return logits


def _positions(model: Any, positions: torch.Tensor) -> torch.Tensor:
    if getattr(model, "supports_mrope", False):
        return positions.expand(3, -1)
    return positions
