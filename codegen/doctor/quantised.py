"""Whether EPLB runs with a model's quantisation."""

from __future__ import annotations

from ..analysis.modules import Modules
from ..analysis.moe_methods import Supports
from ..analysis.quantization import Experts, answer
from ..errors import Fault
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


def quantisation_finding(modules: Modules, config: ModelConfig, served: Served | None) -> Finding:
    """The MoE methods that may be taken on a CUDA machine, each with its answer."""
    found = answer(modules, config.whole, _experts(modules, config, served))
    says = {
        Supports.YES: "EPLB runs with it",
        Supports.NO: "vLLM refuses EPLB with it",
        Supports.DEPENDS: "it depends",
        Supports.UNKNOWN: "not known",
    }[found.supports]
    alike = len({(m.supports, m.reason) for m in found.methods}) == 1
    names = ", ".join(m.name for m in found.methods)
    if alike:
        details = f"{names}: {found.methods[0].reason}"
    else:
        each = [f"{m.name}: {m.supports.value}, {m.reason}" for m in found.methods]
        details = "; ".join([found.reason, *each])
    advice = ""
    if found.supports is Supports.NO:
        advice = "Serve it without --enable-eplb, or take a checkpoint in another quantisation."
    elif found.supports is Supports.DEPENDS:
        advice = "vLLM logs the class or the backend that it takes while it loads the model"
        advice += f"; {BACKEND} asks for a backend." if _has_option(modules, BACKEND) else "."
    message = f"{found.quantization}: {says} ({details})"
    return Finding(LEVELS[found.supports], ABOUT, message, advice)


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
