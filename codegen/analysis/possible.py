"""What a function of the tree may return, as far as its source tells; nothing is executed.

Values are followed through calls, branches and loops. What cannot be known (the GPU, the
environment, other libraries) is UNKNOWN, a test of it takes both ways, and then a function has
several possible results. UNKNOWN among them says that there may be more.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

from .modules import ClassRef, Module, Modules, absolute
from .syntax import Function, assigned, dotted, parameters
from .values import (
    UNKNOWN,
    Bound,
    ClassValue,
    Either,
    External,
    Instance,
    Record,
    agreed,
    compared,
    either,
    known_key,
    possible,
    truth,
)

MAX_DEPTH = 12
MAX_STEPS = 50_000
MAX_TURNS = 64
PLATFORM = "vllm.platforms.current_platform."


class Assumed(NamedTuple):
    """Known beforehand: what calls of functions and methods of a name give, and attributes."""

    calls: Mapping[str, Any] = {}
    attributes: Mapping[str, Any] = {}


class _Raised(Exception):
    """The code under analysis raises, whatever the unknown."""


class _GivenUp(Exception):
    """Too much code to follow."""


class _Frame:
    def __init__(self, module: Module, names: dict[str, Any]) -> None:
        self.module = module
        self.names = names
        self.returns: list[Any] = []
        self.may_raise = False
        self.unsure = 0


class Evaluator:
    """Follows functions of one tree."""

    def __init__(self, modules: Modules, layer: Record, assumed: Assumed | None = None) -> None:
        """`layer` is the expert layer: what `isinstance` finds to be one of vLLM's fused_moe."""
        self.modules = modules
        self.layer = layer
        self.assumed = assumed or Assumed()
        self._steps = 0
        self._depth = 0
        self._unsure = 0

    def call(self, function: Any, *arguments: Any, **keywords: Any) -> tuple[Any, ...]:
        """What a call may return; nothing at all where it raises an error."""
        self._steps = 0
        try:
            return possible(self._call(function, list(arguments), keywords))
        except _Raised:
            return ()
        except (_GivenUp, RecursionError):
            self._depth = self._unsure = 0
            return (UNKNOWN,)

    def method(self, receiver: Any, name: str) -> Any:
        """The method or attribute of a class or an object."""
        return self._attribute(receiver, name)

    # ------------------------------------------------------------------ calls

    def _call(self, function: Any, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if isinstance(function, Either):
            return self._each(function, lambda f: self._call(f, arguments, keywords))
        if isinstance(function, ClassValue):
            return self._construct(function.ref, arguments, keywords)
        if isinstance(function, Bound):
            return self._run(function, arguments, keywords)
        if isinstance(function, External):
            return _external_call(function.path, arguments, keywords)
        if callable(function):
            known = [*arguments, *keywords.values()]
            if any(v is UNKNOWN or isinstance(v, Either) for v in known):
                return UNKNOWN
            try:
                return function(*arguments, **keywords)
            except (KeyError, IndexError, ValueError, TypeError, AttributeError):
                return UNKNOWN
        return UNKNOWN

    def _construct(self, ref: ClassRef, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        made = Instance(ref)
        # only a configuration's own attributes decide anything
        lineage = self.modules.lineage(ref)
        found = self.modules.method(ref, "__init__")
        if found and any(c.name == "QuantizationConfig" for c in lineage):
            self._run(Bound(found[0].module, found[1], (made,)), arguments, keywords)
        return made

    def _run(self, bound: Bound, arguments: list[Any], keywords: dict[str, Any]) -> Any:
        if self._depth >= MAX_DEPTH:
            return UNKNOWN
        frame = _Frame(bound.module, {})
        given = [*bound.receiver, *arguments]
        for name, default in parameters(bound.function).items():
            if given:
                frame.names[name] = given.pop(0)
            elif name in keywords:
                frame.names[name] = keywords[name]
            else:
                frame.names[name] = UNKNOWN if default is None else self._value(default, frame)
        self._depth += 1
        try:
            ended = self._block(bound.function.body, frame)
        finally:
            self._depth -= 1
        if not ended:
            frame.returns.append(None)
        if not frame.returns:
            raise _Raised
        return either(frame.returns)

    def _each(self, value: Either, action: Callable[[Any], Any]) -> Any:
        results = []
        for one in value.values:
            try:
                results.append(action(one))
            except _Raised:
                continue
        if not results:
            raise _Raised
        return either(results)

    # ------------------------------------------------------------- statements

    def _block(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        """Whether no way leads past the block."""
        return any(self._statement(statement, frame) for statement in body)

    def _statement(self, node: ast.stmt, frame: _Frame) -> bool:
        self._steps += 1
        if self._steps > MAX_STEPS:
            raise _GivenUp
        if isinstance(node, ast.Return):
            frame.returns.append(self._value(node.value, frame) if node.value else None)
            return True
        if isinstance(node, ast.Raise):
            frame.may_raise = True
            return True
        if isinstance(node, ast.If):
            return self._branch(node, frame)
        if isinstance(node, ast.For):
            return self._loop(node, frame)
        if isinstance(node, ast.Try):
            return self._try(node, frame)
        if isinstance(node, ast.With):
            return self._block(node.body, frame)
        if isinstance(node, ast.While | ast.Match):
            blocks = [c.body for c in node.cases] if isinstance(node, ast.Match) else [node.body]
            for block in blocks:
                self._maybe(block, frame)
            return False
        if isinstance(node, ast.Assign):
            value = self._value(node.value, frame)
            for target in node.targets:
                self._assign(target, value, frame)
        elif isinstance(node, ast.AnnAssign) and node.value:
            self._assign(node.target, self._value(node.value, frame), frame)
        elif isinstance(node, ast.AugAssign):
            self._assign(node.target, UNKNOWN, frame)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            self._import(node, frame)
        elif isinstance(node, Function | ast.ClassDef):
            frame.names[node.name] = UNKNOWN
        # calls for their effect are not followed: logging, checks, registration by plugins
        return False

    def _branch(self, node: ast.If, frame: _Frame) -> bool:
        known = self._truth(node.test, frame)
        if known is not None:
            return self._block(node.body if known else node.orelse, frame)
        ends = [self._maybe(body, frame) for body in (node.body, node.orelse)]
        return all(ends)

    def _maybe(self, body: Sequence[ast.stmt], frame: _Frame) -> bool:
        """The same for a block that need not be reached: what it assigns may not have been."""
        frame.unsure += 1
        self._unsure += 1
        try:
            return self._block(body, frame)
        except _Raised:
            frame.may_raise = True
            return True
        finally:
            frame.unsure -= 1
            self._unsure -= 1

    def _loop(self, node: ast.For, frame: _Frame) -> bool:
        items = self._value(node.iter, frame)
        if isinstance(items, list | tuple | dict | set | range) and not isinstance(items, Either):
            for item in list(items)[:MAX_TURNS]:
                self._assign(node.target, item, frame)
                if any(isinstance(n, ast.Break | ast.Continue) for n in ast.walk(node)):
                    self._maybe(node.body, frame)
                elif self._block(node.body, frame):
                    return True
        else:
            self._assign(node.target, UNKNOWN, frame)
            self._maybe(node.body, frame)
        return self._block(node.orelse, frame)

    def _try(self, node: ast.Try, frame: _Frame) -> bool:
        before, frame.may_raise = frame.may_raise, False
        try:
            ended = self._block(node.body, frame)
            raised = False
        except _Raised:
            ended, raised = True, True
        # an error that the block itself raises need not be one that is caught
        handled = raised or frame.may_raise
        frame.may_raise |= before
        if handled and node.handlers:
            if raised and len(node.handlers) == 1:
                ended = self._block(node.handlers[0].body, frame)
            else:
                ends = [self._maybe(handler.body, frame) for handler in node.handlers]
                ended = ended and all(ends)
        elif raised:
            raise _Raised
        return self._block([*node.orelse, *node.finalbody], frame) or ended

    def _assign(self, target: ast.expr, value: Any, frame: _Frame) -> None:
        if isinstance(target, ast.Name):
            if frame.unsure and target.id in frame.names:
                value = either([frame.names[target.id], value])
            frame.names[target.id] = value
        elif isinstance(target, ast.Attribute):
            owner = self._value(target.value, frame)
            if isinstance(owner, Instance):
                if self._unsure and target.attr in owner.attributes:
                    value = either([owner.attributes[target.attr], value])
                owner.attributes[target.attr] = value
        elif isinstance(target, ast.Tuple | ast.List):
            known = isinstance(value, list | tuple) and not isinstance(value, Either)
            fits = known and len(value) == len(target.elts)
            for index, element in enumerate(target.elts):
                self._assign(element, value[index] if fits else UNKNOWN, frame)

    def _import(self, node: ast.Import | ast.ImportFrom, frame: _Frame) -> None:
        for alias in node.names:
            name = alias.asname or alias.name
            if isinstance(node, ast.Import):
                frame.names[name] = External(alias.name)
            else:
                frame.names[name] = self._imported(absolute(frame.module, node), alias.name)

    # ------------------------------------------------------------ expressions

    def _value(self, node: ast.expr, frame: _Frame) -> Any:
        if isinstance(node, ast.Constant):
            return node.value
        handler = self._HANDLERS.get(type(node))
        return handler(self, node, frame) if handler else UNKNOWN

    def _name(self, node: ast.Name, frame: _Frame) -> Any:
        if node.id in frame.names:
            return frame.names[node.id]
        return self._of_module(frame.module, node.id)

    def _of_module(self, module: Module, name: str) -> Any:
        if found := self.modules.definition(module, name):
            return _defined(*found)
        if name in module.imports:
            path, what = module.imports[name]
            return self._imported(path, what) if what else External(path)
        if name in _BUILTINS:
            return _BUILTINS[name]
        return UNKNOWN

    def _imported(self, path: str, name: str) -> Any:
        module = self.modules.get(path)
        found = self.modules.definition(module, name) if module else None
        return _defined(*found) if found else External(f"{path}.{name}")

    def _attribute_of(self, node: ast.Attribute, frame: _Frame) -> Any:
        return self._attribute(self._value(node.value, frame), node.attr)

    def _attribute(self, owner: Any, name: str) -> Any:
        if isinstance(owner, Either):
            return self._each(owner, lambda o: self._attribute(o, name))
        if name in self.assumed.attributes and not isinstance(owner, Record):
            return self.assumed.attributes[name]
        if isinstance(owner, Record):
            if name in owner:
                return owner[name]
            return partial(dict.get, owner) if name == "get" else UNKNOWN
        if isinstance(owner, External):
            return External(f"{owner.path}.{name}")
        if isinstance(owner, Instance):
            if name in owner.attributes:
                return owner.attributes[name]
            return self._member(owner.ref, name, owner)
        if isinstance(owner, ClassValue):
            return self._member(owner.ref, name, owner)
        if isinstance(owner, str | dict | list | tuple) and name in _PURE:
            return getattr(owner, name, UNKNOWN)
        return UNKNOWN

    def _member(self, ref: ClassRef, name: str, owner: Any) -> Any:
        if name == "__class__":
            return ClassValue(ref)
        for base in self.modules.lineage(ref):
            if name in base.methods:
                function = base.methods[name]
                marks = {ast.unparse(d) for d in function.decorator_list}
                if "staticmethod" in marks:
                    return Bound(base.module, function, ())
                if "classmethod" in marks:
                    return Bound(base.module, function, (ClassValue(ref),))
                if marks & {"property", "cached_property"} and isinstance(owner, Instance):
                    return self._run(Bound(base.module, function, (owner,)), [], {})
                receiver = (owner,) if isinstance(owner, Instance) else ()
                return Bound(base.module, function, receiver)
            for node in base.node.body:
                targets = node.targets if isinstance(node, ast.Assign) else []
                if isinstance(node, ast.AnnAssign):
                    targets = [node.target]
                if any(isinstance(t, ast.Name) and t.id == name for t in targets):
                    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) else None
                    return self._value(value, _Frame(base.module, {})) if value else UNKNOWN
            if f".{name} = " in base.module.source:
                # set later: `ModelOptFp8Config.FusedMoEMethodCls = ModelOptFp8MoEMethod`
                for later in base.module.tree.body:
                    targets, value = assigned(later)
                    if value and any(dotted(t) == f"{base.name}.{name}" for t in targets):
                        return self._value(value, _Frame(base.module, {}))
        return UNKNOWN

    def _call_of(self, node: ast.Call, frame: _Frame) -> Any:
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        name = node.func.id if isinstance(node.func, ast.Name) else name
        if name in self.assumed.calls:
            return self.assumed.calls[name]
        arguments = [self._value(a, frame) for a in node.args]
        keywords = {k.arg: self._value(k.value, frame) for k in node.keywords if k.arg}
        if name == "isinstance" and len(arguments) == 2:
            return self._is_instance(*arguments)
        function = self._value(node.func, frame)
        if any(isinstance(a, ast.Starred) for a in node.args) or not all(
            k.arg for k in node.keywords
        ):
            # only what it is made of is known, not with which arguments
            return Instance(function.ref) if isinstance(function, ClassValue) else UNKNOWN
        return self._call(function, arguments, keywords)

    def _is_instance(self, value: Any, kind: Any) -> Any:
        if isinstance(kind, tuple) and not isinstance(kind, Either | External | ClassValue):
            answers = [self._is_instance(value, one) for one in kind]
            return True if True in answers else UNKNOWN if UNKNOWN in answers else False
        if isinstance(value, Either):
            return agreed([self._is_instance(v, kind) for v in value.values])
        if value is self.layer and isinstance(kind, ClassValue):
            return ".fused_moe" in kind.ref.module.name
        if isinstance(value, Instance) and isinstance(kind, ClassValue):
            return kind.ref in self.modules.lineage(value.ref)
        if isinstance(kind, type) and isinstance(value, str | int | float | dict | list | None):
            return isinstance(value, kind)
        return UNKNOWN

    def _subscript(self, node: ast.Subscript, frame: _Frame) -> Any:
        owner, key = self._value(node.value, frame), self._value(node.slice, frame)
        if isinstance(owner, External | ClassValue | Either) or key is UNKNOWN:
            return UNKNOWN
        if isinstance(owner, dict) and not isinstance(owner, Record) and known_key(key):
            if key not in owner:
                raise _Raised
            return owner[key]
        try:
            return owner[key]
        except (KeyError, IndexError, TypeError):
            return UNKNOWN

    def _if_expression(self, node: ast.IfExp, frame: _Frame) -> Any:
        known = self._truth(node.test, frame)
        if known is None:
            return either([self._value(node.body, frame), self._value(node.orelse, frame)])
        return self._value(node.body if known else node.orelse, frame)

    def _bool_operation(self, node: ast.BoolOp, frame: _Frame) -> Any:
        stops = isinstance(node.op, ast.Or)
        maybe: list[Any] = []
        for operand in node.values:
            value = self._value(operand, frame)
            known = truth(value)
            if known is None:
                maybe.append(value)
            elif known is stops:
                # what is false stays false, whatever comes before; what is true may be another
                return value if not stops or isinstance(value, bool) else either([*maybe, value])
            elif operand is node.values[-1]:
                maybe.append(value)
        return either(maybe) if maybe else not stops

    def _unary(self, node: ast.UnaryOp, frame: _Frame) -> Any:
        value = self._value(node.operand, frame)
        if isinstance(node.op, ast.Not):
            known = truth(value)
            return UNKNOWN if known is None else not known
        if isinstance(node.op, ast.USub) and isinstance(value, int | float):
            return -value
        return UNKNOWN

    def _binary(self, node: ast.BinOp, frame: _Frame) -> Any:
        left, right = self._value(node.left, frame), self._value(node.right, frame)
        operation = _ARITHMETIC.get(type(node.op))
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operation is None or not numbers:
            return UNKNOWN
        try:
            return operation(left, right)
        except (ArithmeticError, ValueError, TypeError):
            return UNKNOWN

    def _compare(self, node: ast.Compare, frame: _Frame) -> Any:
        left = self._value(node.left, frame)
        answers = []
        for op, right_node in zip(node.ops, node.comparators, strict=True):
            right = self._value(right_node, frame)
            answers.append(compared(op, left, right))
            left = right
        return False if False in answers else UNKNOWN if UNKNOWN in answers else True

    def _sequence(self, node: ast.List | ast.Tuple | ast.Set, frame: _Frame) -> Any:
        values = [self._value(e, frame) for e in node.elts]
        return tuple(values) if isinstance(node, ast.Tuple) else values

    def _dict(self, node: ast.Dict, frame: _Frame) -> Any:
        found = {}
        for key, value in zip(node.keys, node.values, strict=True):
            known = self._value(key, frame) if key else UNKNOWN
            if not known_key(known):
                return UNKNOWN
            found[known] = self._value(value, frame)
        return found

    def _comprehension(self, node: ast.ListComp | ast.GeneratorExp, frame: _Frame) -> Any:
        if len(node.generators) != 1 or node.generators[0].ifs:
            return UNKNOWN
        items = self._value(node.generators[0].iter, frame)
        if not isinstance(items, list | tuple) or isinstance(items, Either | External | ClassValue):
            return UNKNOWN
        inner = _Frame(frame.module, dict(frame.names))
        found = []
        for item in items[:MAX_TURNS]:
            self._assign(node.generators[0].target, item, inner)
            found.append(self._value(node.elt, inner))
        return found

    def _named(self, node: ast.NamedExpr, frame: _Frame) -> Any:
        value = self._value(node.value, frame)
        self._assign(node.target, value, frame)
        return value

    def _truth(self, node: ast.expr, frame: _Frame) -> bool | None:
        return truth(self._value(node, frame))

    _HANDLERS: Mapping[type[ast.expr], Callable[..., Any]] = {
        ast.Name: _name,
        ast.Attribute: _attribute_of,
        ast.Call: _call_of,
        ast.Subscript: _subscript,
        ast.IfExp: _if_expression,
        ast.BoolOp: _bool_operation,
        ast.UnaryOp: _unary,
        ast.BinOp: _binary,
        ast.Compare: _compare,
        ast.List: _sequence,
        ast.Tuple: _sequence,
        ast.Set: _sequence,
        ast.Dict: _dict,
        ast.ListComp: _comprehension,
        ast.GeneratorExp: _comprehension,
        ast.NamedExpr: _named,
    }


def _defined(module: Module, node: ast.ClassDef | Function) -> Any:
    if isinstance(node, ast.ClassDef):
        return ClassValue(ClassRef.of(module, node))
    return Bound(module, node, ())


def _external_call(path: str, arguments: list[Any], keywords: dict[str, Any]) -> Any:
    name = path.rpartition(".")[2]
    if path.startswith(PLATFORM) and name.startswith("is_") and not arguments and not keywords:
        return name in ("is_cuda", "is_cuda_alike")
    if path == "typing.cast" and len(arguments) == 2:
        return arguments[1]
    if path in ("copy.copy", "copy.deepcopy") and arguments:
        return arguments[0]
    return UNKNOWN


def _getattr(owner: Any, name: str, default: Any = UNKNOWN) -> Any:
    if isinstance(owner, Record) and isinstance(name, str):
        return owner.get(name, default)
    return UNKNOWN


_PURE = {
    *("lower", "upper", "strip", "startswith", "endswith", "replace", "split"),
    *("get", "keys", "values", "items", "copy", "pop"),
}
_BUILTINS: Mapping[str, Any] = {
    f.__name__: f
    for f in (str, int, float, bool, dict, list, tuple, set, range, len, any, all, max, min)
} | {"getattr": _getattr}
_ARITHMETIC: Mapping[type[ast.operator], Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
    ast.Div: operator.truediv,
    ast.Mod: operator.mod,
}
