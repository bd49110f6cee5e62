"""A release's own EplbState, behind one face."""

from __future__ import annotations

from typing import Any

import torch

from . import tree


def moe_model(model: Any) -> Any | None:
    """What the release's runner takes for the mixture of experts in a model; None if nothing."""
    unwrap = tree.find("vllm.model_executor.models.interfaces:get_mixture_of_experts_model")
    if unwrap is not None:
        return unwrap(model)
    test = tree.need("vllm.model_executor.models.interfaces:is_mixture_of_experts")
    if test(model):
        return model
    if _runner_unwraps() and hasattr(model, "get_language_model"):
        inner = model.get_language_model()
        return inner if test(inner) else None
    return None


def _runner_unwraps() -> bool:
    """Whether this release's runner looks into a multimodal model: its text says so."""
    import importlib.util
    from pathlib import Path

    spec = importlib.util.find_spec("vllm.v1.worker")
    for folder in (spec.submodule_search_locations or []) if spec else []:
        text = Path(folder, "gpu_model_runner.py").read_text(encoding="utf-8")
        return ".get_language_model()\n" in text and "is_mixture_of_experts(moe_candidate" in text
    return False


_configs: list[Any] = []
"""Kept for as long as the process lives: from 0.25 on vLLM remembers a configuration by its id
(`compute_hash_cached`), and would take that of another case, made later in the same place, for it.
"""


class Balancer:
    def __init__(self, model: Any, config: Any, device: torch.device) -> None:
        _configs.append(config)
        made = tree.need("vllm.distributed.eplb.eplb_state:EplbState")
        self.model, self.config = model, config
        if hasattr(made, "add_model"):
            self.state = made(config.parallel_config, device)
            self.state.add_model(model, config.model_config)
            (self.tables,) = self.state.model_states.values()
        else:
            self.state = made.build(model, device, config.parallel_config)
            self.tables = self.state

    @property
    def physical_to_logical(self) -> torch.Tensor:
        """[MoE layer, physical expert] -> logical expert, as it is now."""
        found: torch.Tensor = self.tables.physical_to_logical_map.clone()
        return found

    @property
    def recorded(self) -> torch.Tensor:
        """[MoE layer, expert] -> tokens since the last step, of this rank's slots or of all."""
        found: torch.Tensor = self.tables.expert_load_pass
        return found

    def before_forward(self, tokens: int) -> None:
        if hasattr(self.state, "prepare_forward"):
            self.state.prepare_forward(self.config.model_config, tokens)
            return
        for counter in getattr(self.tables, "num_unpadded_tokens_tensors", None) or []:
            counter.fill_(tokens)

    def step(self) -> bool:
        """One step after a forward pass; True if slots of this model changed their expert."""
        before = self.physical_to_logical
        if tree.takes(self.state.step, "model"):
            self.state.step(self.model)
        else:
            self.state.step()
        return not torch.equal(before, self.physical_to_logical)
