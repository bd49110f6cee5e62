"""Finding what a release offers, by looking for it: no code here or elsewhere compares versions."""

from __future__ import annotations

import dataclasses
import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

MOE = "vllm.model_executor.layers.fused_moe"


def module(name: str) -> Any | None:
    """The module, or None where this release has none of that name.

    One that is there but wants a package that is not is an error: it must not pass for absent.
    """
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name and (name == error.name or name.startswith(f"{error.name}.")):
            return None
        raise


def find(*places: str) -> Any | None:
    """The first of "module:name" that exists in this release."""
    for place in places:
        path, _, name = place.partition(":")
        found = module(path)
        if found is not None and hasattr(found, name):
            return getattr(found, name)
    return None


def need(*places: str) -> Any:
    found = find(*places)
    if found is None:
        raise LookupError(f"this vLLM has none of {', '.join(places)}")
    return found


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether the function has this parameter."""
    return name in inspect.signature(function).parameters


def fields(config: Any) -> set[str]:
    return {f.name for f in dataclasses.fields(config)}


def replace(places: Sequence[str], value: Any) -> int:
    """Replace every "module:name" that this release has; returns how many there were."""
    done = 0
    for place in places:
        path, _, name = place.partition(":")
        found = module(path)
        if found is not None and hasattr(found, name):
            setattr(found, name, value)
            done += 1
    return done
