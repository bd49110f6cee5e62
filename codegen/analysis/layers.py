"""Models whose experts are loaded by vLLM's layer code: the model's own part in it."""

from __future__ import annotations

import ast

from .anatomy import Anatomy
from .builds import Builds, Constructor
from .modules import ClassRef, Modules
from .syntax import Function, assigned, calls, dotted, keyword, parameters, statements


def splits_fused(modules: Modules, causal: ClassRef) -> bool:
    """Whether the model hands the layer code an expert's own tensors instead of fused ones.

    It does if what it loads passes through a function that takes fused tensors apart.
    """
    for owner in modules.lineage(causal):
        method = owner.methods.get("load_weights")
        for statement, _ in statements(method) if method else ():
            value = assigned(statement)[1]
            called = dotted(value.func) if isinstance(value, ast.Call) else ""
            function = owner.module.definition(called) if called.isidentifier() else None
            if isinstance(function, Function) and _takes_apart(function):
                return True
    return False


def _takes_apart(function: Function) -> bool:
    names = {dotted(c.func).rpartition(".")[2] for c in calls(function)}
    names |= {c.func.attr for c in calls(function) if isinstance(c.func, ast.Attribute)}
    yields = any(isinstance(n, ast.Yield) for n in ast.walk(function))
    experts = any(
        isinstance(n, ast.Constant) and "experts." in str(n.value)
        for s in function.body
        for n in ast.walk(s)
    )
    return yields and experts and "unbind" in names


def constant_argument(builds: Builds, anatomy: Anatomy, name: str) -> object:
    """What the expert layer gets for an argument, where the constructors above it say so.

    The value is followed from the MoE block to the decoder layer that builds it, and through
    `super().__init__`. None if the argument is not given; `...` if the value was not found.
    """
    value = keyword(anatomy.block.experts.call, name)
    if value is None:
        return None
    block = builds.constructors(anatomy.block.ref)
    at = next(c for c in block if c.owner == anatomy.block.experts.constructor)
    value = _outside(block, at, value)
    if isinstance(value, ast.Name):
        value = _from_decoder(builds, anatomy, value.id)
    return value.value if isinstance(value, ast.Constant) else ...


def _from_decoder(builds: Builds, anatomy: Anatomy, name: str) -> ast.expr | None:
    """What the decoder layer gives the block for a parameter of its constructor."""
    chain = builds.constructors(anatomy.decoder)
    for constructor in chain:
        for call in calls(constructor.function):
            if dotted(call.func) != anatomy.block.ref.name:
                continue
            given = keyword(call, name)
            if given is None:
                return parameters(builds.constructors(anatomy.block.ref)[0].function).get(name)
            value = _outside(chain, constructor, given)
            if isinstance(value, ast.Name) and not _given(builds, anatomy, value.id):
                return parameters(chain[0].function).get(value.id)
            return value
    return None


def _given(builds: Builds, anatomy: Anatomy, name: str) -> bool:
    """Whether the backbone gives its decoder layers an argument of this name."""
    return any(
        keyword(call, name) is not None
        for constructor in builds.constructors(anatomy.backbone)
        for call in calls(constructor.function)
    )


def _outside(chain: list[Constructor], at: Constructor, value: ast.expr) -> ast.expr | None:
    """A value in a constructor as those see it who build the class: a constant or a parameter."""
    index = chain.index(at)
    while index and isinstance(value, ast.Name) and value.id in parameters(chain[index].function):
        call = next(c for c in calls(chain[index - 1].function) if _is_super_init(c))
        given = keyword(call, value.id)
        if given is None:
            return parameters(chain[index].function)[value.id]
        value, index = given, index - 1
    return value


def _is_super_init(call: ast.Call) -> bool:
    function = call.func
    return (
        isinstance(function, ast.Attribute)
        and function.attr == "__init__"
        and isinstance(function.value, ast.Call)
        and dotted(function.value.func) == "super"
    )
