"""A model's config.json: found, and read for what EPLB depends on."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from ..errors import EnvironmentFault
from ..paths import expanded

MAX_BYTES = 4_000_000
"""A larger one is no config.json; the largest have some 100 kB."""
EXPERTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names of E, in the order in which vLLM asks for them (`get_num_experts`)."""
NESTED = ("text_config", "llm_config", "language_config", "thinker_config")
"""Where multimodal configurations keep that of their language model."""
TRUE = ("1", "true", "yes", "on")


class ModelConfig(NamedTuple):
    """A config.json."""

    where: str
    whole: dict[str, Any]
    text: dict[str, Any]
    """The part for the language model; the whole where there is no other."""

    @property
    def architectures(self) -> list[str]:
        found = self.whole.get("architectures")
        return [str(a) for a in found] if isinstance(found, list) else []

    @property
    def experts(self) -> int | None:
        """E, the logical experts of a layer; None for a dense model."""
        for name in EXPERTS:
            value = self.text.get(name)
            if isinstance(value, list) and value:
                value = value[0]  # Ernie-VL's: the same number for each modality
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        return None

    def number(self, name: str) -> int | None:
        """A field of the language model that is a whole number."""
        value = self.text.get(name)
        return value if isinstance(value, int) and not isinstance(value, bool) else None

    @property
    def intermediate_size(self) -> int | None:
        """Of one routed expert."""
        return self.number("moe_intermediate_size") or self.number("intermediate_size")


def read_config(
    model: str, progress: Callable[[str], None], environment: Mapping[str, str] = os.environ
) -> ModelConfig:
    """The config.json of a folder, or of a repository of the Hugging Face hub.

    A repository's is taken from the hub's cache, or else this one file is downloaded (HF_HOME,
    HF_HUB_CACHE, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE mean what they mean there).

    Raises:
        EnvironmentFault: it cannot be had, or is not what it should be.
    """
    path = expanded(model)
    try:
        folder = path.is_dir()
        there = folder or path.exists()
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror or error}") from None
    if there:
        path = path / "config.json" if folder else path
        if not path.is_file():
            raise EnvironmentFault(f"{path} is not there, or is no file")
        return _parsed(_bytes(path), str(path))
    if not re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", model) or ".." in model:
        raise EnvironmentFault(
            f"{model} has no config.json and is no repository of the Hugging Face hub",
            "Give the folder of a checkpoint, or a name such as Qwen/Qwen1.5-MoE-A2.7B.",
        )
    if cached := _cached(model, environment):
        return _parsed(_bytes(cached), f"config.json of {model} (in the hub's cache)")
    return _parsed(_download(model, progress, environment), f"config.json of {model}")


def _parsed(data: bytes, where: str) -> ModelConfig:
    try:
        whole = json.loads(data, parse_int=_whole_number)
    except (ValueError, RecursionError) as error:
        raise EnvironmentFault(f"{where} is not valid JSON: {error}") from None
    if not isinstance(whole, dict):
        raise EnvironmentFault(f"{where} holds no JSON object")
    return ModelConfig(where, whole, _text(whole))


def _whole_number(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"a number of {len(digits)} digits")
    return int(digits)


def _text(config: dict[str, Any]) -> dict[str, Any]:
    for name in NESTED:
        inner = config.get(name)
        if isinstance(inner, dict):
            return _text(inner)
    return config


def _bytes(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            return _bounded(stream.read(MAX_BYTES + 1), str(path))
    except OSError as error:
        raise EnvironmentFault(f"{path} cannot be read: {error.strerror or error}") from None


def _bounded(data: bytes, where: str) -> bytes:
    if len(data) > MAX_BYTES:
        raise EnvironmentFault(f"{where} is larger than {MAX_BYTES / 1e6:.0f} MB")
    return data


def _cached(model: str, environment: Mapping[str, str]) -> Path | None:
    """The file in the hub's cache: models--ORG--NAME/snapshots/<refs/main>/config.json."""
    cache = Path(environment.get("XDG_CACHE_HOME") or "~/.cache")
    home = Path(environment.get("HF_HOME") or cache / "huggingface")
    hub = expanded(environment.get("HF_HUB_CACHE") or home / "hub")
    folder = hub / f"models--{model.replace('/', '--')}"
    try:
        revision = (folder / "refs" / "main").read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError):
        return None
    path = folder / "snapshots" / revision / "config.json"
    try:
        return path if path.is_file() else None
    except OSError:
        return None


def _download(model: str, progress: Callable[[str], None], environment: Mapping[str, str]) -> bytes:
    if environment.get("HF_HUB_OFFLINE", "").lower() in TRUE:
        raise EnvironmentFault(
            f"{model} is neither a folder nor in the hub's cache, and HF_HUB_OFFLINE is set",
            "Give a folder that holds its config.json.",
        )
    import httpx2

    endpoint = environment.get("HF_ENDPOINT") or "https://huggingface.co"
    url = f"{endpoint.rstrip('/')}/{model}/resolve/main/config.json"
    token = environment.get("HF_TOKEN", "")
    headers = {"authorization": f"Bearer {token}"} if token else {}
    progress(f"config.json of {model} from {endpoint}")
    advice = "Give a folder that holds its config.json; for a gated model set HF_TOKEN."
    try:
        with httpx2.stream(
            "GET", url, headers=headers, follow_redirects=True, timeout=20
        ) as answer:
            if answer.status_code != 200:
                raise EnvironmentFault(f"{url} answers {answer.status_code}", advice)
            data = b""
            for chunk in answer.iter_bytes():
                data = _bounded(data + chunk, url)
            return data
    # ImportError: a proxy of a kind that takes another package; ValueError: of no kind at all
    except (httpx2.HTTPError, httpx2.InvalidURL, ImportError, ValueError) as error:
        raise EnvironmentFault(f"{url} cannot be had: {error}", advice) from None


MAX_DIGITS = 18
"""Of a size: what is longer is none, and takes no part in sums."""
