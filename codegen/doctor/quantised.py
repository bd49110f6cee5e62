"""Whether EPLB runs with a model's quantisation."""

from __future__ import annotations

from collections.abc import Sequence

from ..analysis.modules import Modules
from ..analysis.moe_methods import Supports
from ..analysis.quantization import Experts, answer
from ..errors import Fault
from ..families import known_families
from ..generate import Generator
from ..planning.plan import State
from ..serving.folder import Served as GeneratedFile
from ..source import Overlay, SourceTree
from .config import ModelConfig
from .finding import Finding, Level
from .serves import Served

ABOUT = "quantisation"
BACKEND = "--moe-backend"
LEVELS = {
    Supports.YES: Level.OK,
    Supports.NO: Level.PROBLEM,
    Supports.DEPENDS: Level.WARNING,
    Supports.UNKNOWN: Level.WARNING,
}


def quantisation_finding(
    tree: SourceTree, config: ModelConfig, served: Served | None, files: Sequence[GeneratedFile]
) -> Finding:
    """The MoE methods that may be taken on a CUDA machine, each with its answer.

    The plugin would put `files` in place.
    """
    put = {f.replaces: f.source.decode() for f in files if f.replaces}
    modules = Modules(Overlay.of(tree, put))
    found = answer(modules, config.whole, _experts(modules, config, served))
    alike = len({(m.supports, m.reason) for m in found.methods}) == 1
    names = ", ".join(m.name for m in found.methods)
    if alike:
        details = f"{names}: {found.methods[0].reason}"
    else:
        each = [f"{m.name}: {m.supports.value}, {m.reason}" for m in found.methods]
        details = "; ".join([found.reason, *each])
    if put and any(m.path in put for m in found.methods):
        details += "; of generated files"
    advice = ""
    patch = _patch(tree, [m.name for m in found.methods if m.supports is Supports.NO])
    if patch:
        advice = f"eplb-codegen apply {patch} --vllm {tree.version} patches it."
    elif found.supports is Supports.NO:
        advice = "Serve it without --enable-eplb, or take a checkpoint in another quantisation."
    elif found.supports is Supports.DEPENDS:
        advice = "vLLM logs the class or the backend that it takes while it loads the model"
        advice += f"; {BACKEND} asks for a backend." if _has_option(modules, BACKEND) else "."
    message = f"{found.quantization}: {found.supports.said} ({details})"
    return Finding(LEVELS[found.supports], ABOUT, message, advice)


def _patch(tree: SourceTree, methods: Sequence[str]) -> str | None:
    """The target that adds EPLB to one of these classes in this vLLM, if one does."""
    for target in known_families():
        if set(target.methods) & set(methods):
            result = Generator(tree).generate(target)
            if result.state is State.ADDED:
                return target.name
    return None


def _has_option(modules: Modules, option: str) -> bool:
    module = modules.get("vllm.engine.arg_utils")
    return module is not None and f'"{option}"' in module.source


def _experts(modules: Modules, config: ModelConfig, served: Served | None) -> Experts:
    activation = config.text.get("hidden_act")
    return Experts(
        config.number("hidden_size"),
        config.intermediate_size,
        activation if isinstance(activation, str) else None,
        _router_weight_on_input(modules, served),
    )


def _router_weight_on_input(modules: Modules, served: Served | None) -> bool | None:
    """False where the model's file does not speak of it, as the default is."""
    if served is None or served.path is None:
        return None
    try:
        text = modules.tree.read(served.path)
    except Fault:
        return None
    return None if "apply_router_weight_on_input" in text else False
