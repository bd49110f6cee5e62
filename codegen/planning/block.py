"""The MoE block: its load-balancing settings, and the expert layer's arguments."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy
from ..analysis.builds import Builds
from ..analysis.capabilities import Capabilities
from ..analysis.syntax import assigned, dotted, keyword, parameters, self_attribute, statements
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddArguments, AddImport, Insert
from .names import check_free, parallel_config
from .plan import Draft

_SETTINGS = {
    "enable_eplb",
    "ep_size",
    "n_routed_experts",
    "n_logical_experts",
    "n_redundant_experts",
    "n_physical_experts",
    "n_local_physical_experts",
}


def plan_block(draft: Draft, anatomy: Anatomy, builds: Builds, offered: Capabilities) -> None:
    """Give the block its settings, and its experts their two arguments.

    Raises:
        Refusal: the block stands in a file that is not patched, or already has part of this.
    """
    block = anatomy.block
    if block.has_eplb:
        return
    owner = block.experts.constructor
    given = {"enable_eplb", "num_redundant_experts"} & {k.arg for k in block.experts.call.keywords}
    if given or any(k.arg is None for k in block.experts.call.keywords):
        raise Refusal(
            f"{block.ref.name} gives its experts {', '.join(sorted(given)) or '**'} already",
            owner.module.where(block.experts.call),
        )
    if not draft.can_edit(owner):
        raise Refusal(
            f"{block.ref.name} builds experts without EPLB in a file that the family does not list",
            owner.where,
        )
    init = owner.methods["__init__"]
    taken = {
        attribute
        for constructor in builds.constructors(block.ref)
        for statement, _ in statements(constructor.function)
        for target in assigned(statement)[0]
        if (attribute := self_attribute(target))
    }
    if clash := sorted(taken & _SETTINGS):
        raise Refusal(f"{owner.name} already sets {', '.join(clash)}", owner.module.where(init))
    ends = [s for s, _ in statements(init) if isinstance(s, ast.Return)]
    if block.experts.statement not in init.body or ends:
        raise Refusal(
            f"{owner.name} builds experts in some configurations only",
            owner.module.where(ends[0] if ends else block.experts.statement),
        )
    groups = keyword(block.experts.call, "num_expert_group")
    # a parameter that may be left out may be None
    has_vllm_config = parameters(init).get("vllm_config", init) is None
    has_parallel_config = parallel_config(owner.module, init, block.experts.statement)
    code = render(
        "block_settings.py",
        has_parallel_config=has_parallel_config,
        has_vllm_config=has_vllm_config,
        num_experts=owner.module.text(_num_experts(anatomy)),
        expert_groups=owner.module.text(groups) if groups else "",
        in_eplb_config=offered.in_eplb_config,
    )
    check_free(owner.module, init, code, known={"parallel_config"} if has_parallel_config else ())
    path = owner.module.paths[block.experts.statement]
    draft.add(
        owner.module,
        Insert(path, code),
        AddArguments(
            path,
            block.experts.builder,
            (
                ("enable_eplb", "self.enable_eplb"),
                ("num_redundant_experts", "self.n_redundant_experts"),
            ),
        ),
        AddImport("vllm.distributed", "get_ep_group"),
    )
    if not (has_parallel_config or has_vllm_config):
        draft.add(owner.module, AddImport("vllm.config", "get_current_vllm_config"))


def plan_inherited_block(
    draft: Draft, anatomy: Anatomy, builds: Builds, offered: Capabilities
) -> None:
    """Where the block stands elsewhere and has EPLB: check the numbers before it is built.

    Upstream's blocks divide the experts by the ranks without a look at the remainder.
    """
    if not anatomy.block.has_eplb:
        return
    edge = next(e for e in builds.edges(anatomy.causal) if e.attribute == anatomy.model)
    module = anatomy.causal.module
    init = anatomy.causal.methods.get("__init__")
    if init is None or edge.statement not in module.paths:  # a base's, of another file
        raise Refusal(f"{anatomy.causal.name} has no constructor of its own", anatomy.causal.where)
    code = render(
        "inherited_block_check.py",
        num_experts=f"self.config.{_config_attribute(anatomy)}",
        in_eplb_config=offered.in_eplb_config,
    )
    check_free(module, init, code)
    draft.add(
        module,
        Insert(module.paths[edge.statement], code),
        AddImport("vllm.distributed", "get_ep_group"),
    )


def plan_even_spread(draft: Draft, anatomy: Anatomy, builds: Builds, offered: Capabilities) -> None:
    """Where upstream's block has EPLB: say which R would fit before it divides by the ranks.

    Raises:
        Refusal: the block does not have the numbers that the check needs.
    """
    owner = anatomy.block.experts.constructor
    if not draft.can_edit(owner):
        plan_inherited_block(draft, anatomy, builds, offered)
        return
    init = owner.methods["__init__"]
    known: set[str] = set()
    for statement in init.body:
        if (
            isinstance(statement, ast.If)
            and isinstance(statement.body[-1], ast.Raise)
            and any(isinstance(n, ast.Mod) for n in ast.walk(statement.test))
        ):
            return
        set_here = {self_attribute(t) for t in assigned(statement)[0]}
        if "n_local_physical_experts" in set_here:
            needed = _SETTINGS - {"n_routed_experts", "n_local_physical_experts"}
            if missing := sorted(needed - known):
                raise Refusal(
                    f"{owner.name} does not know {', '.join(missing)} yet",
                    owner.module.where(statement),
                )
            code = render(
                "even_spread.py",
                enable_eplb="self.enable_eplb",
                logical="self.n_logical_experts",
                redundant="self.n_redundant_experts",
                physical="self.n_physical_experts",
                ep_size="self.ep_size",
            )
            check_free(owner.module, init, code)
            draft.add(owner.module, Insert(owner.module.paths[statement], code))
            return
        known |= set_here
    raise Refusal(f"{owner.name} does not set n_local_physical_experts", owner.module.where(init))


def _num_experts(anatomy: Anatomy) -> ast.expr:
    value = keyword(anatomy.block.experts.call, "num_experts")
    if value is None:
        raise Refusal(
            f"{anatomy.block.experts.builder} is built without num_experts=",
            anatomy.block.ref.module.where(anatomy.block.experts.call),
        )
    return value


def _config_attribute(anatomy: Anatomy) -> str:
    """The name that E has in the model's config, followed through `self.n = config.num_experts`."""
    value = _num_experts(anatomy)
    init = anatomy.block.experts.constructor.methods["__init__"]
    for statement, _ in statements(init):
        targets, source = assigned(statement)
        if source is not None and any(dotted(t) == dotted(value) for t in targets):
            value = source
    if not (isinstance(value, ast.Attribute) and dotted(value).startswith("config.")):
        raise Refusal("the number of experts is not read from the config", anatomy.block.ref.where)
    return value.attr
