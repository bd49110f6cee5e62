"""The plan for a family in a tree."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy, NoExperts, anatomy, is_native
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities, capabilities, expert_layer_class
from ..analysis.modules import MODELS, ClassRef, Module, Modules
from ..analysis.registry import served_classes
from ..errors import Refusal
from ..families import Family
from .block import plan_block, plan_inherited_block
from .loader import plan_loader
from .plan import Draft, FilePlan, Plan, State
from .protocol import plan_protocol


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
    dense: list[NoExperts] = []
    for module, name in served:
        ref = modules.class_of(module, name)
        if ref is None:
            raise Refusal(f"class {name}, which the registry names, not found", module.path)
        if is_native(modules, ref):
            native.append(name)
            continue
        try:
            found = anatomy(modules, builds, ref)
        except NoExperts as refusal:
            # DeepseekForCausalLM stands in the file of DeepseekV2ForCausalLM
            dense.append(refusal)
            continue
        offered = _capabilities(modules, found)
        if offered.protocol.unwrapped and is_native(modules, found.causal):
            # a release that looks inside wrappers needs no protocol on them
            native.append(name)
            continue
        _plan_served(draft, found, modules, builds, offered)
    if not draft.edits and not native:
        raise dense[0]
    if not draft.edits:
        return Plan(family, State.NATIVE, f"{', '.join(native)}: MixtureOfExperts by vLLM itself")
    untouched = [m.path for m in files.values() if m.path not in draft.edits]
    if untouched:
        raise Refusal(f"nothing to patch in {', '.join(untouched)}")
    plans = [
        FilePlan(
            module, tuple(draft.edits[module.path]), tuple(sorted(architectures[file].items()))
        )
        for file, module in files.items()
    ]
    classes = ", ".join(name for _, name in served)
    return Plan(family, State.ADDED, f"{classes}: not a MixtureOfExperts in vLLM", tuple(plans))


def _check_once(module: Module) -> None:
    """Edits are placed in the class of a name, so there must be one."""
    seen: set[str] = set()
    for node in module.tree.body:
        if isinstance(node, ast.ClassDef):
            if node.name in seen:
                raise Refusal(f"class {node.name} is defined twice", module.where(node))
            seen.add(node.name)


def _plan_served(
    draft: Draft, found: Anatomy, modules: Modules, builds: Builds, offered: Capabilities
) -> None:
    plan_inherited_block(draft, found, builds, offered)
    plan_block(draft, found, builds, offered)
    plan_loader(draft, found, offered)
    plan_protocol(draft, found, modules, builds, offered)


def _capabilities(modules: Modules, found: Anatomy) -> Capabilities:
    owner: ClassRef = found.block.experts.constructor
    layer = expert_layer_class(modules, owner.module, found.block.experts.builder)
    return capabilities(modules, layer)
