"""vLLM's own engine with EPLB on CPU ranks: what `cpu` replaces, and the runner's part in EPLB.

For tests on machines without a GPU, and slow. Scheduler, loader, router, EplbState and its
rearrangements are vLLM's own. Tried with vLLM 0.32.0.
"""

from __future__ import annotations

import logging
from typing import Any

from . import cpu, eplb, tree

_logger = logging.getLogger("vllm.eplb_codegen")
_done = False


def run_on_cpu() -> None:
    """Adapt this process, once."""
    global _done
    if _done:
        return
    _done = True
    cpu.after_import()
    _eplb_in_runner()
    _tell_of_rearrangements()


def _eplb_in_runner() -> None:
    """The CPU runner loads models in its own way, and leaves EPLB out."""
    runner = tree.need("vllm.v1.worker.cpu_model_runner:CPUModelRunner")
    state = tree.need("vllm.distributed.eplb.eplb_state:EplbState")
    load_model = runner.load_model

    def load_and_add(self: Any, *given: Any, **named: Any) -> None:
        load_model(self, *given, **named)
        cpu.without_cuda()  # its constructor left events that measure no time
        _logger.info("eplb-codegen: this rank runs %s", type(self.model).__module__)
        self._moe_model = eplb.moe_model(self.model)
        if self.parallel_config.enable_eplb:
            assert self._moe_model is not None, "the model is not a MixtureOfExperts"
            self.eplb_state = state(self.parallel_config, self.device)
            self.eplb_state.add_model(self._moe_model, self.model_config)

    runner.load_model = load_and_add


def _tell_of_rearrangements() -> None:
    state = tree.need("vllm.distributed.eplb.eplb_state:EplbState")
    rearrange = state.rearrange

    def rearrange_and_tell(self: Any, *given: Any, **named: Any) -> Any:
        before = {n: s.physical_to_logical_map.clone() for n, s in self.model_states.items()}
        result = rearrange(self, *given, **named)
        for name, of_model in self.model_states.items():
            moved = int((before[name] != of_model.physical_to_logical_map).sum())
            _logger.info("eplb-codegen: a rearrangement moved %d slots", moved)
        return result

    state.rearrange = rearrange_and_tell
