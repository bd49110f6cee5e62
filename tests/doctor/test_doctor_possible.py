"""What functions may return, followed without running them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from eplb_codegen.analysis.modules import Modules
from eplb_codegen.analysis.possible import Assumed, Evaluator
from eplb_codegen.analysis.values import UNKNOWN, Bound, Instance, Record
from eplb_codegen.source.tree import SourceTree

LAYER = Record(size=8, moe_config=Record())
HEAD = """\
import os
from outside import Format, probe
from vllm.platforms import current_platform
raise SystemExit("this module was run")

class Base:
    kind = "base"
    @property
    def fast(self): return False

class Fast(Base):
    @property
    def fast(self): return self.backend == Backend.TRITON

class QuantizationConfig:
    def __init__(self, bits): self.bits = bits
    @classmethod
    def from_config(cls, config):
        try:
            bits = cls.first(config, ["w_bits", "bits"])
        except ValueError:
            bits = 16
        return cls(bits)
    @staticmethod
    def first(config, keys):
        for key in keys:
            if key in config:
                return config[key]
        raise ValueError

class Expert: pass
"""


@pytest.fixture
def returns(tmp_path: Path) -> Callable[..., list[Any]]:
    """The possible results of a function `f(x, layer)` with this body; objects by class name."""

    def of(body: str, x: Any = UNKNOWN, **assumed: Any) -> list[Any]:
        folder = tmp_path / "vllm" / "fused_moe"
        folder.mkdir(parents=True)
        lines = "".join(f"    {line}\n" for line in body.splitlines())
        (folder / "here.py").write_text(f"{HEAD}\ndef f(x, layer):\n{lines}")
        modules = Modules(SourceTree(tmp_path, "0", "toy"))
        module = modules.get("vllm.fused_moe.here")
        assert module is not None
        function: Any = module.definition("f")
        found = Evaluator(modules, LAYER, Assumed(assumed)).call(
            Bound(module, function, ()), x, LAYER
        )
        return [v.ref.name if isinstance(v, Instance) else v for v in found]

    return of


@pytest.mark.parametrize(
    "body, expected",
    [
        ("return 1 if x else 2", [1, 2]),
        ("if x:\n    return Base()\nreturn Fast()", ["Base", "Fast"]),
        ("if x:\n    y = 1\nelse:\n    y = 2\nreturn y", [1, 2]),
        ("y = 0\nif x:\n    y = 1\nreturn y", [0, 1]),
        ("if x:\n    raise ValueError\nreturn 1", [1]),
        ("raise ValueError", []),
        ("pass", [None]),
        ("return x", [UNKNOWN]),
        ("return x.y(1)[2] + 3", [UNKNOWN]),
        ("return probe(layer)", [UNKNOWN]),
        ("return not x", [UNKNOWN]),
        ("return x and False", [False]),
        ("return x or True", [True]),
        ("return x or -1", [UNKNOWN, -1]),
        ("return None or 4", [4]),
        ("return x is None or layer.size % 4 == 0", [True]),
        ("return layer.size % 3 == 0 and x", [False]),
        ("return layer.other == 3", [UNKNOWN]),
        ("return current_platform.is_cuda() and not current_platform.is_rocm()", [True]),
        ("return current_platform.is_device_capability(90)", [UNKNOWN]),
        ("return isinstance(layer, Expert)", [True]),
        ("return isinstance(layer, QuantizationConfig)", [True]),  # it stands in fused_moe too
        ("return isinstance(Fast(), Base), isinstance(Base(), Fast)", [(True, False)]),
        ("return isinstance(layer, probe)", [UNKNOWN]),
        ("return Fast().kind, Base().fast", [("base", False)]),
        ("return Fast().fast", [UNKNOWN]),
        ("return QuantizationConfig.from_config({'bits': 4}).bits", [4]),
        ("return QuantizationConfig.from_config({}).bits", [16]),
        ("return {'a': 1}.get('b', 2), {'a': 1}['a']", [(2, 1)]),
        ("return {'a': 1}['b']", []),
        ("return (4, True) in {(4, True): probe}", [True]),
        ("return (4, x) in {(4, True): probe}", [UNKNOWN]),
        ("return 'pack-quantized' == Format.pack_quantized.value", [True]),
        ("return 'group' in [Format.CHANNEL, Format.GROUP]", [True]),
        ("return 'group' == Format.CHANNEL", [False]),
        ("return 'group' == os.CHANNEL", [UNKNOWN]),
        ("return all([y == 1 for y in [1, 1]]), [y for y in (1, 2)].pop()", [(True, 2)]),
        ("for y in [1, 2]:\n    if y == 2:\n        return y\nreturn 0", [2]),
        ("for y in x:\n    return 1\nreturn 0", [1, 0]),
        ("while probe():\n    return 1\nreturn 0", [1, 0]),
        ("match x:\n    case 1:\n        return 1\nreturn 0", [1, 0]),
        ("def probe(y):\n    return y\nreturn probe(1)", [UNKNOWN]),
        ("return f(*x)", [UNKNOWN]),
        ("return QuantizationConfig(**x)", ["QuantizationConfig"]),
        ("return QuantizationConfig(**x).bits", [UNKNOWN]),
        ("return f(x, layer)", [UNKNOWN]),
    ],
)
def test_returns(returns: Callable[..., list[Any]], body: str, expected: list[Any]) -> None:
    assert returns(body) == expected


def test_a_given_argument(returns: Callable[..., list[Any]]) -> None:
    body = "if x['method'] != 'gptq':\n    return None\nreturn x.get('bits')"
    assert returns(body, {"method": "gptq", "bits": 4}) == [4]


def test_what_is_assumed_of_a_call(returns: Callable[..., list[Any]]) -> None:
    assert returns("return Base() if probe(x) else Fast()", probe=True) == ["Base"]
