"""Generated models in vLLM's registry: what lies in the folder is checked, then put in place."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from ..paths import expanded
from ..plugin import FOLDER
from ..source.local import installed_tree, tree_at
from .folder import NotServed, Served, served

__all__ = ["NotServed", "Served", "put_in_place", "served"]


def put_in_place(folder: str) -> None:
    """Have vLLM serve the generated classes; may be called more than once in a process.

    Raises:
        Fault: the folder does not hold what the manifest says, or is not for this vLLM.
    """
    path = expanded(folder).absolute()
    # processes that this one starts may work in another folder
    os.environ[FOLDER] = str(path)
    vllm = sys.modules.get("vllm")
    # the one that runs, should there be two
    tree = tree_at(Path(vllm.__file__).parent) if vllm and vllm.__file__ else installed_tree()
    if tree is None:
        raise NotServed("vLLM is not installed here", "Install it in this environment.")
    try:
        files = served(path, tree)
    except OSError as error:
        raise NotServed(f"{path} cannot be read: {error}") from None

    from .registry import register

    register(files)
