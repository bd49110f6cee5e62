"""MixtureOfExperts: its members and methods, on the causal-LM class and on a wrapper of it."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy, is_native
from ..analysis.builds import Builds
from ..analysis.capabilities import PROTOCOL, Capabilities
from ..analysis.modules import ClassRef, Modules
from ..analysis.syntax import (
    assigned,
    dotted,
    keyword,
    parameters,
    self_attribute,
    statements,
)
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddBase, AddImport, Insert
from .names import check_free, check_free_attributes
from .plan import Draft

MEMBERS = {
    "expert_weights",
    "moe_layers",
    "num_moe_layers",
    "num_expert_groups",
    "num_logical_experts",
    "num_physical_experts",
    "num_local_physical_experts",
    "num_routed_experts",
    "num_shared_experts",
    "num_redundant_experts",
}
METHODS = {"set_eplb_state", "update_physical_experts_metadata"}


def plan_protocol(
    draft: Draft, anatomy: Anatomy, modules: Modules, builds: Builds, offered: Capabilities
) -> None:
    """Make the causal-LM class, and the wrapper where there is one, a MixtureOfExperts.

    Raises:
        Refusal: the tree's protocol has parts that this tool does not know.
    """
    protocol = offered.protocol
    unknown = sorted((protocol.members - MEMBERS) | (protocol.methods - METHODS))
    if unknown:
        raise Refusal(
            f"{PROTOCOL} of this tree has members that are not known: {', '.join(unknown)}",
            "vllm/model_executor/models/interfaces.py",
            "A newer eplb-codegen may know them.",
        )
    updates = "update_physical_experts_metadata" in protocol.methods
    if updates and not offered.updates_expert_map:
        raise Refusal(
            "the expert layer has no update_expert_map", "vllm/model_executor/layers/fused_moe"
        )
    _check_block_attributes(anatomy, builds)
    _plan_causal(draft, anatomy, modules, offered, updates)
    if anatomy.wrapper is not None and not protocol.unwrapped:
        _plan_wrapper(draft, anatomy, modules, updates)


def _plan_causal(
    draft: Draft, anatomy: Anatomy, modules: Modules, offered: Capabilities, updates: bool
) -> None:
    block = anatomy.block
    shared = block.shared_expert
    if shared is None:
        num_shared = "0"
    elif shared.absent:
        num_shared = f'int(getattr(moe, "{shared.attribute}", None) is not None)'
    elif shared.optional:
        num_shared = f"int(moe.{shared.attribute} is not None)"
    else:
        num_shared = "1"
    members = render(
        "moe_parameters.py",
        model=anatomy.model,
        layers=anatomy.layers,
        moe=anatomy.moe,
        experts=anatomy.experts,
        block=block.ref.name,
        num_shared_experts=num_shared,
        num_expert_groups=_num_expert_groups(anatomy),
    )
    setting = offered.protocol.state_setting
    methods = render(
        "moe_methods.py",
        state_setting=setting.value,
        updates_metadata=updates,
        experts=anatomy.experts,
    )
    _plan_class(draft, anatomy.causal, modules, members, methods)
    module = anatomy.causal.module
    if block.ref.path != module.path:
        draft.add(module, AddImport(f".{block.ref.module.name.rpartition('.')[2]}", block.ref.name))


def _num_expert_groups(anatomy: Anatomy) -> str:
    """The number of groups, as the causal-LM class can read it from a block `moe`."""
    groups = keyword(anatomy.block.experts.call, "num_expert_group")
    if groups is None or (isinstance(groups, ast.Constant) and groups.value is None):
        return "1"
    if not anatomy.block.has_eplb:
        return "moe.n_expert_groups"  # one of the settings that the block is given
    if isinstance(groups, ast.Constant):
        return str(groups.value)
    if attribute := self_attribute(groups):
        return f"moe.{attribute}"
    raise Refusal(
        "the number of expert groups is not an attribute of the block",
        anatomy.block.ref.module.where(groups),
    )


def _check_block_attributes(anatomy: Anatomy, builds: Builds) -> None:
    """A block with EPLB of its own must have what the members are read from."""
    if not anatomy.block.has_eplb:
        return
    present = {
        attribute
        for constructor in builds.constructors(anatomy.block.ref)
        for statement, _ in statements(constructor.function)
        for target in assigned(statement)[0]
        if (attribute := self_attribute(target))
    }
    wanted = {f"n_{kind}_experts" for kind in ("logical", "physical", "local_physical")}
    wanted |= {"n_routed_experts", "n_redundant_experts"}
    enabled = keyword(anatomy.block.experts.call, "enable_eplb")
    for constructor in builds.constructors(anatomy.block.ref):
        for statement, _ in statements(constructor.function):
            targets, value = assigned(statement)
            same = enabled is not None and any(dotted(t) == dotted(enabled) for t in targets)
            enabled = value if same and value is not None else enabled
        if enabled is not None and dotted(enabled) in parameters(constructor.function):
            raise Refusal(
                f"{anatomy.block.ref.name} takes enable_eplb from whoever builds it",
                anatomy.block.ref.where,
            )
    if missing := sorted(wanted - present):
        raise Refusal(
            f"{anatomy.block.ref.name} has EPLB but does not set {', '.join(missing)}",
            anatomy.block.ref.where,
        )


def _plan_wrapper(draft: Draft, anatomy: Anatomy, modules: Modules, updates: bool) -> None:
    assert anatomy.wrapper is not None
    language_model = anatomy.wrapper.attribute
    _plan_class(
        draft,
        anatomy.served,
        modules,
        render("wrapper_parameters.py", language_model=language_model),
        render("wrapper_methods.py", language_model=language_model, updates_metadata=updates),
    )


def _plan_class(draft: Draft, ref: ClassRef, modules: Modules, members: str, methods: str) -> None:
    init = ref.methods.get("__init__")
    if not draft.can_edit(ref) or init is None:
        raise Refusal(f"{ref.name} has no constructor in a file of the family", ref.where)
    check_free_attributes(modules, ref, MEMBERS | METHODS | {"moe_mlp_layers"})
    check_free(ref.module, init, members)
    for statement, _ in statements(init):
        if isinstance(statement, ast.Return):
            raise Refusal(
                f"the constructor of {ref.name} may end early", ref.module.where(statement)
            )
    if "torch" not in ref.module.imports:
        raise Refusal("torch is not imported here", ref.module.path)
    paths = ref.module.paths
    draft.add(ref.module, Insert(paths[init.body[-1]], members, behind=True))
    if methods.strip():
        draft.add(ref.module, Insert(paths[init], methods, behind=True))
    if not is_native(modules, ref):
        draft.add(
            ref.module, AddBase(paths[ref.node], PROTOCOL), AddImport(".interfaces", PROTOCOL)
        )
