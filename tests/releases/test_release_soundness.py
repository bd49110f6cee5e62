"""What the generated files use of vLLM is there in their release, and they are a MixtureOfExperts.

All of it by reading: neither vLLM nor the generated code runs here.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
from eplb_codegen.analysis.capabilities import expert_layer_class
from eplb_codegen.checks.names import new_name_faults
from eplb_codegen.checks.resolves import unresolved_attributes, unresolved_imports
from eplb_codegen.planning.plan import State

CAUSAL = {
    "qwen2_moe": ("qwen2_moe.py", "Qwen2MoeForCausalLM"),
    "qwen3_moe": ("qwen3_moe.py", "Qwen3MoeForCausalLM"),
    "qwen3_vl_moe": ("qwen3_vl_moe.py", "Qwen3MoeLLMForCausalLM"),
    "llama4": ("llama4.py", "Llama4ForCausalLM"),
}
WRAPPER = {
    "qwen3_vl_moe": ("qwen3_vl_moe.py", "Qwen3VLMoeForConditionalGeneration"),
    "llama4": ("mllama4.py", "Llama4ForConditionalGeneration"),
}
"""In every release where these two are added, the runner does not look inside wrappers."""
BLOCK_FILE = {"qwen3_vl_moe": "qwen3_moe.py"}
"""Where the MoE block stands, if not in the causal-LM class's own file."""


def test_output_compiles_and_has_no_new_name_faults(release: Any) -> None:
    faults = {}
    for _, file in release.patched:
        compile(file.output, file.name, "exec")
        compile(file.patched, file.name, "exec")
        faults[file.name] = new_name_faults(file.original, file.output)
    assert not any(faults.values()), faults


def test_imports_and_config_attributes_are_there(release: Any) -> None:
    faults = {}
    for _, file in release.patched:
        module = release.module(file)
        faults[file.name] = unresolved_imports(release.modules, module)
        faults[file.name] += unresolved_attributes(release.modules, module)
    assert not any(faults.values()), faults


def test_only_files_beside_it_are_imported_relatively(release: Any) -> None:
    for family, file in release.patched:
        beside = {f.name.removesuffix(".py") for f in release.results[family].files}
        relative = {
            node.module
            for node in ast.walk(ast.parse(file.output))
            if isinstance(node, ast.ImportFrom) and node.level
        }
        assert relative == ({"llama4"} if file.name == "mllama4.py" else set())
        assert relative <= beside


def test_calls_of_the_expert_layer_fit_it(release: Any) -> None:
    for family, result in release.results.items():
        if result.state is not State.ADDED or result.family.methods:
            continue  # in the others these calls are upstream's own
        module = release.module(result.files[0], result.files[0].patched)
        layer = expert_layer_class(release.modules, *block_builder(release, family, module))
        _, name = CAUSAL[family]
        causal = class_named(module.tree, name)
        called = {}
        for call in (n for n in ast.walk(causal) if isinstance(n, ast.Call)):
            if not isinstance(call.func, ast.Attribute):
                continue
            receiver, method = ast.unparse(call.func.value), call.func.attr
            if receiver == "layer" or receiver.endswith(".experts"):
                found = release.modules.method(layer, method)
                assert found, f"{layer.name} has no {method}"
                assert misfit(call, found[1]) == [], f"{found[0].where}: {method}"
                called[method] = call
        methods = functions(release.protocol)
        wanted = set()
        if "update_physical_experts_metadata" in methods:
            wanted.add("update_expert_map")
        if is_empty(methods["set_eplb_state"]):
            wanted |= {"get_expert_weights", "set_eplb_state"}
        assert set(called) == wanted


