"""The plan for a family in a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from ..analysis.anatomy import Anatomy, NoExperts, anatomy, is_native
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities, capabilities, expert_layer_class
from ..analysis.modules import MODELS, ClassRef, Module, Modules
from ..analysis.registry import served_classes
from ..analysis.soundness import Fault, Kind, faults
from ..analysis.syntax import Function
from ..errors import Refusal
from ..families import Family
from .block import plan_block, plan_inherited_block
from .loader import plan_loader
from .plan import Draft, FilePlan, Plan, State
from .protocol import plan_protocol
from .repair import plan_repairs


def plan_family(modules: Modules, family: Family) -> Plan:
    """What is to be done for a family.

    Raises:
        Refusal: a part that a patch needs was not found.
    """
    files: dict[str, Module] = {}
    for name in family.files:
        module = modules.get(f"{MODELS}.{name.removesuffix('.py')}")
        if module is None:
            return Plan(family, State.ABSENT, f"vllm/model_executor/models/{name} is not there")
        _check_once(module)
        files[name] = module
    architectures = {n: served_classes(modules, n.removesuffix(".py")) for n in files}
    served = [
        (module, name)
        for file, module in files.items()
        for name in dict.fromkeys(architectures[file].values())
    ]
    if not served:
        raise Refusal(
            f"vLLM's registry serves no class from {', '.join(family.files)}",
            next(iter(files.values())).path,
        )
    builds = Builds(modules)
    draft = Draft(m.path for m in files.values())
    native: list[str] = []
    added: list[str] = []
    faulty: dict[Fault, None] = {}
    dense: list[NoExperts] = []
    for module, name in served:
        ref = modules.class_of(module, name)
        if ref is None:
            raise Refusal(f"class {name}, which the registry names, not found", module.path)
        try:
            found = anatomy(modules, builds, ref)
            offered = _capabilities(modules, found)
            # a release that looks inside wrappers needs no protocol on them
            inner = offered.protocol.unwrapped and is_native(modules, found.causal)
            if not inner and not is_native(modules, ref):
                added.append(name)
                _plan_served(draft, found, modules, builds, offered)
                continue
            native.append(name)
            here = faults(modules, builds, found, offered)
            faulty.update(dict.fromkeys(here))
            if here:
                plan_repairs(draft, found, modules, builds, offered, here)
        except NoExperts as refusal:
            # DeepseekForCausalLM stands in the file of DeepseekV2ForCausalLM
            dense.append(refusal)
        except Refusal as refusal:
            if not is_native(modules, ref):
                raise
            raise Refusal(
                f"{name} is a MixtureOfExperts by vLLM itself, but it was not found out whether "
                f"that is sound: {refusal.message}",
                "",
                refusal.advice,
            ) from None
    if not added and not native:
        raise dense[0]
    if not draft.edits:
        return Plan(family, State.NATIVE, f"{', '.join(native)}: MixtureOfExperts by vLLM itself")
    untouched = [m.path for m in files.values() if m.path not in draft.edits]
    if untouched and added:
        raise Refusal(f"nothing to patch in {', '.join(untouched)}")
    plans = [
        FilePlan(
            module,
            # a file without edits goes along: it imports from the one that has some
            tuple(draft.edits.get(module.path, ())),
            tuple(sorted(architectures[file].items())),
        )
        for file, module in files.items()
    ]
    listed = tuple(faulty)
    reasons = [f"{', '.join(added)}: not a MixtureOfExperts in vLLM"] if added else []
    reasons += by_kind(listed)
    state = State.ADDED if added else State.REPAIRED
    return Plan(family, state, "; ".join(reasons), tuple(plans), listed)


def by_kind(listed: Iterable[Fault]) -> list[str]:
    """What is wrong and where, a line for each kind; the folder of the model files left out."""
    found: dict[Kind, list[str]] = {}
    for fault in listed:
        found.setdefault(fault.kind, []).append(fault.where.rpartition("/")[2])
    return [f"{kind.slug}: {kind.what} ({', '.join(at)})" for kind, at in found.items()]


def _check_once(module: Module) -> None:
    """Edits are placed in the class of a name, so there must be one."""
    seen: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            if node.name in seen:
                raise Refusal(f"class {node.name} is defined twice", module.where(node))
            seen.add(node.name)
            for statement in node.body:
                if isinstance(statement, ast.If | ast.Try) and any(
                    isinstance(n, Function) for n in ast.walk(statement)
                ):
                    raise Refusal(
                        f"{node.name} has methods in some cases only", module.where(statement)
                    )


def _plan_served(
    draft: Draft, found: Anatomy, modules: Modules, builds: Builds, offered: Capabilities
) -> None:
    plan_inherited_block(draft, found, builds, offered)
    plan_block(draft, found, builds, offered)
    plan_loader(draft, found, modules, builds, offered)
    plan_protocol(draft, found, modules, builds, offered)


def _capabilities(modules: Modules, found: Anatomy) -> Capabilities:
    owner: ClassRef = found.block.experts.constructor
    layer = expert_layer_class(modules, owner.module, found.block.experts.builder)
    return capabilities(modules, layer)
