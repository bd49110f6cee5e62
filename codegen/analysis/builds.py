"""Who builds whom: the way from a served class down to the experts, by what constructors do."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from typing import NamedTuple

from ..errors import Refusal
from .modules import MODELS, ClassRef, Module, Modules
from .syntax import (
    Function,
    assigned,
    calls,
    dotted,
    keyword,
    parameters,
    self_attribute,
    statements,
)

EXPERT_LAYER_PARAMETERS = {"num_experts", "top_k", "enable_eplb", "num_redundant_experts"}
"""What tells the expert layer (FusedMoE, SharedFusedMoE, FusedMoEFactory) from other callables."""

_LAYERS = "vllm.model_executor.layers."
_LAYER_LISTS = {"make_layers", "ModuleList"}


class Constructor(NamedTuple):
    """One `__init__` of a chain of `super().__init__` calls, with the class that it builds."""

    built: ClassRef
    owner: ClassRef
    function: Function


class Edge(NamedTuple):
    """`owner` keeps what it builds, one or many, under `attribute`."""

    owner: ClassRef
    attribute: str
    target: ClassRef
    many: bool
    statement: ast.stmt


class ExpertsBuilt(NamedTuple):
    """The statement of a MoE block that builds its experts: `self.<attribute> = <builder>(...)`."""

    block: ClassRef
    constructor: ClassRef
    attribute: str
    builder: str
    call: ast.Call
    statement: ast.stmt


class Chain(NamedTuple):
    """The way from a class down to the expert layer: `edges` and then the block's own statement."""

    edges: tuple[Edge, ...]
    experts: ExpertsBuilt


