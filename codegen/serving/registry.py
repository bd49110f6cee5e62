"""Generated files in place of upstream's: models by the registry, others as they are imported."""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Iterable

from ..plugin import FOLDER
from .folder import Served
from .modules import importable

# vLLM shows what loggers below its own name say
_logger = logging.getLogger("vllm.eplb_codegen")


def register(files: Iterable[Served]) -> None:
    """Register every architecture of the files, and say so in a line each.

    By name and not by class: importing a model may set up the GPU, which a process that is to fork
    must not (`ModelRegistry.register_model`).
    """
    from vllm.model_executor.models import ModelRegistry

    listed = list(files)
    importable(listed)
    for file in listed:
        for architecture, name in file.architectures.items():
            ModelRegistry.register_model(architecture, f"{file.module}:{name}")
            _tell(f"eplb-codegen: {architecture} is served from {file.path}")
        if file.replaces:
            _tell(f"eplb-codegen: {file.module} is taken from {file.path}")
    _carry_to_ray_workers()


def _carry_to_ray_workers() -> None:
    """Ray's processes have the environment of `ray start`; vLLM copies what it knows to them.

    In every release that is what `vllm.envs` lists: `vllm/ray/ray_env.py` from 0.10.0, in 0.9.2
    `vllm/executor/ray_distributed_executor.py`.
    """
    from vllm import envs

    envs.environment_variables[FOLDER] = lambda: os.environ.get(FOLDER)


def _tell(line: str) -> None:
    if _logger.hasHandlers():
        _logger.info(line)
    else:
        # the API server of 0.32 sets up its log after it has loaded plugins
        print(line, file=sys.stderr, flush=True)
