"""The parts of a model that an EPLB patch touches, found by what they do."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from typing import NamedTuple

from ..errors import Refusal
from .builds import Builds, Chain, Edge, ExpertsBuilt
from .capabilities import INTERFACES, PROTOCOL
from .loading import Loading, loading
from .modules import ClassRef, Modules
from .syntax import assigned, keyword, self_attribute, statements
from .weights import Method


class SharedExpert(NamedTuple):
    """The attribute of the block that holds the expert every token goes to."""

    attribute: str
    optional: bool
    """Whether some configurations have none, so that the attribute is None."""
    absent: bool
    """Whether some configurations leave the attribute out."""


class Block(NamedTuple):
    """The MoE block: the class that builds the expert layer."""

    ref: ClassRef
    experts: ExpertsBuilt
    shared_expert: SharedExpert | None

    @property
    def has_eplb(self) -> bool:
        """Whether the block gives its experts both arguments of EPLB."""
        arguments = ("enable_eplb", "num_redundant_experts")
        return all(keyword(self.experts.call, a) is not None for a in arguments)


class Anatomy(NamedTuple):
    """One served class and what hangs below it.

    The attributes lead from the wrapper, if there is one, down to the experts:
    `wrapper.<language_model>.<model>.<layers>[i].<moe>.<experts>`.
    """

    served: ClassRef
    wrapper: Edge | None
    """From the served class to the causal-LM class, where these are two."""
    causal: ClassRef
    backbone: ClassRef
    model: str
    layers: str
    decoder: ClassRef
    moe: str
    block: Block
    loading: Loading

    @property
    def experts(self) -> str:
        return self.block.experts.attribute


class NoExperts(Refusal):
    """A served class is dense."""


def is_native(modules: Modules, ref: ClassRef) -> bool:
    """Whether a class is a MixtureOfExperts by its bases."""
    return any(c.name == PROTOCOL and c.module.name == INTERFACES for c in modules.lineage(ref))


def anatomy(modules: Modules, builds: Builds, served: ClassRef) -> Anatomy:
    """Find the parts of a served class.

    Raises:
        Refusal: a part was not found, or not in the one place where the patch needs it.
    """
    chains = builds.chains(served)
    if not chains:
        seen = builds.expert_layer_calls(served.module)
        if not seen:
            raise NoExperts(
                f"{served.name} builds no experts",
                served.where,
                "Dense models have none to balance.",
            )
        places = ", ".join(served.module.where(call) for call in seen)
        raise Refusal(
            f"experts are built at {places}, but not how {served.name} comes to build them",
            served.where,
        )
    if len(chains) > 1:
        blocks = sorted({c.experts.block.name for c in chains})
        raise Refusal(
            f"{served.name} leads to experts in {len(chains)} ways (blocks: {', '.join(blocks)})",
            served.where,
        )
    return _of_chain(modules, builds, served, chains[0])


def _of_chain(modules: Modules, builds: Builds, served: ClassRef, chain: Chain) -> Anatomy:
    many = [i for i, edge in enumerate(chain.edges) if edge.many]
    if many != [len(chain.edges) - 2] or many[0] < 1:
        way = " -> ".join(f"{e.owner.name}.{e.attribute}" for e in chain.edges)
        raise Refusal(
            f"expected model -> layers -> MoE block below {served.name}, found {way or 'none'}",
            served.where,
        )
    to_backbone, to_layers, to_moe = chain.edges[many[0] - 1 :]
    if many[0] > 2:
        raise Refusal(f"{served.name} wraps its language model more than once", served.where)
    _check_kept(builds, chain)
    owners = [to_backbone.owner, to_layers.owner, *([served] if many[0] == 2 else [])]
    return Anatomy(
        served=served,
        wrapper=chain.edges[0] if many[0] == 2 else None,
        causal=to_backbone.owner,
        backbone=to_layers.owner,
        model=to_backbone.attribute,
        layers=to_layers.attribute,
        decoder=to_moe.owner,
        moe=to_moe.attribute,
        block=Block(
            chain.experts.block, chain.experts, _shared_expert(builds, chain.experts.block)
        ),
        loading=loading(_methods(modules, owners)),
    )


def _check_kept(builds: Builds, chain: Chain) -> None:
    """What was built must still be what the attribute holds when the constructors are done."""
    kept = [(edge.owner, edge.attribute) for edge in chain.edges]
    kept.append((chain.experts.block, chain.experts.attribute))
    for owner, attribute in kept:
        for constructor in builds.constructors(owner):
            for statement, _ in statements(constructor.function):
                targets, value = assigned(statement)
                if value is None or all(self_attribute(t) != attribute for t in targets):
                    continue
                again = any(self_attribute(n) == attribute for n in ast.walk(value))
                other = owner is chain.experts.block and statement is not chain.experts.statement
                if again or other:
                    raise Refusal(
                        f"{owner.name}.{attribute} is set in another way too",
                        constructor.owner.module.where(statement),
                    )


def _shared_expert(builds: Builds, block: ClassRef) -> SharedExpert | None:
    values: dict[str, list[ast.expr]] = {}
    always: set[str] = set()
    for constructor in builds.constructors(block):
        for statement, _ in statements(constructor.function):
            targets, value = assigned(statement)
            for attribute in filter(None, map(self_attribute, targets)):
                if "shared_expert" in attribute and isinstance(value, ast.Call | ast.Constant):
                    values.setdefault(attribute, []).append(value)
                    if statement in constructor.function.body:
                        always.add(attribute)
    # the gate of a shared expert is a projection of its own, and no expert
    names = sorted((a for a in values if not a.endswith("gate")), key=len)
    if not names:
        return None
    attribute = names[0]
    optional = any(isinstance(v, ast.Constant) for v in values[attribute])
    return SharedExpert(attribute, optional, not optional and attribute not in always)


def _methods(modules: Modules, owners: Iterable[ClassRef]) -> list[Method]:
    """The methods that calls on these classes reach, each once."""
    found: dict[tuple[str, str, str], Method] = {}
    for ref in owners:
        for name in {n: None for c in modules.lineage(ref) for n in c.methods}:
            reached = modules.method(ref, name)
            if reached:
                owner, function = reached
                found.setdefault((owner.path, owner.name, name), Method(owner, function))
    return list(found.values())
