"""Which MoE method a vLLM uses for the experts of a checkpoint, and whether EPLB runs with it.

The choice is read from the tree's own code, for a CUDA machine: `get_quantization_config` names
the configuration class of a method, `override_quantization_method` replaces one method by
another (GPTQ by GPTQ-Marlin), and `get_quant_method` picks the class for an expert layer. What
depends on the GPU or on kernels is left open, and every class that may result is named.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from ..errors import Refusal
from .modules import ClassRef, Module, Modules
from .moe_methods import FUSED_MOE, MoEMethod, MoEMethods, Supports
from .possible import Assumed, Evaluator
from .syntax import assigned, dotted, statements
from .values import UNKNOWN, Bound, ClassValue, Instance, Record

_CT = "compressed-tensors"
QUANTIZATION = "vllm.model_executor.layers.quantization"
PREFIX = "model.layers.0.mlp.experts"
UNQUANTISED = "UnquantizedFusedMoEMethod"
SKIPS = (
    "is_layer_excluded",
    "is_layer_skipped",
    "is_layer_skipped_awq",
    "is_layer_skipped_bnb",
    "is_layer_skipped_quant",
    "should_ignore_layer",
)
"""Functions of vLLM that ask whether a checkpoint leaves a layer unquantised."""
IGNORED = ("ignore", "ignored_layers", "modules_to_not_convert", "llm_int8_skip_modules", "exclude")
"""Keys of a `quantization_config` that list what is not quantised."""


class Experts(NamedTuple):
    """What kernels ask of an expert layer; None: not known."""

    hidden_size: int | None = None
    intermediate_size: int | None = None
    """Of one expert; with expert parallelism no rank holds a part of one."""
    activation: str | None = None
    router_weight_on_input: bool | None = None


class Answer(NamedTuple):
    """The MoE methods that a checkpoint may be served with, and what this means for EPLB."""

    quantization: str
    """As the checkpoint says: "fp8", "compressed-tensors", "none"."""
    methods: tuple[MoEMethod, ...]
    supports: Supports
    reason: str


def quantization_of(config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The `quantization_config` of a config.json, a multimodal one's too; None without one.

    The same places and names as vLLM's `ModelConfig._verify_quantization`.
    """
    for place in (config, config.get("text_config")):
        if not isinstance(place, Mapping):
            continue
        found = place.get("quantization_config") or place.get("compression_config")
        if isinstance(found, Mapping):
            method = str(found.get("quant_method") or "").lower()
            return {**found, "quant_method": method.replace("compressed_tensors", _CT)}
    return None


def answer(modules: Modules, config: Mapping[str, Any], experts: Experts) -> Answer:
    """What EPLB makes of the quantisation of a checkpoint; `config` is its config.json.

    What was not understood gives `Supports.UNKNOWN` with the reason; nothing is raised.
    """
    quantization = quantization_of(config)
    name = quantization["quant_method"] if quantization else "none"
    try:
        return _answer(modules, config, quantization, name, experts)
    except Refusal as refusal:
        return Answer(name, (), Supports.UNKNOWN, str(refusal))


def _answer(
    modules: Modules,
    config: Mapping[str, Any],
    quantization: dict[str, Any] | None,
    name: str,
    experts: Experts,
) -> Answer:
    methods = MoEMethods(modules)
    if quantization is None:
        return _summary(name, (methods.judge(_unquantised(modules)),), open_end=False)
    layer = _layer(experts)
    evaluator = Evaluator(modules, layer, _assumptions(quantization))
    found: dict[str, MoEMethod] = {}
    open_end = False
    registered = False
    for chosen in _chosen(modules, evaluator, config, quantization):
        kinds = evaluator.call(_function(modules, QUANTIZATION, "get_quantization_config"), chosen)
        registered |= bool(kinds)
        for kind in kinds:
            results = _method_of(evaluator, kind, quantization, layer)
            for result in results:
                if isinstance(result, Instance) and methods.is_method(result.ref):
                    found.setdefault(result.ref.name, methods.judge(result.ref))
                else:
                    # None, or a method for other layers: vLLM stops with an error
                    open_end |= result is UNKNOWN
    if not registered:
        return Answer(name, (), Supports.NO, f"this vLLM has no quantisation method {name!r}")
    return _summary(name, tuple(found.values()), open_end)


