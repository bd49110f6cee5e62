"""A vLLM plugin that lets vLLM 0.32's own engine run EPLB on CPU ranks.

The engine, its scheduler, loader, router, EplbState and rearrangement are vLLM's own. Replaced are
the expert kernels (the compiled one for CPUs knows no expert map) and what only CUDA runners do.
"""

from __future__ import annotations

import os
import sys
import time
from typing import Any

import torch

_done = False


def register() -> None:
    """Called by vLLM in every process, perhaps more than once."""
    global _done
    if _done:
        return
    _done = True
    if generated := os.environ.get("TEST_GENERATED"):
        from vllm.model_executor.models import ModelRegistry

        architecture, target = generated.split("=")
        ModelRegistry.register_model(architecture, target)
    if os.environ.get("TEST_CPU_EPLB"):
        _admit_eplb()
        _reference_experts()
        _eplb_state_in_runner()
        _time_without_device_events()


def _admit_eplb() -> None:
    """ParallelConfig admits EPLB on GPUs only: answer yes to that one validator."""
    import vllm.config.parallel as parallel

    real = parallel.current_platform

    class Platform:
        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

        def is_cuda_alike(self) -> bool:
            return sys._getframe(1).f_code.co_name == "_validate_parallel_config"

    parallel.current_platform = Platform()


def _reference_experts() -> None:
    import vllm.model_executor.layers.fused_moe.experts.cpu_moe as cpu_moe
    import vllm.model_executor.layers.fused_moe.router.base_router as base_router
    from worker import reference

    def to_physical(
        topk_ids: torch.Tensor,
        expert_load_view: torch.Tensor,
        logical_to_physical_map: torch.Tensor,
        logical_replica_count: torch.Tensor,
        record_enabled: torch.Tensor,
        num_unpadded_tokens: torch.Tensor | None = None,
    ) -> torch.Tensor:
        return reference.to_physical(
            topk_ids,
            expert_load_view,
            logical_to_physical_map,
            logical_replica_count,
            bool(record_enabled.item()),
            None if num_unpadded_tokens is None else int(num_unpadded_tokens),
        )

    def apply(
        self: Any,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: Any,
        global_num_experts: int,
        expert_map: torch.Tensor | None,
        *_: Any,
        **__: Any,
    ) -> None:
        output.copy_(reference.experts(hidden_states, w1, w2, topk_weights, topk_ids, expert_map))

    base_router.eplb_map_to_physical_and_record = to_physical
    for experts in [
        cpu_moe.CPUUnquantizedExperts,
        *cpu_moe.CPUUnquantizedExperts.__subclasses__(),
    ]:
        # no packing of the weights: they are moved as they were loaded
        experts.process_weights_after_loading = lambda self, layer: None
        experts.apply = apply


def _eplb_state_in_runner() -> None:
    """The CPU runner loads models by itself, and leaves EPLB out."""
    import vllm.v1.worker.cpu_model_runner as runner
    from vllm.distributed.eplb.eplb_state import EplbState
    from vllm.model_executor.models.interfaces import get_mixture_of_experts_model

    load_model, rearrange = runner.CPUModelRunner.load_model, EplbState.rearrange

    def load_and_add(self: Any, load_dummy_weights: bool = False) -> None:
        load_model(self, load_dummy_weights)
        print("SERVED", type(self.model).__module__, flush=True)
        self._moe_model = get_mixture_of_experts_model(self.model)
        if self.parallel_config.enable_eplb:
            assert self._moe_model is not None, "the model is not a MixtureOfExperts"
            self.eplb_state = EplbState(self.parallel_config, self.device)
            self.eplb_state.add_model(self._moe_model, self.model_config)

    def rearrange_and_tell(self: Any, *args: Any, **kwargs: Any) -> Any:
        before = {n: s.physical_to_logical_map.clone() for n, s in self.model_states.items()}
        result = rearrange(self, *args, **kwargs)
        for name, state in self.model_states.items():
            moved = int((before[name] != state.physical_to_logical_map).sum())
            print("REARRANGED", moved, flush=True)
        return result

    runner.CPUModelRunner.load_model = load_and_add
    EplbState.rearrange = rearrange_and_tell


def _time_without_device_events() -> None:
    import vllm.distributed.eplb.eplb_state as eplb_state

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = 0.0

        def record(self, *_: Any) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

        def synchronize(self, *_: Any) -> None:
            pass

        wait = synchronize

    class Torch:
        def __getattr__(self, name: str) -> Any:
            return Event if name == "Event" else getattr(torch, name)

    eplb_state.torch = Torch()
