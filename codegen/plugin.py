"""The entry point `vllm.general_plugins`: vLLM calls `register` in every process that it starts."""

from __future__ import annotations

import os

FOLDER = "EPLB_CODEGEN_DIR"
"""The folder that `apply` wrote to (its --out). Without it the plugin does nothing."""
CPU_REFERENCE = "EPLB_CODEGEN_CPU_REFERENCE"
"""If "1", EPLB runs on CPU ranks with reference kernels: for tests, and slow."""


def register() -> None:
    """Put the generated models in place, or end the process with what to do.

    vLLM logs an error that is raised while a plugin is imported and goes on; one that is raised
    here stops it. Nothing is imported before the environment asks for it.

    Raises:
        Fault: what would be served is not what the manifest says.
    """
    if folder := os.environ.get(FOLDER):
        from .serving import put_in_place

        put_in_place(folder)
    if os.environ.get(CPU_REFERENCE) == "1":
        from .verify.worker.engine import run_on_cpu

        run_on_cpu()
