"""Everything that is looked at, in the order in which it would go wrong."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from ..analysis.modules import Modules
from ..errors import Fault
from ..source import SourceTree
from .config import ModelConfig
from .finding import Finding, Level, problem
from .folder import generated
from .plugin import plugin_findings
from .quantised import ABOUT as QUANTISATION
from .quantised import quantisation_finding
from .serves import ABOUT as CLASS
from .serves import class_findings, served_by
from .spread import ABOUT as EXPERTS
from .spread import Sizes, spread_findings


class Request(NamedTuple):
    """What is to be served, on what; without a model only the installation is looked at."""

    tree: SourceTree | None
    config: ModelConfig | None
    sizes: Sizes
    folder: Path | None
    """OUT, where `apply` wrote."""


def examine(request: Request) -> list[Finding]:
    """What would go wrong. A part that cannot be looked at becomes a problem of its own."""
    folder = request.folder
    files, about_files = generated(request.tree, folder)
    installation = [*plugin_findings(os.environ), *about_files]
    tree, config = request.tree, request.config
    if tree is None or config is None:
        return installation
    modules = Modules(tree)
    served = served_by(modules, config)
    strained = bool(request.sizes.redundant) or request.sizes.stages > 1
    classes = _found(
        CLASS, lambda: class_findings(tree, modules, config, served, files, folder, strained)
    )
    if folder is None and all(f.level is not Level.PROBLEM for f in classes):
        # vLLM's own class is to be served: that takes no plugin
        installation = [
            f._replace(level=Level.WARNING) if f.level is Level.PROBLEM else f for f in installation
        ]
    return [
        *installation,
        *classes,
        *_found(QUANTISATION, lambda: [quantisation_finding(tree, config, served, files)]),
        *_found(EXPERTS, lambda: spread_findings(modules, config, request.sizes)),
    ]


def _found(about: str, part: Callable[[], list[Finding]]) -> list[Finding]:
    try:
        return part()
    except Fault as fault:
        return [problem(about, fault.message, fault.advice)]
