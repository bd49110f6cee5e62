"""The patched files are in upstream's style, and no other line of them has changed."""

from __future__ import annotations

import ast
import difflib
import io
import itertools
import re
import subprocess
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

from eplb_codegen.planning.plan import State
from eplb_codegen.rewrite.style import follows_ruff
from yapf.yapflib.yapf_api import FormatCode

MOST_REMOVED = {
    "qwen2_moe.py": 13,
    "qwen3_moe.py": 13,
    "qwen3_vl_moe.py": 15,
    "llama4.py": 9,
    "mllama4.py": 3,
}
MOST_REMOVED_WITHOUT_LOADING = 4
"""From 0.25.0 on the layer code loads the experts, so qwen2_moe has no loop to change."""
MOST_ADDED = {
    "qwen2_moe.py": 135,
    "qwen3_moe.py": 135,
    "qwen3_vl_moe.py": 170,
    "llama4.py": 130,
    "mllama4.py": 45,
}
MOST_WHERE_REPAIRED = {
    "qwen3_moe.py": (10, 71),
    "qwen3_vl_moe.py": (14, 84),
    "llama4.py": (3, 59),
    "mllama4.py": (0, 3),
}
"""Lines removed and added in native files that are repaired."""
REMOVED = [
    # imports that take one more name, and lines in the parentheses of such
    r"from (vllm\.(config|distributed)|\.(interfaces|utils|qwen3_moe)) import .*",
    r"(make_empty_|is_pp_missing|fast_topk|get_tensor_model)[\w, ]*\)?",
    # the two classes that become a MixtureOfExperts
    r"class \w+For(CausalLM|ConditionalGeneration)\(.*",
    r"SupportsPP\):",
    # the last argument before the new ones, where the parenthesis closes behind it
    r'prefix=f"\{prefix\}\.experts"\)',
    r"num_experts=self\.(config\.)?num_experts\)",
    # the loops over experts, and what they hand on
    r"for mapping in expert_params_mapping:",
    r"for expert_id in range\(num_experts\):",
    r"expert_params_mapping,",
    # what is indexed by a physical expert now
    r"(new_loaded_weight = new_loaded_weight\[)?local_expert_indices\]?",
    r"curr_expert_weight = loaded_weight\[expert_id\]",
    # the call that loads a weight, which moves into the loop over replicas
    r"(success = )?weight_loader\((param,)?",
    r"(param|loaded_weight|name|name_mapped|shard_id=shard_id),",
    r"expert_id=expert_id[,)]",
    r"return_success=True[,)]",
    r"\)",
    # the error of a stage without MoE layers
    r'raise RuntimeError\("No Qwen3Mo[eE] layer found in the .*"\)',
]


def test_output_keeps_to_ruff_where_upstream_does(release: Any) -> None:
    for _, file in release.patched:
        # a fact about upstream: without it this test could pass by checking nothing
        assert follows_ruff(file.original) == release.formatted_by_ruff, file.name
        if release.formatted_by_ruff:
            assert follows_ruff(file.patched), f"{file.name}, patched in place"
            assert follows_ruff(file.output), f"{file.name}, in the output folder"


def test_patched_text_keeps_to_yapf_where_upstream_does(release: Any) -> None:
    for _, file in release.patched:
        if release.formatted_by_ruff:
            continue
        # the end apart: 0.10.1's qwen3_moe.py has no newline there
        assert by_yapf(file.original).rstrip() == file.original.rstrip(), file.name
        assert by_yapf(file.patched).rstrip() == file.patched.rstrip(), file.name
        assert file.original.endswith("\n") == file.patched.endswith("\n"), file.name


def test_imports_stay_sorted_and_new_lines_short(release: Any) -> None:
    columns = 88 if release.formatted_by_ruff else 79
    checked = []
    for _, file in release.patched:
        if import_order(file.original) == import_order(by_isort(file.original)):
            assert import_order(file.patched) == import_order(by_isort(file.patched)), file.name
            checked.append(file.name)
        long = [line for line in added_lines(file) if len(line) > columns]
        assert long == [], file.name
    assert "qwen2_moe.py" in checked