class Builds:
    """Reads constructors. One instance for a tree: it remembers what it found."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self._chains: dict[ClassRef, list[Chain]] = {}
        self._constructors: dict[ClassRef, list[Constructor]] = {}

    def constructors(self, ref: ClassRef) -> list[Constructor]:
        """The constructors that run when `ref` is built, following `super()` as written."""
        if ref not in self._constructors:
            self._constructors[ref] = list(self._follow_super(ref))
        return self._constructors[ref]

    def _follow_super(self, ref: ClassRef) -> Iterator[Constructor]:
        lineage = self.modules.lineage(ref)
        start = 0
        while start < len(lineage):
            index = next(
                (i for i, c in enumerate(lineage) if i >= start and "__init__" in c.methods), None
            )
            if index is None:
                return
            owner = lineage[index]
            yield Constructor(ref, owner, owner.methods["__init__"])
            called = _super_init(owner.methods["__init__"])
            if called is None:
                return
            # super(X, self).__init__() goes on behind X
            names = [c.name for c in lineage]
            start = (names.index(called) if called in names else index) + 1

    def experts(self, ref: ClassRef) -> ExpertsBuilt | None:
        """The expert layer that a class builds itself, if it does.

        Raises:
            Refusal: it builds more than one.
        """
        found: list[ExpertsBuilt] = []
        for constructor in self.constructors(ref):
            for statement, _ in statements(constructor.function):
                targets, value = assigned(statement)
                if value is None or not isinstance(value, ast.Call):
                    continue
                attribute = next((a for t in targets if (a := self_attribute(t))), "")
                owner = constructor.owner
                if attribute and self.is_expert_layer(owner.module, value):
                    builder = dotted(value.func)
                    found.append(ExpertsBuilt(ref, owner, attribute, builder, value, statement))
        if len(found) > 1:
            where = found[1].constructor.module.where(found[1].statement)
            raise Refusal(f"{ref.name} builds experts in two places", where)
        return found[0] if found else None

    def is_expert_layer(self, module: Module, call: ast.Call) -> bool:
        """Whether a call builds vLLM's expert layer, by where that comes from and what it takes."""
        name = dotted(call.func)
        if (
            not module.imports.get(name, ("", ""))[0].startswith(_LAYERS)
            or keyword(call, "top_k") is None
        ):
            return False
        return self.layer_parameters(module, name) >= EXPERT_LAYER_PARAMETERS

    def layer_parameters(self, module: Module, name: str) -> set[str]:
        """The parameters of a layer's constructor or factory, those of its bases included."""
        found = self.modules.definition(module, name)
        if found is None:
            return set()
        if isinstance(found[1], Function):
            return set(parameters(found[1]))
        names: set[str] = set()
        for constructor in self.constructors(ClassRef.of(found[0], found[1])):
            names |= set(parameters(constructor.function))
        return names

    def edges(self, ref: ClassRef) -> Iterator[Edge]:
        """What a class builds of other model classes and keeps under an attribute of its own."""
        for constructor in self.constructors(ref):
            for statement, _ in statements(constructor.function):
                targets, value = assigned(statement)
                attributes = [a for t in targets if (a := self_attribute(t))]
                if value is None or not attributes:
                    continue
                many = any(dotted(c.func).rpartition(".")[2] in _LAYER_LISTS for c in calls(value))
                for target in self._references(constructor, value):
                    yield Edge(ref, attributes[-1], target, many, statement)

    def expert_layer_calls(self, module: Module) -> list[ast.Call]:
        """Every call in a module that builds vLLM's expert layer, wherever it stands."""
        return [c for c in calls(module.tree) if self.is_expert_layer(module, c)]

    def chains(self, ref: ClassRef) -> list[Chain]:
        """Every way from a class down to an expert layer."""
        if ref not in self._chains:
            self._chains[ref] = []  # a class that builds itself leads nowhere
            if experts := self.experts(ref):
                self._chains[ref] = [Chain((), experts)]
            else:
                found: dict[tuple[Edge, ...], Chain] = {}
                for edge in self.edges(ref):
                    for chain in self.chains(edge.target):
                        edges = (edge, *chain.edges)
                        found[edges] = Chain(edges, chain.experts)
                self._chains[ref] = list(found.values())
        return self._chains[ref]

    def _references(self, constructor: Constructor, value: ast.AST) -> Iterator[ClassRef]:
        """The model classes that an expression builds, directly or round a corner."""
        if isinstance(value, ast.Call):
            called = list(self._class_named(constructor, dotted(value.func)))
            if called:
                # its arguments are what it builds with: OlmoeModel(layer_type=layer_type)
                yield from called
                return
            if method := self_attribute(value.func):
                # self.model = self._init_model(...)
                found = self.modules.method(constructor.built, method)
                reached = Constructor(constructor.built, *found) if found else None
                for returned in _returned(reached.function) if reached else ():
                    assert reached is not None
                    yield from self._references(reached, returned)
        if isinstance(value, ast.Name):
            yield from self._class_named(constructor, value.id)
        for child in ast.iter_child_nodes(value):
            yield from self._references(constructor, child)

    def _class_named(self, constructor: Constructor, name: str) -> Iterator[ClassRef]:
        if name in parameters(constructor.function):
            # layer_type(...): what it is by default in the class that is built
            for other in self.constructors(constructor.built):
                default = parameters(other.function).get(name)
                if default is not None:
                    yield from self._model_class(other.owner.module, dotted(default))
                    return
        else:
            yield from self._model_class(constructor.owner.module, name)

    def _model_class(self, module: Module, name: str) -> Iterator[ClassRef]:
        if module.definition(name) or module.imports.get(name, ("", ""))[0].startswith(MODELS):
            ref = self.modules.class_of(module, name)
            if ref and ref.module.name.startswith(MODELS):
                yield ref


def _returned(function: Function) -> list[ast.expr]:
    return [s.value for s, _ in statements(function) if isinstance(s, ast.Return) and s.value]


def _super_init(function: Function) -> str | None:
    """X of `super(X, self).__init__()`, "" for `super().__init__()`, None without such a call."""
    for call in calls(function):
        if isinstance(call.func, ast.Attribute) and call.func.attr == "__init__":
            inner = call.func.value
            if isinstance(inner, ast.Call) and dotted(inner.func) == "super":
                return dotted(inner.args[0]) if inner.args else ""
    return None
