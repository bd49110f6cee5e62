"""`doctor` as a process: a model from a folder, from the hub, and every exit code."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

OLD, NEW = "0.10.0", "0.32.0"


def lines(text: str, about: str) -> str:
    """What the output says about something, advice included."""
    found = re.findall(rf"^  (\w+ +{about}: .*(?:\n +-> .*)?)", text, re.M)
    assert found, text
    return "\n".join(found)


def test_before_and_after_apply(doctor: Any, checkpoint: Callable[..., Path]) -> None:
    model = checkpoint("qwen1.5-moe-a2.7b")
    asked = ("doctor", model, "--vllm", NEW, "--tensor-parallel-size", 4, "--redundant", 4)
    before = doctor(*asked)
    assert before.code == 1
    assert before.out.startswith(f"vLLM {NEW} from the package index, {model}\n")
    text = lines(before.out, "model class")
    assert re.match(r"problem .*Qwen2MoeForCausalLM of vllm/model_executor/models/qwen2_moe", text)
    assert f"-> eplb-codegen apply qwen2_moe --vllm {NEW}" in text
    assert lines(before.out, "quantisation").startswith("ok       quantisation: none: EPLB runs")
    assert "E = 60, R = 4, EP size 4: 16 slots" in lines(before.out, "experts")
    assert "up to 396.0 MiB a rank" in lines(before.out, "memory")

    assert doctor("apply", "qwen2_moe", "--vllm", NEW, "--out", "out").code == 0
    after = doctor(*asked, EPLB_CODEGEN_DIR="out")
    text = lines(after.out, "model class")
    assert re.match(
        r"ok .*Qwen2MoeForCausalLM: the generated class, .*/out/0\.32\.0/qwen2_moe", text
    )
    assert lines(after.out, "generated files").startswith("ok ")

    # what the plugin would refuse, and then vLLM's own class is not what would be served
    file = doctor.folder / "out" / NEW / "qwen2_moe.py"
    file.write_bytes(file.read_bytes() + b"# mine\n")
    edited = doctor(*asked, "--out", "out")
    assert edited.code == 1
    text = lines(edited.out, "generated files")
    assert re.search("warning .*EPLB_CODEGEN_DIR is not set in this environment", text)
    assert re.search("problem .*the plugin would stop the server: .*somebody changed it", text)
    assert "--force" in text


def test_a_wrapper_s_language_model(doctor: Any, checkpoint: Callable[..., Path]) -> None:
    found = doctor(
        *("doctor", checkpoint("qwen3-vl-30b-a3b-w4a16"), "--vllm", "0.11.2"),
        *("-tp", 8, "--redundant", 16, "--json"),
    )
    document = json.loads(found.out)
    assert (found.code, document["vllm"]) == (1, "0.11.2")
    levels = {f["about"]: f["level"] for f in document["findings"]}
    assert levels["model class"] == levels["quantisation"] == "problem"
    assert levels["experts"] == levels["memory"] == "ok"
    says = {f["about"]: f["message"] for f in document["findings"]}
    # with these sizes, and routing weights that its model file does not put on the input
    assert "(CompressedTensorsWNA16MarlinMoEMethod: " in says["quantisation"]
    assert set(document["findings"][0]) == {"level", "about", "message", "advice"}


def test_a_quantisation_method_before_and_after_apply(
    doctor: Any, checkpoint: Callable[..., Path]
) -> None:
    asked = ("doctor", checkpoint("qwen3-vl-30b-a3b-w4a16"), "-tp", 8, "--redundant", 16)
    before = doctor(*asked, "--vllm", "0.11.2")
    text = lines(before.out, "quantisation")
    assert text.startswith("problem  quantisation: compressed-tensors: vLLM refuses EPLB with it")
    assert "-> eplb-codegen apply compressed_tensors_wna16 --vllm 0.11.2 patches it." in text
    assert doctor("apply", "qwen3_vl_moe", "--vllm", "0.11.2", "--out", "out").code == 0
    after = doctor(*asked, "--vllm", "0.11.2", EPLB_CODEGEN_DIR="out")
    text = lines(after.out, "quantisation")
    assert text.startswith("ok       quantisation: compressed-tensors: EPLB runs with it")
    assert "CompressedTensorsWNA16MarlinMoEMethod: supports_eplb is True" in text
    assert "of generated files" in text
    assert "compressed_tensors_moe.py as written" in lines(after.out, "generated files")
    # where it cannot be patched nothing is promised
    text = lines(doctor(*asked, "--vllm", "0.11.0").out, "quantisation")
    assert "-> Serve it without --enable-eplb" in text


def test_a_repaired_file_is_as_good_as_an_added_one(
    doctor: Any, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("qwen3-235b-a22b")
    asked = ("doctor", model, "--vllm", NEW, "-tp", 8, "--redundant", 8)
    text = lines(doctor(*asked).out, "model class")
    assert re.match("problem .*supports EPLB itself, but is faulty: .*fused-replicas", text)
    assert f"-> eplb-codegen apply qwen3_moe --vllm {NEW}" in text
    assert doctor("apply", "qwen3_moe", "--vllm", NEW, "--out", "out").code == 0
    text = lines(doctor(*asked, EPLB_CODEGEN_DIR="out").out, "model class")
    assert re.match(r"ok .*Qwen3MoeForCausalLM: the generated class, .*/qwen3_moe\.py", text)


def test_what_vllm_serves_itself_takes_no_plugin(
    doctor: Any, checkpoint: Callable[..., Path]
) -> None:
    model = checkpoint("mixtral-8x7b", architectures=["DeepseekV3ForCausalLM"])
    asked = ("doctor", model, "--vllm", NEW, "-tp", 2)
    found = doctor(*asked, VLLM_PLUGINS="other")
    assert found.code == 0
    assert re.search("warning .*VLLM_PLUGINS=other leaves it out", lines(found.out, "plugin"))
    assert doctor(*asked, VLLM_PLUGINS="other", EPLB_CODEGEN_DIR="out").code == 1


@pytest.mark.parametrize(
    "arguments, says",
    [
        ("no/such/model/here", "no repository of the Hugging Face hub"),
        ("../x", "no repository"),
        ("org/name", "HF_HUB_OFFLINE is set"),
        (". --redundant -1", "negative"),
        (". --tensor-parallel-size 0", "below 1"),
        (". --vllm 0.10.0 --source x", "not allowed with"),
    ],
)
def test_usage(doctor: Any, arguments: str, says: str) -> None:
    found = doctor("doctor", *arguments.split(), HF_HUB_OFFLINE="1")
    assert (found.code, found.out) == (2, "")
    assert says in found.err


@pytest.mark.parametrize("model", ["empty", "./empty", "folder_as_file", "dangling"])
def test_a_folder_without_a_config_is_not_looked_up_on_the_hub(doctor: Any, model: str) -> None:
    (doctor.folder / "empty").mkdir()
    (doctor.folder / "folder_as_file/config.json").mkdir(parents=True)
    (doctor.folder / "dangling").mkdir()
    (doctor.folder / "dangling/config.json").symlink_to("nowhere")
    found = doctor("doctor", model, "--vllm", NEW, HF_ENDPOINT="http://127.0.0.1:9")
    assert (found.code, found.out) == (2, "")
    assert "config.json is not there, or is no file" in found.err


@pytest.mark.parametrize(
    "env",
    [
        {"ALL_PROXY": "socks5://127.0.0.1:1"},
        {"HTTPS_PROXY": "foo://x"},
        {"HF_TOKEN": "\u00e9"},
    ],
)
def test_settings_that_no_connection_can_be_made_with(doctor: Any, env: dict[str, str]) -> None:
    found = doctor("doctor", "org/name", "--vllm", NEW, **env)
    assert (found.code, found.out) == (2, "")
    assert "cannot be had: " in found.err


def test_home_of_nobody(doctor: Any) -> None:
    found = doctor("doctor", "~nobody-at-all/x", "--vllm", NEW, "--out", "~nobody-at-all/y")
    assert (found.code, found.out) == (2, "")
    assert "~nobody-at-all/x has no config.json" in found.err


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"architectures": ' + "[" * 100_000, '{"hidden_size": 1' + "0" * 400 + "}"],
)
def test_a_damaged_config(doctor: Any, tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    found = doctor("doctor", ".", "--vllm", NEW)
    assert (found.code, found.out) == (2, "")
    assert "config.json" in found.err


class Hub(ThreadingHTTPServer):
    """A hub with one repository."""

    def __init__(self, body: bytes) -> None:
        self.asked: list[tuple[str, str | None]] = []
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                hub.asked.append((self.path, self.headers["authorization"]))
                there = self.path == "/org/moe/resolve/main/config.json"
                self.send_response(200 if there else 404)
                self.end_headers()
                self.wfile.write(body if there else b"no")

            def log_message(self, *_: object) -> None:
                pass

        super().__init__(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server_port}"


@pytest.fixture
def hub(checkpoint: Callable[..., Path]) -> Iterator[Hub]:
    server = Hub((checkpoint("mixtral-8x7b") / "config.json").read_bytes())
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()


def test_from_the_hub(doctor: Any, hub: Hub) -> None:
    env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": "secret", "NO_PROXY": "127.0.0.1"}
    found = doctor("doctor", "org/moe", "--vllm", NEW, "-tp", 3, **env)
    assert found.code == 1
    assert "E = 8, R = 0, EP size 3" in lines(found.out, "experts")
    assert "Take R = 1; 4 and 7" in lines(found.out, "experts")
    assert hub.asked == [("/org/moe/resolve/main/config.json", "Bearer secret")]
    assert f"config.json of org/moe from {hub.url}" in found.err
    gone = doctor("doctor", "org/none", "--vllm", NEW, **env)
    assert (gone.code, gone.out) == (2, "")
    assert "answers 404" in gone.err and "secret" not in gone.err


def test_from_the_hub_s_cache(doctor: Any, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    folder = tmp_path / "hf" / "hub" / "models--org--moe"
    (folder / "refs").mkdir(parents=True)
    (folder / "refs" / "main").write_text("abc123")
    (folder / "snapshots").mkdir()
    checkpoint("mixtral-8x7b").rename(folder / "snapshots" / "abc123")
    found = doctor("doctor", "org/moe", "--vllm", NEW, "-tp", 2, HF_HUB_OFFLINE="1")
    assert "E = 8, R = 0, EP size 2" in lines(found.out, "experts")


def test_without_a_model(doctor: Any) -> None:
    found = doctor("doctor")
    assert found.code in (0, 1)
    assert "EPLB_CODEGEN_DIR is not set: the plugin does nothing" in found.out
    assert "experts" not in found.out
