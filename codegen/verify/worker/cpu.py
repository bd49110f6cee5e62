"""Everything that lets a release run EPLB on a CPU, as one unit: on a GPU none of it is used.

What is replaced are kernels, collectives' transport, and the one validator that admits EPLB on GPUs
alone. Model classes, loaders, layers, routers and EplbState stay the release's own.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import inspect
import os
import re
import sys
import time
import types
from pathlib import Path
from typing import Any

import torch

from . import era_routed, era_selected, reference, tree


def before_import(folder: Path) -> None:
    """Have vLLM choose the CPU platform, whatever it was built for."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
    os.environ["VLLM_TARGET_DEVICE"] = "cpu"
    os.environ["VLLM_CPU_SGL_KERNEL"] = "0"
    # Some layers compile a small function: it takes longer than all else, and a C++ compiler.
    os.environ["TORCHDYNAMO_DISABLE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    _announce_cpu_build(folder / "platform")
    let_torchvision_import()
    _answer_removed_questions()


def _answer_removed_questions() -> None:
    """Some releases ask torch about the processor by names that a later torch no longer has."""
    for name in ("_is_avx2_supported", "_is_avx512_supported", "_is_avx512_vnni_supported"):
        if not hasattr(torch._C._cpu, name):
            setattr(torch._C._cpu, name, lambda: False)


def let_torchvision_import() -> None:
    """Beside a CPU torch, a torchvision built for GPUs lacks operators that it only describes.

    Nothing here calls them, but multimodal families import transformers' image processors.
    """
    if importlib.util.find_spec("torchvision") is None or hasattr(torch.ops.torchvision, "nms"):
        return
    library = torch.library.Library("torchvision", "DEF")
    library.define("nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    library.define("qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
    _kept.append(library)


_kept: list[Any] = []


def _announce_cpu_build(folder: Path) -> None:
    """Releases recognise a CPU build by the version of the distribution named vllm."""
    try:
        if "cpu" in importlib.metadata.version("vllm"):
            return
    except importlib.metadata.PackageNotFoundError:
        pass
    version = f"{_tree_version()}+cpu"
    info = folder / f"vllm-{version}.dist-info"
    info.mkdir(parents=True, exist_ok=True)
    text = f"Metadata-Version: 2.1\nName: vllm\nVersion: {version}\n"
    # Ranks write the same file: rename so that none reads another's half.
    part = info / f"METADATA.{os.getpid()}"
    part.write_text(text)
    part.rename(info / "METADATA")
    sys.path.insert(0, str(folder))


def _tree_version() -> str:
    spec = importlib.util.find_spec("vllm")
    for place in (spec.submodule_search_locations or []) if spec else []:
        path = Path(place) / "_version.py"
        found = path.is_file() and re.search(r"version = ['\"]([\d.]+)", path.read_text())
        if found:
            return found[1].rstrip(".")
    return "0"


def after_import() -> None:
    without_cuda()
    _admit_eplb()
    _native_operators()
    _plain_collectives()
    _reference_experts()


def without_cuda() -> None:
    """EPLB code synchronises the GPU and times itself by GPU events."""

    class Event:
        def __init__(self, *_: Any, **__: Any) -> None:
            self.at = 0.0

        def record(self, *_: Any) -> None:
            self.at = time.perf_counter()

        def elapsed_time(self, other: Event) -> float:
            return (other.at - self.at) * 1e3

        def wait(self, *_: Any) -> None:
            pass

        synchronize = wait

        def query(self) -> bool:
            return True

    class Stream:
        def synchronize(self) -> None:
            pass

    torch.cuda.synchronize = lambda *_: None
    torch.cuda.Event = torch.Event = Event
    torch.cuda.stream = lambda *_: contextlib.nullcontext()
    torch.cuda.current_stream = lambda *_: Stream()
    if hasattr(torch, "accelerator"):
        torch.accelerator.current_stream = lambda *_: Stream()
        torch.accelerator.synchronize = torch.accelerator.empty_cache = lambda *_: None


def _admit_eplb() -> None:
    """The parallel config admits EPLB on GPUs alone: answer that one validator, and no other."""
    module = sys.modules[tree.need("vllm.config:ParallelConfig").__module__]
    real = vars(module)["current_platform"]
    # 0.10.0 asks is_cuda; later releases do so for other things, such as the number of GPUs
    question = "is_cuda_alike" if "is_cuda_alike" in inspect.getsource(module) else "is_cuda"

    class Platform:
        def __getattr__(self, name: str) -> Any:
            answer = getattr(real, name)
            if name == question and "enable_eplb" in sys._getframe(1).f_code.co_names:
                return lambda: True
            return answer

    vars(module)["current_platform"] = Platform()


def _native_operators() -> None:
    """Every custom operator computes with torch, not with a compiled extension."""
    custom = tree.need("vllm.model_executor.custom_op:CustomOp")
    custom.dispatch_forward = lambda self, *_, **__: self.forward_native
    _declare_operators("vllm.model_executor.layers.activation")

    def plain(layer: Any, *_: Any, **__: Any) -> None:
        # No packing: slots are compared, and moved, as they were loaded.
        layer.cpu_linear = torch.nn.functional.linear

    tree.replace(["vllm.model_executor.layers.utils:dispatch_cpu_unquantized_gemm"], plain)

    def gemm(layer: Any, x: Any, weight: Any, bias: Any = None) -> Any:
        return torch.nn.functional.linear(x, weight, bias)

    utils = "vllm.model_executor.layers.utils"
    names = [
        "vllm.model_executor.layers.linear",
        "vllm.model_executor.layers.vocab_parallel_embedding",
    ]
    dispatch = [f"{m}:dispatch_unquantized_gemm" for m in (utils, *names)]
    tree.replace(dispatch, lambda *_, **__: gemm)


def _declare_operators(module: str) -> None:
    """Without a compiled extension, layers still look its operators up, to call them on a GPU."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin is not None
    # An extension that does load declares its own, and must not find them taken.
    tree.find("vllm._custom_ops:torch")
    text = Path(spec.origin).read_text(encoding="utf-8")
    named = sorted(set(re.findall(r"\btorch\.ops\._C\.(\w+)", text)))
    missing = [name for name in named if not hasattr(torch.ops._C, name)]
    if missing:
        library = torch.library.Library("_C", "FRAGMENT")
        for name in missing:
            library.define(f"{name}() -> ()")
        _kept.append(library)


def _plain_collectives() -> None:
    """gloo alone: the compiled shared-memory transport leaves files behind a killed rank."""
    platform = tree.need("vllm.platforms.cpu:CpuPlatform")
    base = "vllm.distributed.device_communicators.base_device_communicator.DeviceCommunicatorBase"
    platform.get_device_communicator_cls = classmethod(lambda cls: base)


def _reference_experts() -> None:
    methods = [
        tree.need(
            f"{tree.MOE}.unquantized_fused_moe_method:UnquantizedFusedMoEMethod",
            f"{tree.MOE}.layer:UnquantizedFusedMoEMethod",
        )
    ]
    if (fp8 := _fp8_method()) is not None:
        methods.append(fp8)
    for method in methods:
        era = next((e for e in (era_selected, era_routed) if e.applies(method)), None)
        if era is None:
            raise LookupError(
                f"this vLLM's {method.__name__} takes neither router logits nor selected experts"
            )
        era.adapt(method)
        method.process_weights_after_loading = lambda self, layer: None
    _reference_router()


def _fp8_method() -> Any | None:
    """The release's method of fp8 experts, which then asks for no kernel of a GPU."""
    place = "vllm.model_executor.layers.quantization.fp8"
    tree.replace([f"{place}:get_fp8_moe_backend"], lambda *_, **__: None)
    tree.replace([f"{place}:select_fp8_moe_backend"], lambda *_, **__: (None, None))
    layers = tree.module(tree.MOE)
    if layers is not None and not hasattr(layers, "fused_experts"):
        # Looked up by the method's constructor in some releases, and called by none here.
        layers.fused_experts = _no_kernel
    config = tree.find(f"{place}:Fp8Config")
    if config is not None:
        # Logits are compared in float32, which no kernel of a GPU takes beside fp8.
        config.get_supported_act_dtypes = classmethod(lambda cls: [torch.float32])
    _move_bytes()
    return tree.find(f"{place}:Fp8MoEMethod")


def _no_kernel(*_: Any, **__: Any) -> Any:
    raise NotImplementedError("there is no fused kernel on a CPU")


def _move_bytes() -> None:
    """gloo has no fp8: what EPLB sends between ranks goes as the bytes that it is."""
    real = torch.distributed.P2POp.__init__

    def init(self: Any, op: Any, tensor: torch.Tensor, *given: Any, **named: Any) -> None:
        if tensor.is_floating_point() and tensor.element_size() == 1:
            tensor = tensor.view(torch.uint8)
        real(self, op, tensor, *given, **named)

    torch.distributed.P2POp.__init__ = init


def _reference_router() -> None:
    def fused_topk(
        hidden_states: Any,
        gating_output: Any,
        topk: int,
        renormalize: bool,
        indices_type: Any = None,
        scoring_func: str = "softmax",
        **_: Any,
    ) -> Any:
        weights, ids = reference.topk_softmax(gating_output, topk, renormalize, scoring_func)
        return weights, ids if indices_type is None else ids.to(indices_type), None

    places = [f"{tree.MOE}.fused_moe:fused_topk", f"{tree.MOE}.router.fused_topk_router:fused_topk"]
    if not tree.replace(places, fused_topk):
        _stand_in(f"{tree.MOE}.fused_moe", fused_topk=fused_topk)

    def to_physical(
        topk_ids: Any,
        expert_load_view: Any,
        logical_to_physical_map: Any,
        logical_replica_count: Any,
        indices_type: Any = None,
        record_enabled: Any | None = None,
        num_unpadded_tokens: Any | None = None,
        **_: Any,
    ) -> Any:
        ids = reference.to_physical(
            topk_ids,
            expert_load_view,
            logical_to_physical_map,
            logical_replica_count,
            record_enabled is None or bool(record_enabled),
            None if num_unpadded_tokens is None else int(num_unpadded_tokens),
        )
        return ids if indices_type is None else ids.to(indices_type)

    # Releases without this function choose the replica in torch, which runs here as it is.
    name = "eplb_map_to_physical_and_record"
    modules = ("layer", "fused_moe", "router.base_router")
    tree.replace([f"{tree.MOE}.{m}:{name}" for m in modules], to_physical)


def _stand_in(module: str, **names: Any) -> None:
    """A module that cannot be imported here (it needs a GPU's compiler), with what is called."""
    made = types.ModuleType(module)
    for name, value in names.items():
        setattr(made, name, value)
    sys.modules[module] = made