def test_the_experts_and_the_mapping_take_the_new_arguments(release: Any) -> None:
    for family, result in release.results.items():
        if not result.files:
            continue
        added = []
        module = release.module(result.files[0], result.files[0].patched)
        for call in (n for n in ast.walk(module.tree) if isinstance(n, ast.Call)):
            new = {k.arg for k in call.keywords} & {"enable_eplb", "num_redundant_experts"}
            if not new:
                continue
            owner, _, method = ast.unparse(call.func).rpartition(".")
            ref = release.modules.class_of(module, owner) if owner else None
            if ref:  # FusedMoE.make_expert_params_mapping(...)
                taken = release.modules.method(ref, method)[1]
                names = {a.arg for a in [*taken.args.args, *taken.args.kwonlyargs]}
            elif found := release.modules.definition(module, method):
                names = parameters_of(release, found)
            else:
                continue  # super().get_expert_mapping and the like
            assert new <= names, f"{release.version}: {ast.unparse(call.func)} takes no {new}"
            added.append(method)
        assert added or family == "qwen3_vl_moe"


def test_every_member_of_the_protocol_is_assigned(release: Any) -> None:
    members = {
        node.target.id
        for node in release.protocol.body
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {"expert_weights", "num_moe_layers", "num_redundant_experts"} <= members
    for where, _, node in moe_classes(release):
        init = functions(node)["__init__"]
        assert members - assigned_on_every_path(init.body) == set(), where


def test_the_classes_have_the_protocol_and_its_abstract_methods(release: Any) -> None:
    for where, module, node in moe_classes(release):
        ref = release.modules.class_of(module, node.name)
        assert "MixtureOfExperts" in [c.name for c in release.modules.lineage(ref)], where
        own = functions(node)
        for name, method in functions(release.protocol).items():
            if not is_empty(method):
                continue
            assert name in own, f"{where} has no {name}"
            given, wanted = ([a.arg for a in m.args.args] for m in (own[name], method))
            assert given == wanted, f"{where}.{name}"


# The checks fail where they should: controls on real files.


@pytest.mark.parametrize(
    "plant, message",
    [
        ("from vllm.config import NoSuchConfig", "vllm.config has no NoSuchConfig"),
        ("from vllm.no_such import x", "vllm.no_such has no x"),
        ("from .no_such import x", "vllm.model_executor.models.no_such has no x"),
        ("from .utils import no_such", "vllm.model_executor.models.utils has no no_such"),
        ("import vllm.no_such", "no module vllm.no_such"),
        ("def f():\n    from vllm.utils import no_such", "vllm.utils has no no_such"),
    ],
)
def test_control_a_wrong_import_is_found(the_release: Any, plant: str, message: str) -> None:
    release = the_release["0.32.0"]
    (file,) = release.results["qwen2_moe"].files
    planted = release.module(file, f"{file.output}\n\n{plant}\n")
    (fault,) = unresolved_imports(release.modules, planted)
    assert message in fault


@pytest.mark.parametrize(
    "plant, message",
    [
        ("vllm_config.no_such", "VllmConfig has no no_such"),
        ("vllm_config.parallel_config.no_such", "ParallelConfig has no no_such"),
        ("get_current_vllm_config().parallel_config.no_such", "ParallelConfig has no no_such"),
        ("p = vllm_config.parallel_config\n    p.eplb_config.no_such", "EPLBConfig has no no_such"),
    ],
)
def test_control_a_wrong_attribute_is_found(the_release: Any, plant: str, message: str) -> None:
    release = the_release["0.32.0"]
    (file,) = release.results["qwen2_moe"].files
    planted = release.module(file, f"{file.output}\n\ndef f(vllm_config):\n    {plant}\n")
    (fault,) = unresolved_attributes(release.modules, planted)
    assert message in fault


@pytest.mark.parametrize(
    "made_for, used_in, fault",
    [
        ("0.10.2", "0.10.0", "ParallelConfig has no eplb_config"),
        ("0.10.0", "0.32.0", "ParallelConfig has no num_redundant_experts"),
        ("0.24.0", "0.32.0", "has no FusedMoE"),
    ],
)
def test_control_a_file_made_for_another_release_is_found(
    the_release: Any, made_for: str, used_in: str, fault: str
) -> None:
    (file,) = the_release[made_for].results["qwen2_moe"].files
    release = the_release[used_in]
    module = release.module(file)
    faults = unresolved_imports(release.modules, module)
    faults += unresolved_attributes(release.modules, module)
    assert fault in "\n".join(faults)


def test_control_an_undefined_and_an_unused_name_are_found(the_release: Any) -> None:
    (file,) = the_release["0.32.0"].results["qwen2_moe"].files
    undefined, unused = "\n\nprint(no_such)\n", "\n\nimport os\n"
    assert "F821" in new_name_faults(file.original, file.output + undefined)[0]
    assert "F401" in new_name_faults(file.original, file.output + unused)[0]


def class_named(tree: ast.Module, name: str) -> ast.ClassDef:
    return next(n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == name)


def functions(node: ast.ClassDef) -> dict[str, ast.FunctionDef]:
    return {n.name: n for n in node.body if isinstance(n, ast.FunctionDef)}


def is_empty(method: ast.FunctionDef) -> bool:
    return all(isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant) for n in method.body)


