"""The quantisation methods for experts, and which of them vLLM lets EPLB run with."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from ..errors import Refusal
from .modules import ClassRef, Module, Modules
from .possible import Evaluator
from .syntax import Function, StatementPath, dotted, statements
from .values import Instance, Record

LAYERS = "vllm/model_executor/layers"
FUSED_MOE = "vllm.model_executor.layers.fused_moe"
BASE = "FusedMoEMethodBase"
PROPERTY = "supports_eplb"
ARGUMENT = "enable_eplb"


class Supports(Enum):
    """Whether EPLB runs with something."""

    YES = "yes"
    NO = "no"
    DEPENDS = "depends"
    """On the GPU, the kernels that are chosen, or the checkpoint."""
    UNKNOWN = "not known"
    """The source was not understood."""

    @property
    def said(self) -> str:
        """In a sentence about a method."""
        return {
            Supports.YES: "EPLB runs with it",
            Supports.NO: "vLLM refuses EPLB with it",
            Supports.DEPENDS: "it depends",
            Supports.UNKNOWN: "not known",
        }[self]


class MoEMethod(NamedTuple):
    """A class that holds and computes experts in one quantisation."""

    name: str
    path: str
    line: int
    supports: Supports
    reason: str


def alike(methods: Iterable[MoEMethod]) -> list[str]:
    """What is to be said of methods, those with one answer for one reason together."""
    found: dict[tuple[Supports, str], list[str]] = {}
    for method in methods:
        found.setdefault((method.supports, method.reason), []).append(method.name)
    return [f"{s.said}: {', '.join(names)} ({reason})" for (s, reason), names in found.items()]


class Admission(NamedTuple):
    """What the expert layer asks before it admits EPLB."""

    where: str
    classes: tuple[ClassRef, ...] | None
    """Those it admits (up to 0.11.0); None where it asks the method's `supports_eplb`."""


class MoEMethods:
    """The MoE methods of one tree."""

    def __init__(self, modules: Modules) -> None:
        self.modules = modules
        self._evaluator = Evaluator(modules, Record())

    @cached_property
    def admission(self) -> Admission:
        """Raises Refusal: the tree's expert layer has no check that is known."""
        return _admission(self.modules)

    def every(self) -> list[MoEMethod]:
        """Every MoE method that is defined, by file and line, but none that wraps another."""
        found = []
        for folder in ("quantization", "fused_moe"):
            for path in self._files(folder):
                source = self.modules.tree.read(path)
                names = re.findall(r"^class (\w+)\(", source, re.M)
                module = self.modules.get(_name(path)) if names else None
                refs = (self.modules.class_of(module, n) for n in names) if module else ()
                found += [self.judge(r) for r in refs if r and self._stands_alone(r)]
        return sorted(found, key=lambda m: (m.path, m.line))

    def find(self, name: str) -> ClassRef | None:
        """A method's class by its name, wherever it stands; the first by path of several."""
        for path in self._files("quantization"):
            if re.search(rf"^class {re.escape(name)}\(", self.modules.tree.read(path), re.M):
                module = self.modules.get(_name(path))
                return self.modules.class_of(module, name) if module else None
        return None

    def is_method(self, ref: ClassRef) -> bool:
        """Whether a class can be the method of an expert layer; bases of others are none."""
        lineage = self.modules.lineage(ref)
        if not any(c.name == BASE for c in lineage):
            return False
        owner = self.modules.method(ref, "create_weights")
        return owner is not None and owner[0].name != BASE

    def _stands_alone(self, ref: ClassRef) -> bool:
        asks = self.modules.method(ref, PROPERTY)
        return self.is_method(ref) and not (asks and _mentions(asks[1], PROPERTY))

    def judge(self, ref: ClassRef) -> MoEMethod:
        """Whether EPLB runs with a MoE method."""
        supports, reason = self._admitted(ref)
        if supports in (Supports.YES, Supports.DEPENDS):
            refusal = self._refusal(ref)
            if refusal:
                supports, reason = refusal
        return MoEMethod(ref.name, ref.path, ref.node.lineno, supports, reason)

    def _admitted(self, ref: ClassRef) -> tuple[Supports, str]:
        where, classes = self.admission
        if classes is not None:
            names = " and ".join(c.name for c in classes)
            if any(c in self.modules.lineage(ref) for c in classes):
                return Supports.YES, f"the expert layer admits {names} ({where})"
            return Supports.NO, f"the expert layer admits {names} only ({where})"
        found = self.modules.method(ref, PROPERTY)
        if found is None:
            return Supports.UNKNOWN, f"no {PROPERTY}"
        owner, function = found
        place = owner.module.where(function)
        values = self._evaluator.call(lambda: self._evaluator.method(Instance(ref), PROPERTY))
        if values in ((True,), (False,)):
            by = f"by default ({place})" if owner.name == BASE else f"({place})"
            return (Supports.YES if values[0] else Supports.NO), f"{PROPERTY} is {values[0]} {by}"
        returned = [s.value for s, _ in statements(function) if isinstance(s, ast.Return)]
        text = " or ".join(owner.module.text(v) for v in returned if v) or "not known"
        return Supports.DEPENDS, f"{PROPERTY} is `{text}` ({place})"

    def _refusal(self, ref: ClassRef) -> tuple[Supports, str] | None:
        """An error that the method raises when it is to compute with EPLB."""
        for name in ("apply", "apply_monolithic"):
            found = self.modules.method(ref, name)
            if found is None:
                continue
            owner, function = found
            for statement, path in refusals(function):
                place = owner.module.where(statement)
                # some backends alone go the way of the second, from 0.15.0 on
                if len(path) == 1 and name == "apply":
                    return Supports.NO, f"{name} raises an error with EPLB ({place})"
                return Supports.DEPENDS, f"{name} raises an error with EPLB on some ways ({place})"
        return None

    def _files(self, folder: str) -> Iterator[str]:
        root = self.modules.tree.root
        for file in sorted((root / LAYERS / folder).rglob("*.py")):
            yield file.relative_to(root).as_posix()