def _summary(name: str, methods: tuple[MoEMethod, ...], open_end: bool) -> Answer:
    answers = {m.supports for m in methods}
    if open_end or Supports.UNKNOWN in answers:
        return Answer(name, methods, Supports.UNKNOWN, "the source was not understood in full")
    if not methods:
        return Answer(name, (), Supports.UNKNOWN, "no MoE method was found that vLLM would take")
    if len(answers) > 1:
        return Answer(name, methods, Supports.DEPENDS, "on which of these classes is chosen")
    return Answer(name, methods, answers.pop(), methods[0].reason)


def _unquantised(modules: Modules) -> ClassRef:
    # the expert layer stands in the second from 0.24.0
    for stem in ("layer", "routed_experts"):
        module = modules.get(f"{FUSED_MOE}.{stem}")
        if module and (ref := modules.class_of(module, UNQUANTISED)):
            return ref
    raise Refusal(f"{UNQUANTISED} not found", FUSED_MOE)


def _chosen(
    modules: Modules,
    evaluator: Evaluator,
    config: Mapping[str, Any],
    quantization: dict[str, Any],
) -> list[str]:
    """The names of methods that may be taken for a checkpoint, as `_verify_quantization` does."""
    registry = modules.get(QUANTIZATION)
    if registry is None:
        raise Refusal("the registry of quantisation methods was not found", QUANTIZATION)
    names = _strings(registry, "QuantizationMethods")
    last = _overrides(modules)
    ordered = [n for n in names if n not in last] + [n for n in last if n in names]
    lookup = _function(modules, QUANTIZATION, "get_quantization_config")
    found: list[str] = []
    for name in ordered:
        for kind in evaluator.call(lookup, name):
            if not isinstance(kind, ClassValue):
                continue
            method = modules.method(kind.ref, "override_quantization_method")
            if method is None or method[0].name == "QuantizationConfig":
                continue
            override = evaluator.method(kind, "override_quantization_method")
            arguments = [dict(quantization), None]
            if len(method[1].args.args) > 3:  # cls, hf_quant_cfg, user_quant, hf_config
                arguments.append(Record(config))
            results = evaluator.call(override, *arguments)
            found += [r for r in results if isinstance(r, str) and r not in found]
            if UNKNOWN in results:
                raise Refusal(f"what {kind.ref.name} overrides was not understood", kind.ref.where)
            if results and None not in results:
                return found
    return [*found, str(quantization["quant_method"])]


def _method_of(
    evaluator: Evaluator, kind: Any, quantization: dict[str, Any], layer: Record
) -> tuple[Any, ...]:
    if not isinstance(kind, ClassValue):
        return (UNKNOWN,)
    configurations = evaluator.call(evaluator.method(kind, "from_config"), dict(quantization))
    found: list[Any] = []
    for configuration in configurations:
        if not isinstance(configuration, Instance):
            return (UNKNOWN,)
        choose = evaluator.method(configuration, "get_quant_method")
        found += evaluator.call(choose, layer, PREFIX)
    return tuple(found)


def _layer(experts: Experts) -> Record:
    sizes = {
        "hidden_size": experts.hidden_size,
        "hidden_dim": experts.hidden_size,
        "intermediate_size_per_partition": experts.intermediate_size,
        "intermediate_size_per_partition_unpadded": experts.intermediate_size,
        "activation": experts.activation,
        "apply_router_weight_on_input": experts.router_weight_on_input,
    }
    known = {k: v for k, v in sizes.items() if v is not None}
    return Record(known, moe_config=Record(known), local_num_experts=UNKNOWN)


