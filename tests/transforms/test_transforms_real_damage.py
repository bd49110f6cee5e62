"""Damaged variants of real files: right by the oracle, or refused; never a traceback."""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Callable, Iterator

import pytest
import transforms_oracle as oracle
import transforms_real as real
import transforms_toy as toy
from hypothesis import given, settings
from hypothesis import strategies as st
from transforms_real import LLAMA4, QWEN2, QWEN3_VL, Case

SOURCES: list[tuple[str, Case]] = [
    ("0.10.0", QWEN2),
    ("0.27.0", QWEN2),
    ("0.11.0", LLAMA4),
    ("0.11.1", QWEN3_VL),
]
FUSED = {LLAMA4, QWEN3_VL}


def _kinds(version: str, case: Case) -> list[tuple[str, int]]:
    if version == "0.27.0":
        return [("per_expert", 2), ("fused", 1)]
    return [("per_expert", 2), ("fused", 2)] if case in FUSED else [("per_expert", 2)]


def verdict(version: str, case: Case, source: str, only: tuple[int, int, int] = (4, 2, 2)) -> str:
    """ "right", "refused: ...", "WRONG: ..." or, for what does not work unpatched, "broken"."""
    path = f"{real.FOLDER}{case.family}.py"
    tree = real.changed(version, {path: source})
    result = real.generate(tree, case.family)
    if result.state.value != "added by us":
        return f"refused: {result.reason}"
    try:
        wrong: list[str] = []
        for kind, out in _kinds(version, case):
            fake = real.machine(tree, case, {f.name: f.patched for f in result.files})
            wrong += real.run(fake, case, real.tensors_of(case, kind, out), [only])
            module = fake.load(case.module or case.family)
            with fake.installed():
                cls = getattr(module, case.cls)
                wrong += toy.empty_stage(fake, cls) if case is QWEN2 else []
                wrong += toy.members(fake, fake.build(cls, oracle.World(4, 2, 2, 1)))
                wrong += toy.off(fake, cls)
    except Exception as error:
        wrong = [f"{type(error).__name__}: {error}"]
    if not wrong:
        return "right"
    return f"WRONG: {wrong[0]}" if _works(version, case, source) else "broken"


def _works(version: str, case: Case, source: str) -> bool:
    """Whether a variant works as it is, without redundant experts."""
    tree = real.changed(version, {f"{real.FOLDER}{case.family}.py": source})
    try:
        for kind, out in _kinds(version, case):
            fake = real.machine(tree, case, {f"{case.family}.py": source})
            fake.strict = False
            if real.run(fake, case, real.tensors_of(case, kind, out), [(4, 0, 1), (4, 0, 2)]):
                return False
            module = fake.load(case.module or case.family)
            with fake.installed():  # dense layers have to be built, too
                dense = oracle.World(4, 0, 1, dense=frozenset({0}))
                fake.build(getattr(module, case.cls), dense)
    except Exception:
        return False
    return True


def _source(version: str, case: Case) -> str:
    return real.release(version).read(f"{real.FOLDER}{case.family}.py")


def _id(value: object) -> str:
    return value.family if isinstance(value, Case) else str(value)


def _rename_classes(source: str) -> str:
    for name in re.findall(r"^class (\w+)", source, re.M):
        if not name.endswith(("ForCausalLM", "Generation")):
            source = real.rename(source, name, f"Zz{name}")
    return source


def _rename_locals(source: str) -> str:
    for name in ("expert_params_mapping", "expert_id", "shard_id", "weight_name", "param_name"):
        # keyword arguments of vLLM's own functions keep their names
        source = re.sub(rf"(?<![\w.]){name}\b(?!=[^=])", f"zz_{name}", source)
    return source


