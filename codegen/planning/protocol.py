"""MixtureOfExperts: its members and methods, on the causal-LM class and on a wrapper of it."""

from __future__ import annotations

from ..analysis.anatomy import Anatomy, is_native
from ..analysis.capabilities import PROTOCOL, Capabilities
from ..analysis.modules import ClassRef, Modules
from ..analysis.syntax import keyword
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddBase, AddImport, Insert
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


def plan_protocol(draft: Draft, anatomy: Anatomy, modules: Modules, offered: Capabilities) -> None:
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
        raise Refusal("the expert layer of this tree has no update_expert_map")
    _plan_causal(draft, anatomy, modules, offered, updates)
    if anatomy.wrapper is not None and not protocol.unwrapped:
        _plan_wrapper(draft, anatomy, modules, updates)


def _plan_causal(
    draft: Draft, anatomy: Anatomy, modules: Modules, offered: Capabilities, updates: bool
) -> None:
    block = anatomy.block
    groups = keyword(block.experts.call, "num_expert_group") is not None
    shared = block.shared_expert
    if shared is None:
        num_shared = "0"
    elif shared.optional:
        num_shared = f"int(moe.{shared.attribute} is not None)"
    else:
        num_shared = "1"
    parameters = render(
        "moe_parameters.py",
        model=anatomy.model,
        layers=anatomy.layers,
        moe=anatomy.moe,
        experts=anatomy.experts,
        block=block.ref.name,
        num_shared_experts=num_shared,
        num_expert_groups="moe.n_expert_groups" if groups else "1",
    )
    setting = offered.protocol.state_setting
    methods = render(
        "moe_methods.py",
        state_setting=setting.value,
        updates_metadata=updates,
        experts=anatomy.experts,
    )
    _plan_class(draft, anatomy.causal, modules, parameters, methods)
    module = anatomy.causal.module
    draft.add(module, AddImport(".utils", "PPMissingLayer"))
    if block.ref.path != module.path:
        draft.add(module, AddImport(f".{block.ref.module.name.rpartition('.')[2]}", block.ref.name))


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


def _plan_class(
    draft: Draft, ref: ClassRef, modules: Modules, parameters: str, methods: str
) -> None:
    init = ref.methods.get("__init__")
    if not draft.can_edit(ref) or init is None:
        raise Refusal(f"{ref.name} has no constructor in a file of the family", ref.where)
    paths = ref.module.paths
    draft.add(ref.module, Insert(paths[init.body[-1]], parameters, behind=True))
    if methods.strip():
        draft.add(ref.module, Insert(paths[init], methods, behind=True))
    if not is_native(modules, ref):
        draft.add(
            ref.module, AddBase(paths[ref.node], PROTOCOL), AddImport(".interfaces", PROTOCOL)
        )
