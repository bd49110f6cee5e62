"""Whether what a file imports and reads of vLLM is there in a tree."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from ..analysis.modules import ClassRef, Module, Modules, absolute
from ..analysis.syntax import Function, assigned, dotted, imports, self_attribute, statements


def unresolved_imports(modules: Modules, module: Module, only: set[str] | None = None) -> list[str]:
    """Each `from vllm... import name` of a module for which the tree has no such module or name.

    Args:
        only: look at these names alone.
    """
    missing = []
    for node in imports(module.tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.startswith("vllm.") and modules.get(alias.name) is None:
                    missing.append(f"line {node.lineno}: no module {alias.name}")
        else:
            name = absolute(module, node)
            if name.partition(".")[0] != "vllm":
                continue
            for alias in node.names:
                if (only is None or alias.name in only) and not has_name(modules, name, alias.name):
                    missing.append(f"line {node.lineno}: {name} has no {alias.name}")
    return missing


def has_name(
    modules: Modules, module_name: str, name: str, seen: frozenset[str] = frozenset()
) -> bool:
    """Whether `from module_name import name` finds something in the tree."""
    module = modules.get(module_name)
    if module is None or module_name in seen:
        return False
    if name == "*" or module.definition(name) or modules.get(f"{module_name}.{name}"):
        return True
    seen |= {module_name}
    if name in module.imports:
        target, inner = module.imports[name]
        # what comes from outside vLLM is not in the tree to look at
        return not target.startswith("vllm") or not inner or has_name(modules, target, inner, seen)
    for statement, _ in statements(module.tree):
        if any(dotted(t) == name for t in assigned(statement)[0]):
            return True
        if isinstance(statement, Function | ast.ClassDef) and statement.name == name:
            return True  # in a branch of an `if` or `try`
        if (
            isinstance(statement, ast.ImportFrom)
            and statement.names[0].name == "*"
            and has_name(modules, absolute(module, statement), name, seen)
        ):
            return True
    # PEP 562: a module's __getattr__ looks names up in a table
    return module.definition("__getattr__") is not None and f'"{name}"' in module.source


def unresolved_attributes(modules: Modules, module: Module) -> list[str]:
    """Attributes read from vLLM's configuration objects that their classes do not have.

    Followed from `vllm_config` and `get_current_vllm_config()` through local names, as far as the
    annotations of the classes lead.
    """
    home = modules.get("vllm.config")
    root = modules.class_of(home, "VllmConfig") if home else None
    if root is None:
        return ["the tree has no vllm.config.VllmConfig"]
    missing: dict[str, None] = {}
    for function in (n for n in ast.walk(module.tree) if isinstance(n, Function)):
        types: dict[str, ClassRef] = {"vllm_config": root}
        for statement, _ in statements(function):
            targets, value = assigned(statement)
            for node in _own_expressions(statement):
                _check(modules, node, types, root, missing)
            if value is not None and len(targets) == 1 and isinstance(targets[0], ast.Name):
                found = _type(modules, value, types, root)
                if found:
                    types[targets[0].id] = found
                else:
                    types.pop(targets[0].id, None)
    return list(missing)


def _own_expressions(statement: ast.stmt) -> Iterator[ast.AST]:
    for child in ast.iter_child_nodes(statement):
        if not isinstance(child, ast.stmt):
            yield from ast.walk(child)


def _check(
    modules: Modules,
    node: ast.AST,
    types: dict[str, ClassRef],
    root: ClassRef,
    missing: dict[str, None],
) -> None:
    if not isinstance(node, ast.Attribute):
        return
    owner = _type(modules, node.value, types, root)
    if owner and node.attr not in _attributes(modules, owner):
        missing[f"line {node.lineno}: {owner.name} has no {node.attr}"] = None


def _type(
    modules: Modules, node: ast.AST, types: dict[str, ClassRef], root: ClassRef
) -> ClassRef | None:
    if isinstance(node, ast.Name):
        return types.get(node.id)
    if isinstance(node, ast.Call) and dotted(node.func) == "get_current_vllm_config":
        return root
    if isinstance(node, ast.Attribute):
        owner = _type(modules, node.value, types, root)
        annotation = _attributes(modules, owner).get(node.attr) if owner else None
        if owner and annotation is not None:
            name = annotation.value if isinstance(annotation, ast.Constant) else dotted(annotation)
            return modules.class_of(owner.module, str(name))
    return None


def _attributes(modules: Modules, ref: ClassRef) -> dict[str, ast.expr | None]:
    """What an object has: annotated fields (with the annotation), methods, `self.x = ...`."""
    found: dict[str, ast.expr | None] = {}
    for owner in reversed(modules.lineage(ref)):
        found.update(dict.fromkeys(owner.methods))
        for node in owner.node.body:
            if isinstance(node, ast.AnnAssign):
                found[dotted(node.target)] = node.annotation
            else:
                found.update({dotted(t): None for t in assigned(node)[0]})
        for method in owner.methods.values():
            for statement, _ in statements(method):
                for target in assigned(statement)[0]:
                    if attribute := self_attribute(target):
                        found.setdefault(attribute, None)
    return found