CONSISTENT: dict[str, Callable[[str], str]] = {
    "classes renamed": _rename_classes,
    "locals renamed": _rename_locals,
    "the tensor's name renamed": lambda s: re.sub(r"(?<![\w.\"'])name\b(?!=[^=])(?!\")", "zz", s),
    "CRLF": lambda s: s.replace("\n", "\r\n"),
    "tabs": lambda s: re.sub(r"^(?: {4})+", lambda m: "\t" * (len(m[0]) // 4), s, flags=re.M),
    "no newline at the end": lambda s: s.rstrip("\n"),
    "form feeds": lambda s: s.replace("\n\n\nclass ", "\n\n\f\nclass "),
    "trailing semicolons": lambda s: re.sub(
        r"^(        self\.config = config)$", r"\1;", s, flags=re.M
    ),
    "blank lines": lambda s: s.replace("\n        self.", "\n\n        self."),
    "comments": lambda s: re.sub(r"^( +)(self\.\w+ =)", r"\1# why\n\1\2", s, flags=re.M),
    "a docstring of code": lambda s: s + '\n\nTEXT = """\nclass FusedMoE:\n    pass\n"""\n',
    "the mlp attribute": lambda s: s.replace("self.mlp", "self.zz_mlp"),
}


@pytest.mark.parametrize("name", CONSISTENT)
@pytest.mark.parametrize(("version", "case"), SOURCES, ids=_id)
def test_changed_throughout(version: str, case: Case, name: str) -> None:
    source = CONSISTENT[name](_source(version, case))
    try:
        compile(source, "source", "exec")
    except SyntaxError:
        pytest.skip("not Python")
    if name == "the mlp attribute":
        attribute = "feed_forward" if case is LLAMA4 else "zz_mlp"
        case = Case(case.family, case.cls, attribute, case.beside, case.module)
        if version != "0.10.0":
            pytest.skip("blocks of other files are not renamed")
    found = verdict(version, case, source)
    assert found in ("right", "broken") or found.startswith("refused: vllm/"), found


INCONSISTENT = {
    "the block's definition": (r"^class (\w+(?:MoeBlock|MoE))\b", r"class Zz\1"),
    "the backbone's definition": (r"^class (\w+Model)\b", r"class Zz\1"),
    "the mapping at its loop": (r"in expert_params_mapping:", "in zz_mapping:"),
    "the mapping at its call": (r"expert_params_mapping = ", "zz_mapping = "),
    "the expert id in its entry": (r"expert_id,(\s+)shard_id(\)?) (=|in) ", r"zz,\1shard_id\2 \3 "),
    "the experts": (r"self\.experts = (Shared)?FusedMoE", "self.zz = FusedMoE"),
    "FusedMoE": (r"= (Shared)?FusedMoE(Factory)?\(", "= Zz("),
    "the layers": (r"self\.layers = make_layers", "self.zz = make_layers"),
}


@pytest.mark.parametrize("name", INCONSISTENT)
@pytest.mark.parametrize(("version", "case"), SOURCES, ids=_id)
def test_renamed_in_one_place_only(version: str, case: Case, name: str) -> None:
    pattern, new = INCONSISTENT[name]
    source, count = re.subn(pattern, new, _source(version, case), flags=re.M)
    if not count:
        pytest.skip("not in this file")
    found = verdict(version, case, source)
    assert found in ("right", "broken") or found.startswith("refused: "), found


def _blocks(tree: ast.AST) -> Iterator[list[ast.stmt]]:
    for node in ast.walk(tree):
        for name in ("body", "orelse", "finalbody"):
            block = getattr(node, name, None)
            if isinstance(block, list) and block and isinstance(block[0], ast.stmt):
                yield block


def mutate(source: str, kind: str, seed: int) -> str | None:
    """One statement, chosen by `seed`, removed, doubled, moved down or put under an `if`."""
    lines = source.splitlines(keepends=True)
    choice = random.Random(seed)
    block = choice.choice(list(_blocks(ast.parse(source))))
    index = choice.randrange(len(block))

    def span(node: ast.stmt) -> tuple[int, int]:
        decorators = getattr(node, "decorator_list", [])
        first = min([node.lineno, *(d.lineno for d in decorators)])
        return first - 1, node.end_lineno or node.lineno

    first, last = span(block[index])
    margin = lines[first][: len(lines[first]) - len(lines[first].lstrip())]
    here = lines[first:last]
    if kind == "removed":
        new = [f"{margin}pass\n"] if len(block) == 1 else []
    elif kind == "doubled":
        new = here + here
    elif kind == "under an if":
        new = [
            f"{margin}if len('x'):\n",
            *(f"    {line}" if line.strip() else line for line in here),
        ]
    else:
        if index + 1 == len(block):
            return None
        start, end = span(block[index + 1])
        new, last = lines[start:end] + lines[last:start] + here, end
    changed = "".join([*lines[:first], *new, *lines[last:]])
    try:
        compile(changed, "source", "exec")
    except SyntaxError:
        return None
    return changed


@settings(max_examples=30, deadline=None, derandomize=True)
@given(
    at=st.sampled_from(SOURCES),
    kind=st.sampled_from(["removed", "doubled", "moved", "under an if"]),
    seed=st.integers(0, 5000),
)
def test_one_statement_changed(at: tuple[str, Case], kind: str, seed: int) -> None:
    version, case = at
    source = mutate(_source(version, case), kind, seed)
    if source is not None:
        found = verdict(version, case, source)
        assert found in ("right", "broken") or found.startswith("refused: "), found


@settings(max_examples=20, deadline=None, derandomize=True)
@given(at=st.sampled_from(SOURCES), part=st.floats(0, 1), column=st.integers(0, 60))
def test_truncated(at: tuple[str, Case], part: float, column: int) -> None:
    version, case = at
    lines = _source(version, case).split("\n")
    line = int(part * (len(lines) - 1))
    source = "\n".join([*lines[:line], lines[line][:column]])
    found = verdict(version, case, source)
    assert found in ("right", "broken") or found.startswith("refused: "), found
