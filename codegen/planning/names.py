"""Names that inserted code binds must be free where it goes."""

from __future__ import annotations

import ast
from collections.abc import Collection

from ..analysis.modules import MODELS, ClassRef, Module, Modules
from ..analysis.syntax import Function, assigned, dotted, self_attribute, statements
from ..errors import Refusal


def check_free(module: Module, function: Function, code: str, known: Collection[str] = ()) -> None:
    """Refuse code that binds a local name which a function, or a closure in it, uses already.

    Args:
        known: names that stand for the same thing there.
    """
    bound = {
        n.id
        for n in ast.walk(ast.parse(code))
        if isinstance(n, ast.Name) and isinstance(n.ctx, ast.Store)
    }
    used: dict[str, ast.AST] = {}
    for node in ast.walk(function):
        name = (
            node.id if isinstance(node, ast.Name) else node.arg if isinstance(node, ast.arg) else ""
        )
        used.setdefault(name, node)
    for name in sorted((bound - set(known) - {"_"}) & set(used)):
        raise Refusal(
            f"{function.name} uses the name {name} for something of its own",
            module.where(used[name]),
        )


def check_free_attributes(modules: Modules, ref: ClassRef, attributes: Collection[str]) -> None:
    """Refuse attributes that a class, or a base of it outside the protocols, has already."""
    for owner in modules.lineage(ref):
        if owner.module.name == f"{MODELS}.interfaces" or not owner.module.name.startswith(MODELS):
            continue
        if owner is not ref and _is_mixture_of_experts(modules, owner):
            continue  # its constructor is passed over, or what it sets is set again
        for node in owner.node.body:
            names = (
                [node.name] if isinstance(node, Function) else list(map(dotted, assigned(node)[0]))
            )
            if found := sorted(set(attributes) & set(names)):
                raise Refusal(f"{owner.name} already defines {found[0]}", owner.module.where(node))
        for method in owner.methods.values():
            for statement, _ in statements(method):
                names = [self_attribute(t) for t in assigned(statement)[0]]
                if found := sorted(set(attributes) & set(names)):
                    raise Refusal(
                        f"{owner.name} already sets self.{found[0]}", owner.module.where(statement)
                    )


def parallel_config(module: Module, function: Function, before: ast.stmt) -> bool:
    """Whether a function has a local `parallel_config` that is vLLM's, set before a statement.

    Raises:
        Refusal: it has that name for something else, or not on every way to the statement.
    """
    name = "parallel_config"
    stores = [
        (s, value)
        for s, _ in statements(function)
        for targets, value in [assigned(s)]
        if any(dotted(t) == name for t in targets)
    ]
    if not stores:
        check_free(module, function, f"{name} = None")
        return False
    statement, value = stores[0]
    if (
        len(stores) == 1
        and statement in function.body
        and value is not None
        and dotted(value) == f"vllm_config.{name}"
        and statement.lineno < before.lineno
    ):
        return True
    raise Refusal(
        f"{function.name} uses the name {name} for something of its own", module.where(statement)
    )


def _is_mixture_of_experts(modules: Modules, ref: ClassRef) -> bool:
    return any(c.name == "MixtureOfExperts" for c in modules.lineage(ref))