def _name(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


def refusals(function: Function) -> Iterator[tuple[ast.stmt, StatementPath]]:
    """The statements that raise an error if EPLB is on, and where below the function they stand."""
    return ((s, path) for s, path in statements(function) if _refuses(s))


def _refuses(statement: ast.stmt) -> bool:
    if isinstance(statement, ast.Assert):
        test = statement.test
        return isinstance(test, ast.UnaryOp) and _asks_for_eplb(test.operand)
    return (
        isinstance(statement, ast.If)
        and _asks_for_eplb(statement.test)
        and any(isinstance(s, ast.Raise) for s in statement.body)
    )


def _asks_for_eplb(test: ast.expr) -> bool:
    return dotted(test).rpartition(".")[2] == ARGUMENT


def _mentions(node: ast.AST, name: str) -> bool:
    return any(dotted(n).rpartition(".")[2] == name for n in ast.walk(node))


def _admission(modules: Modules) -> Admission:
    """Find the check, which raises an error, in the files of the expert layer."""
    for stem in ("layer", "routed_experts"):  # the second from 0.24.0
        module = modules.get(f"{FUSED_MOE}.{stem}")
        if module is None or ARGUMENT not in module.source:
            continue
        for node in ast.walk(module.tree):
            if not isinstance(node, ast.If) or not _mentions(node.test, ARGUMENT):
                continue
            raises = any(isinstance(s, ast.Raise) for s in node.body)
            if raises and _mentions(node.test, PROPERTY):
                return Admission(module.where(node), None)
            if classes := _admitted_classes(modules, module, node):
                return Admission(module.where(node), classes)
    raise Refusal(
        "what the expert layer asks before it admits EPLB was not found",
        f"{LAYERS}/fused_moe",
    )


def _admitted_classes(modules: Modules, module: Module, node: ast.If) -> tuple[ClassRef, ...]:
    """A and B of `if enable_eplb: if not isinstance(quant_method, (A, B)): raise ...`."""
    imports = [s for s in node.body if isinstance(s, ast.ImportFrom) and not s.level]
    homes = {a.asname or a.name: (i.module or "", a.name) for i in imports for a in i.names}
    for inner in node.body:
        test = inner.test if isinstance(inner, ast.If) else None
        call = test.operand if isinstance(test, ast.UnaryOp) else None
        if not isinstance(call, ast.Call) or dotted(call.func) != "isinstance":
            continue
        kinds = call.args[1]
        refs = []
        for kind in kinds.elts if isinstance(kinds, ast.Tuple) else [kinds]:
            path, name = homes.get(dotted(kind), (module.name, dotted(kind)))
            home = modules.get(path)
            ref = modules.class_of(home, name) if home else None
            if ref is None:
                raise Refusal(f"{dotted(kind)} is not defined in this tree", module.where(inner))
            refs.append(ref)
        return tuple(refs)
    return ()