def moe_classes(release: Any) -> Iterator[tuple[str, Any, ast.ClassDef]]:
    """The classes that we make a MixtureOfExperts, each with its generated module."""
    for family, result in release.results.items():
        files = {f.name: release.module(f) for f in result.files}
        for table in (CAUSAL, WRAPPER) if result.state is State.ADDED else ():
            if family in table:
                file, name = table[family]
                yield f"{family}: {name}", files[file], class_named(files[file].tree, name)


def block_builder(release: Any, family: str, module: Any) -> tuple[Any, str]:
    """The module of the MoE block, and the name it builds its experts by."""
    if family in BLOCK_FILE:
        stem = BLOCK_FILE[family].removesuffix(".py")
        module = release.modules.get(f"vllm.model_executor.models.{stem}")
    (builder,) = {
        ast.unparse(n.value.func)
        for n in ast.walk(module.tree)
        if isinstance(n, ast.Assign)
        and isinstance(n.value, ast.Call)
        and ast.unparse(n.targets[0]) == "self.experts"
        and "enable_eplb" in {k.arg for k in n.value.keywords}
    }
    return module, builder


def parameters_of(release: Any, found: tuple[Any, Any]) -> set[str]:
    """The parameters of a function, or of the constructors of a class and its bases."""
    module, node = found
    owners = [node]
    if isinstance(node, ast.ClassDef):
        ref = release.modules.class_of(module, node.name)
        owners = [
            c.methods["__init__"] for c in release.modules.lineage(ref) if "__init__" in c.methods
        ]
    return {a.arg for f in owners for a in [*f.args.args, *f.args.kwonlyargs]}


def misfit(call: ast.Call, function: ast.FunctionDef) -> list[str]:
    """Arguments that a method does not take, and those it needs and is not given."""
    arguments = function.args
    positional = [a.arg for a in arguments.args][1:]  # without self
    given = {k.arg for k in call.keywords} | set(positional[: len(call.args)])
    names = {*positional, *(a.arg for a in arguments.kwonlyargs)}
    optional = set(positional[len(positional) - len(arguments.defaults) :])
    optional |= {
        a.arg
        for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
        if default is not None
    }
    return sorted((given ^ names) - (names & optional))


def assigned_on_every_path(body: Iterable[ast.stmt]) -> set[str]:
    """The attributes of `self` that are set however the branches of a function go."""
    found: set[str] = set()
    for statement in body:
        targets: list[ast.expr] = []
        if isinstance(statement, ast.Assign):
            targets = statement.targets
        elif isinstance(statement, ast.AnnAssign):
            targets = [statement.target]
        elif isinstance(statement, ast.If):
            found |= assigned_on_every_path(statement.body) & assigned_on_every_path(
                statement.orelse
            )
        found |= {t.attr for t in targets if isinstance(t, ast.Attribute)}
    return found