def _assumptions(quantization: dict[str, Any]) -> Assumed:
    """What is taken for granted: experts are quantised as the checkpoint says of layers like them.

    Where its list of exceptions speaks of experts, both ways are looked at.
    """
    exceptions = [
        str(entry)
        for key in IGNORED
        for entry in quantization.get(key) or ()
        if "expert" in str(entry) and "shared_expert" not in str(entry)
    ]
    skipped = UNKNOWN if exceptions else False
    calls: dict[str, Any] = dict.fromkeys(SKIPS, skipped)
    if not quantization.get("dynamic"):
        calls["get_dynamic_override"] = None
    if quantization["quant_method"] != _CT:
        return Assumed(calls)
    scheme = _scheme(quantization)
    calls["get_scheme_dict"] = UNKNOWN if exceptions else scheme
    return Assumed(calls, {"target_scheme_map": {"Linear": scheme}})


def _scheme(quantization: Mapping[str, Any]) -> Any:
    """How compressed-tensors quantises experts: of the groups the one whose targets they match."""
    groups = quantization.get("config_groups")
    fitting = [
        group
        for group in (groups.values() if isinstance(groups, Mapping) else ())
        if any(_targets(str(t)) for t in group.get("targets") or ())
    ]
    if len(fitting) != 1:
        return UNKNOWN
    group = fitting[0]
    return {
        "weights": _arguments(group.get("weights")),
        "input_activations": _arguments(group.get("input_activations")),
        "format": group.get("format") or quantization.get("format"),
    }


def _targets(target: str) -> bool:
    projections = [f"{PREFIX}.0.{p}_proj" for p in ("gate", "up", "down")]
    if target.startswith("re:"):
        try:
            return any(re.match(target[3:], p) for p in projections)
        except re.error:
            return False
    return target == "Linear" or target in projections


def _arguments(given: Any) -> Record | None:
    """The `QuantizationArgs` of the library compressed-tensors, with its defaults."""
    if not isinstance(given, Mapping):
        return None
    defaults = {
        "num_bits": 8,
        "type": "int",
        "symmetric": True,
        "group_size": None,
        "block_structure": None,
        "dynamic": False,
        "actorder": None,
    }
    fields = {**defaults, **given}
    if fields.get("strategy") is None:
        size = fields["group_size"]
        fields["strategy"] = "tensor" if size is None else "channel" if size == -1 else "group"
    return Record(fields)


def _function(modules: Modules, module: str, name: str) -> Any:
    home = modules.get(module)
    found = modules.definition(home, name) if home else None
    if found is None or isinstance(found[1], ast.ClassDef):
        raise Refusal(f"{name} not found", module)
    return Bound(found[0], found[1], ())


def _strings(module: Module, name: str) -> list[str]:
    """The strings in what a module assigns to a name."""
    for statement, _ in statements(module.tree):
        targets, value = assigned(statement)
        if value is not None and any(dotted(t) == name for t in targets):
            nodes = [n for n in ast.walk(value) if isinstance(n, ast.Constant)]
            return [n.value for n in nodes if isinstance(n.value, str)]
    raise Refusal(f"{name} not found", module.path)


def _overrides(modules: Modules) -> list[str]:
    """The methods that are asked last, in their order."""
    for name in ("vllm.config.model", "vllm.config"):
        module = modules.get(name)
        ref = module and modules.class_of(module, "ModelConfig")
        function = ref.methods.get("_verify_quantization") if ref else None
        for statement, _ in statements(function) if function else ():
            targets, value = assigned(statement)
            if isinstance(value, ast.List) and any(dotted(t) == "overrides" for t in targets):
                return [str(e.value) for e in value.elts if isinstance(e, ast.Constant)]
    raise Refusal("the order in which quantisation methods are asked was not found", "vllm/config")
