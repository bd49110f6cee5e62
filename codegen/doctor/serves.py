"""Which class vLLM serves a model with, and whether EPLB works with that class."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from ..analysis.anatomy import is_native
from ..analysis.modules import MODELS, Modules
from ..analysis.registry import registered
from ..families import family
from ..generate import Generator, Result
from ..planning.plan import State
from ..serving.folder import Served as GeneratedFile
from ..source import SourceTree
from .config import ModelConfig
from .finding import Finding, ok, problem, warning

ABOUT = "model class"


class Served(NamedTuple):
    """The class, by the registry."""

    architecture: str
    module: str
    name: str
    path: str | None


def served_by(modules: Modules, config: ModelConfig) -> Served | None:
    """What the registry gives for the first architecture that it knows; None if it knows none."""
    known = registered(modules)
    for architecture in config.architectures:
        if architecture in known:
            stem, name = known[architecture]
            module = stem if "." in stem else f"{MODELS}.{stem}"
            return Served(architecture, module, name, modules.tree.module_path(module))
    return None


def class_findings(
    tree: SourceTree,
    modules: Modules,
    config: ModelConfig,
    served: Served | None,
    files: Sequence[GeneratedFile],
    folder: Path | None,
    strained: bool,
) -> list[Finding]:
    """What serves the model.

    The plugin would put `files` in place. `folder` is OUT, where `apply` writes. `strained` tells
    whether there are redundant experts or several pipeline stages, with which vLLM's own support
    may be faulty.
    """
    if not config.architectures:
        return [problem(ABOUT, f"{config.where} names no architecture")]
    if served is None:
        return [_fallback(modules, config)]
    upstream = f"{served.name} of {served.path or served.module}"
    result = _result(tree, served)
    generated = [f.path for f in files if served.architecture in f.architectures]
    if generated:
        found = [ok(ABOUT, f"{served.architecture}: the generated class, {generated[0]}")]
        if result and result.state is State.NATIVE:
            found.append(warning(ABOUT, f"vLLM's own {upstream} supports EPLB and is sound by now"))
        return found
    if result is None or result.state is State.UNRECOGNISED:
        return [_by_its_bases(modules, served, upstream, result)]
    return [_upstream(tree, result, upstream, folder, strained)]


def _result(tree: SourceTree, served: Served) -> Result | None:
    """What the tool makes of vLLM's own file; None for one that it cannot take."""
    stem = served.module.removeprefix(f"{MODELS}.")
    if "." in stem:
        return None
    return Generator(tree).generate(family(stem))


def _upstream(
    tree: SourceTree, result: Result, upstream: str, folder: Path | None, strained: bool
) -> Finding:
    if result.state is State.NATIVE:
        return ok(ABOUT, f"{upstream} supports EPLB itself ({result.state.value})")
    reason, _, more = result.reason.partition("\n")
    if result.entry is None:
        return problem(ABOUT, f"{upstream}: {result.state.value}: {reason}", more.strip())
    out = f" --out {folder}" if folder and folder != Path("generated") else ""
    advice = (
        f"eplb-codegen apply {result.family.name} --vllm {tree.version}{out}, and start vLLM "
        f"with EPLB_CODEGEN_DIR={(folder or Path('generated')).resolve()}"
    )
    if result.state is State.ADDED:
        return problem(ABOUT, f"{upstream} does not support EPLB: {reason}", advice)
    message = f"{upstream} supports EPLB itself, but is faulty: {reason}"
    return problem(ABOUT, message, advice) if strained else warning(ABOUT, message, advice)


def _by_its_bases(
    modules: Modules, served: Served, upstream: str, result: Result | None
) -> Finding:
    """A class that this tool does not take in: whether vLLM says that it supports EPLB."""
    module = modules.get(served.module)
    ref = modules.class_of(module, served.name) if module else None
    reason, _, more = result.reason.partition("\n") if result else ("", "", "")
    why = f": {reason}" if reason else ""
    if ref is None:
        return warning(ABOUT, f"{upstream}: whether it supports EPLB is not known{why}")
    if is_native(modules, ref):
        return warning(
            ABOUT,
            f"{upstream} supports EPLB itself; whether it is sound is not known{why}",
            "`eplb-codegen verify --upstream` shows it for the families that it knows.",
        )
    advice = more.strip() or "Serve it without --enable-eplb."
    return problem(ABOUT, f"{upstream} does not support EPLB{why}", advice)


def _fallback(modules: Modules, config: ModelConfig) -> Finding:
    """vLLM's Transformers backend takes what the registry does not know."""
    names = ", ".join(config.architectures)
    known = registered(modules)
    backend = [a for a in known if a.startswith("Transformers") and "MoE" in a]
    backend = backend or [a for a in known if a.startswith("Transformers")]
    code = " and its own code (auto_map)" if config.whole.get("auto_map") else ""
    message = f"vLLM's registry does not know {names}: its Transformers backend{code} would be used"
    multimodal = config.text is not config.whole
    fitting = [a for a in backend if ("MultiModal" in a or "Multimodal" in a) is multimodal]
    native = False
    for architecture in fitting[:1]:
        stem, name = known[architecture]
        module = modules.get(f"{MODELS}.{stem}")
        ref = modules.class_of(module, name) if module else None
        native = ref is not None and is_native(modules, ref)
        message += f" ({name}, {'a' if native else 'not a'} MixtureOfExperts)"
    if native:
        return warning(ABOUT, f"{message}; whether it is sound for this model is not known")
    return problem(ABOUT, message, "Serve it without --enable-eplb.")
