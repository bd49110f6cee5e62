"""Which classes vLLM serves from which model file, by its registry."""

from __future__ import annotations

import ast

from ..errors import Refusal
from .modules import MODELS, Modules


def served_classes(modules: Modules, stem: str) -> dict[str, str]:
    """Architecture -> class name, of those that the registry takes from the model file `stem`.

    Raises:
        Refusal: the tree has no registry.
    """
    return {a: name for a, (module, name) in registered(modules).items() if module == stem}


def registered(modules: Modules) -> dict[str, tuple[str, str]]:
    """Architecture -> (module, class name), of all that the registry knows.

    The registry holds entries `"Architecture": ("module", "Class")` in several dictionaries. The
    module is one of the folder of model files, or has dots and is named in full.

    Raises:
        Refusal: the tree has no registry.
    """
    registry = modules.get(f"{MODELS}.registry")
    if registry is None:
        raise Refusal("vllm/model_executor/models/registry.py not found")
    found: dict[str, tuple[str, str]] = {}
    for node in registry.tree.body:
        value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
        if not isinstance(value, ast.Dict):
            continue
        for key, entry in zip(value.keys, value.values, strict=True):
            if (
                isinstance(key, ast.Constant)
                and isinstance(entry, ast.Tuple)
                and len(entry.elts) == 2
                and isinstance(entry.elts[0], ast.Constant)
                and isinstance(entry.elts[1], ast.Constant)
            ):
                found[str(key.value)] = (str(entry.elts[0].value), str(entry.elts[1].value))
    return found