def test_no_other_line_changes(release: Any) -> None:
    allowed = re.compile("|".join(f"(?:{pattern})" for pattern in REMOVED))
    for family, file in release.patched:
        if release.results[family].family.methods:
            continue  # see test_release_methods
        removed = [line for line in changed_lines(file) if line.startswith("-")]
        strange = [line for line in removed if not allowed.fullmatch(line[1:].strip())]
        assert strange == [], file.name
        if release.results[family].state is State.REPAIRED:
            counts = (len(removed), len(added_lines(file)))
            most = MOST_WHERE_REPAIRED[file.name]
            assert counts[0] <= most[0] and 3 <= counts[1] <= most[1], (file.name, counts)
            continue
        most = MOST_REMOVED[file.name]
        if file.name == "qwen2_moe.py" and release.number >= (0, 25):
            most = MOST_REMOVED_WITHOUT_LOADING
        assert 2 <= len(removed) <= most, file.name
        assert 20 <= len(added_lines(file)) <= MOST_ADDED[file.name], file.name


def test_upstream_comments_and_licence_header_stay(release: Any) -> None:
    for _, file in release.patched:
        head = licence_header(file.original)
        assert "SPDX-License-Identifier" in head
        assert file.patched.startswith(head), file.name
        ours, upstream, rest = file.output.partition(head)
        assert upstream and rest, file.name
        assert 3 <= len(ours.splitlines()) <= 9
        assert all(line.startswith("# ") for line in ours.splitlines())
        # in order, none missing: each is found behind the one before it
        found = iter(comments(file.patched))
        missing = [comment for comment in comments(file.original) if comment not in found]
        assert missing == [], file.name


def test_header_says_what_made_it_and_from_what(release: Any) -> None:
    for family, file in release.patched:
        result = release.results[family]
        entry = result.entry.files[file.name]
        header = file.output.partition("SPDX-License-Identifier")[0]
        assert ("repaired" in header) == (result.state is State.REPAIRED)
        for fault in result.faults:
            assert header.count(fault.kind.what) == 1
        assert "@" + "generated by eplb-codegen" in header
        assert f"Do not edit; to make it anew: eplb-codegen apply {family}\n" in header
        assert f"From vLLM {release.version}, {file.upstream}\n" in header
        assert entry.upstream_sha256 in header


def changed_lines(file: Any) -> list[str]:
    lines = difflib.unified_diff(
        file.original.splitlines(), file.patched.splitlines(), n=0, lineterm=""
    )
    return [line for line in list(lines)[2:] if not line.startswith("@@")]


def added_lines(file: Any) -> list[str]:
    return [line[1:] for line in changed_lines(file) if line.startswith("+")]


def licence_header(source: str) -> str:
    """The comments above the first other line."""
    return "".join(itertools.takewhile(lambda x: x.startswith("#"), source.splitlines(True)))


def comments(source: str) -> list[str]:
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    return [token.string for token in tokens if token.type == tokenize.COMMENT]


def by_yapf(source: str) -> str:
    return FormatCode(source, style_config="pep8")[0]


def import_order(source: str) -> list[tuple[str, list[str]]]:
    """What is imported from where, in the order of the file."""
    return [
        ("." * node.level + (node.module or ""), [alias.name for alias in node.names])
        for node in ast.parse(source).body
        if isinstance(node, ast.ImportFrom)
    ]


def by_isort(source: str) -> str:
    """The file with its imports as ruff sorts them, with vLLM's own setting."""
    return subprocess.run(
        [
            Path(sysconfig.get_path("scripts"), "ruff"),
            *("check", "--isolated", "--no-cache", "--exit-zero", "--fix", "--select", "I001"),
            *("--config", 'lint.isort.known-first-party = ["vllm"]', "--quiet", "-"),
        ],
        input=source,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
