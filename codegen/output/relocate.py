"""A model file made to work outside vLLM's tree: its imports of the package made absolute."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..analysis.modules import Module, absolute
from ..analysis.syntax import imports, source_lines
from ..rewrite import style


def relocate(module: Module, beside: Iterable[str], by_ruff: bool) -> str:
    """A module's source with `from .x import y` as `from vllm.model_executor.models.x import y`.

    Args:
        module: one of vllm.model_executor.models.
        beside: modules generated into the same folder; imports of these stay relative.
        by_ruff: whether the file follows ruff's style or yapf's.
    """
    stay = set(beside)
    lines = source_lines(module.source)
    newline = "\r\n" if "\r\n" in module.source else "\n"
    for node in sorted(imports(module.tree), key=lambda n: -n.lineno):
        if not isinstance(node, ast.ImportFrom) or not node.level or node.module in stay:
            continue
        target = absolute(module, node)
        first, last = node.lineno - 1, (node.end_lineno or node.lineno) - 1
        text = "".join(lines[first : last + 1])
        old = f"from {'.' * node.level}{node.module or ''} import"
        new = f"from {target} import"
        if not by_ruff and "#" not in text:
            indent = text[: len(text) - len(text.lstrip())]
            names = [f"{a.name} as {a.asname}" if a.asname else a.name for a in node.names]
            flat = f"{indent}{new} {', '.join(names)}"
            fits = len(flat) <= style.YAPF_COLUMNS
            text = (flat if fits else style.fill(f"{indent}{new} (", names, ")")) + "\n"
            text = text.replace("\n", newline)
        else:
            text = text.replace(old, new, 1)
        lines[first : last + 1] = [text]
    moved = "".join(lines)
    return style.format_with_ruff(moved) if by_ruff else moved
