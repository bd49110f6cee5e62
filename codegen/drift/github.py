"""Reports as workflow commands, which GitHub shows beside the line of a file.

https://docs.github.com/actions/reference/workflow-commands-for-github-actions
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from .state import Report

_LINES = 30
"""Of a difference in an annotation; the log has all of it."""


def annotate(report: Report, text: str) -> Iterator[str]:
    """An `::error` command on each file of a target that differs; one without file if none is."""
    title = {"title": f"eplb-codegen: {report.family.name}: {report.state.value}"}
    differing = [f for f in report.files if f.result_diff or f.upstream_diff]
    for file in differing or report.files[:1]:
        place = {"file": _from_root(file.path), "line": str(file.line)}
        lines = (file.upstream_diff or file.result_diff or "").splitlines()
        more = [f"... {len(lines) - _LINES} lines more in the log"] if len(lines) > _LINES else []
        yield _error({**place, **title}, "\n".join([text, *lines[:_LINES], *more]))
    if not report.files:
        yield _error(title, text)


def _error(properties: dict[str, str], message: str) -> str:
    listed = ",".join(f"{name}={_property(value)}" for name, value in properties.items())
    return f"::error {listed}::{_data(message)}"


def group(title: str, text: str) -> str:
    """A part of the log that folds. Nothing in it is taken for a command, whoever wrote it."""
    token = secrets.token_hex(16)
    return (
        f"::group::{_data(title)}\n::stop-commands::{token}\n{text.rstrip()}\n"
        f"::{token}::\n::endgroup::"
    )


def _from_root(path: str) -> str:
    """As GitHub names files: from the root of the repository."""
    root = os.environ.get("GITHUB_WORKSPACE")
    absolute = Path(os.path.abspath(path))  # noqa: PTH100 - a link in the repository keeps its name
    for folder in (root, Path.cwd()):
        if folder and absolute.is_relative_to(folder):
            return absolute.relative_to(folder).as_posix()
    return path


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")
