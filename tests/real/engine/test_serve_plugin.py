"""The plugin in processes as vLLM starts them, and the refusals that stop a server."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from conftest import ServerFailed

ARCHITECTURE = "Qwen2MoeForCausalLM"


@pytest.fixture
def python(environment: dict[str, str], generated: Path, tmp_path: Path) -> Any:
    """Runs a script in a new interpreter with the plugin's folder set, in a folder elsewhere."""

    def run(code: str, cwd: Path = tmp_path, **extra: str) -> str:
        script = tmp_path / "script.py"
        script.write_text(code)
        done = subprocess.run(
            [sys.executable, str(script)],
            env={**environment, "EPLB_CODEGEN_DIR": str(generated), **extra},
            cwd=cwd,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_as_a_ray_worker_starts_with_the_upstream_module_imported_first(python: Any) -> None:
    """A new interpreter that gets the environment, and loads plugins before its model."""
    out = python(
        "import vllm.model_executor.models.qwen2_moe as theirs\n"
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins(); load_general_plugins()\n"
        "from eplb_codegen.plugin import register\n"
        "register()\n"
        "from vllm.model_executor.models import ModelRegistry\n"
        f"ours = ModelRegistry.models['{ARCHITECTURE}'].load_model_cls()\n"
        "print(ours.__module__, ours is theirs.Qwen2MoeForCausalLM, theirs.__name__)\n"
    )
    module, same, upstream = out.split()[-3:]
    assert (module, same) == ("eplb_codegen_generated.qwen2_moe", "False")
    assert upstream == "vllm.model_executor.models.qwen2_moe"


def test_a_spawned_child_of_a_process_with_a_relative_folder(python: Any, generated: Path) -> None:
    out = python(
        "import multiprocessing, os\n"
        "from vllm.plugins import load_general_plugins\n"
        "def child():\n"
        "    load_general_plugins()\n"
        "    from vllm.model_executor.models import ModelRegistry\n"
        f"    ours = ModelRegistry.models['{ARCHITECTURE}']\n"
        "    print('child', os.getcwd(), ours.load_model_cls().__module__, flush=True)\n"
        "if __name__ == '__main__':\n"
        "    load_general_plugins()\n"
        "    os.chdir('/')\n"
        "    process = multiprocessing.get_context('spawn').Process(target=child)\n"
        "    process.start()\n"
        "    process.join()\n"
        "    assert process.exitcode == 0\n",
        EPLB_CODEGEN_DIR=generated.name,
        cwd=generated.parent,
    )
    assert "child / eplb_codegen_generated.qwen2_moe\n" in out


def test_the_process_that_inspects_models_sees_the_generated_class(
    python: Any, tmp_path: Path
) -> None:
    python(
        "from vllm.plugins import load_general_plugins\n"
        "load_general_plugins()\n"
        "from vllm.model_executor.models import ModelRegistry\n"
        f"info = ModelRegistry.models['{ARCHITECTURE}'].inspect_model_cls()\n"
        f"assert info.architecture == '{ARCHITECTURE}', info\n",
        VLLM_CACHE_ROOT=str(tmp_path),
    )
    remembered = [path.name for path in (tmp_path / "modelinfos").iterdir()]
    assert remembered == [f"eplb_codegen_generated-qwen2_moe-{ARCHITECTURE}.json"]


@pytest.mark.parametrize("what", ["missing", "changed"])
def test_a_server_stops_with_what_to_run(
    serve: Any, checkpoint: Any, generated: Path, tmp_path: Path, what: str
) -> None:
    folder = tmp_path / "generated"
    if what == "changed":
        shutil.copytree(generated, folder)
        with (folder / "0.32.0" / "qwen2_moe.py").open("a") as stream:
            stream.write("# mine\n")
    model = checkpoint("qwen2_moe", "per-expert")
    with pytest.raises(ServerFailed) as failed, serve(model, EPLB_CODEGEN_DIR=str(folder)):
        pass
    log = str(failed.value)
    assert {"missing": "there is no such folder", "changed": "somebody changed it"}[what] in log
    assert f"--out {folder}" in log
