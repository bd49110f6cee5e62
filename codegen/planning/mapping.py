"""The expert mapping: its redundant experts, and where the backbone has their number from."""

from __future__ import annotations

import ast

from ..analysis.anatomy import Anatomy
from ..analysis.capabilities import Capabilities
from ..analysis.modules import ClassRef
from ..analysis.syntax import assigned, keyword, parameters, self_attribute, statements
from ..analysis.weights import MappingCall
from ..errors import Refusal
from ..render import render
from ..rewrite.edits import AddArguments, Insert
from .names import check_free, parallel_config
from .plan import Draft


def plan_mapping(draft: Draft, anatomy: Anatomy, found: MappingCall, offered: Capabilities) -> None:
    """num_redundant_experts= in the mapping call, and the attribute it is read from."""
    module = draft.editable(found.method, found.call)
    if keyword(found.call, "num_redundant_experts") is not None:
        raise Refusal("num_redundant_experts is a constant here", module.where(found.call))
    draft.add(
        module,
        AddArguments(
            module.paths[found.statement],
            module.text(found.call.func),
            (("num_redundant_experts", "self.num_redundant_experts"),),
        ),
    )
    owner = found.method.owner
    if owner.name in (anatomy.causal.name, anatomy.served.name):
        return  # they have the attribute as members of the protocol
    _plan_redundant_attribute(draft, owner, offered)


def _plan_redundant_attribute(draft: Draft, owner: ClassRef, offered: Capabilities) -> None:
    init = owner.methods.get("__init__")
    if init is None or "vllm_config" not in parameters(init):
        raise Refusal(f"{owner.name} has no constructor that takes vllm_config", owner.where)
    for statement, _ in statements(init):
        if any(self_attribute(t) == "num_redundant_experts" for t in assigned(statement)[0]):
            raise Refusal(
                f"{owner.name} already sets num_redundant_experts", owner.module.where(statement)
            )
    anchor = next(
        (s for s in init.body if any(self_attribute(t) == "config" for t in assigned(s)[0])),
        init.body[-1],
    )
    if isinstance(anchor, ast.Return):
        raise Refusal(f"the constructor of {owner.name} ends early", owner.module.where(anchor))
    following = init.body[init.body.index(anchor) + 1 :]
    known = parallel_config(owner.module, init, following[0] if following else anchor)
    code = render(
        "backbone_settings.py",
        has_parallel_config=known,
        in_eplb_config=offered.in_eplb_config,
    )
    check_free(owner.module, init, code, known={"parallel_config"} if known else ())
    draft.add(owner.module, Insert(owner.module.paths[anchor], code, behind=True))
