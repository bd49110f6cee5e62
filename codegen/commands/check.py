"""`eplb-codegen check`: whether generated files are what would be written of today's upstream."""

from __future__ import annotations

import argparse
import shlex
from pathlib import Path
from typing import NamedTuple

from ..diff import in_colour
from ..drift.folders import Folders
from ..drift.github import annotate, group
from ..drift.judge import judge
from ..drift.state import Drift, Finding, Report
from ..drift.upstream import OldTexts
from ..errors import EnvironmentFault, Exit, Fault
from ..generate import Generator
from ..output.writer import retire_family, write_family
from ..source import SourceTree
from ..speech import say
from .common import coloured, describe, print_json, progress, source_tree, targets

DEFAULT_OUT = Path("generated")


class _Checked(NamedTuple):
    """A target, what `--fix` did about it, and the exit code that this means."""

    report: Report
    action: str
    exit: Exit
    message: str


def run(options: argparse.Namespace) -> Exit:
    """Check every target; the worst exit code wins."""
    tree = source_tree(options)
    folders = Folders(options.out, tree.version)
    names = options.targets or folders.targets()
    if not names and not folders.current:
        raise EnvironmentFault(
            f"nothing was generated into {options.out}", "Write there first: `eplb-codegen apply`."
        )
    generator, old_texts = Generator(tree), OldTexts(progress)
    families = targets(names) if names else []
    reports = [judge(tree, folders, generator.generate(f), old_texts) for f in families]
    act = _fix if options.fix else _leave
    checked = [act(report, tree, options.out / tree.version) for report in reports]
    if options.json:
        _print_json(tree, options, checked)
    else:
        _tell(tree, options, checked)
    return max((one.exit for one in checked), default=Exit.OK)


def _leave(report: Report, tree: SourceTree, folder: Path) -> _Checked:
    return _Checked(report, "", report.state.exit, "")


def _fix(report: Report, tree: SourceTree, folder: Path) -> _Checked:
    """Write to the folder of the vLLM at hand, unless a person has to look at the target."""
    result, name = report.result, report.family.name
    if report.state.exit > Exit.DIFFERENCE:
        return _leave(report, tree, folder)
    try:
        if report.state is Drift.SOUND:
            retire_family(folder, tree.version, name)
            return _Checked(report, "retired", Exit.OK, str(folder))
        if result.entry is None:
            return _leave(report, tree, folder)
        outputs = {f.name: f.output for f in result.files}
        written = write_family(folder, tree.version, name, result.entry, outputs, force=False)
    except Fault as fault:
        return _Checked(report, "not written", max(fault.exit, report.state.exit), str(fault))
    files = ", ".join(str(folder / name) for name in outputs)
    return _Checked(report, "written" if written else "unchanged", Exit.OK, files)


def _tell(tree: SourceTree, options: argparse.Namespace, checked: list[_Checked]) -> None:
    say(f"{tree.origin}, compared with {options.out}")
    for one in checked:
        first, *others = map(_told, one.report.findings)
        say(f"  {one.report.family.name}: {first}")
        for other in others:
            say(f"    also {other}")
        if one.action:
            say(f"    {one.action}: {one.message}")
        elif advice := _advice(one.report, tree, options):
            say(f"    {advice}")
    if not checked:
        say(f"  nothing is generated for {tree.version}")
    for one in checked:
        upstream, result = _diffs(one.report)
        if options.format == "github":
            for title, diff in (("what changed upstream", upstream), ("the new result", result)):
                if diff:
                    say(group(f"{one.report.family.name}: {title}", diff))
            if one.exit is not Exit.OK:
                text = "\n".join(map(_told, one.report.findings))
                advice = one.message or _advice(one.report, tree, options)
                for command in annotate(one.report, f"{text}\n{advice}".strip()):
                    say(command)
        else:
            for diff in (upstream, result):
                say(in_colour(diff) if coloured() else diff, end="")


def _told(finding: Finding) -> str:
    return finding.drift.value + (f": {finding.message}" if finding.message else "")


def _advice(report: Report, tree: SourceTree, options: argparse.Namespace) -> str:
    """What to do about a target; nothing where it is well or told by the finding."""
    if report.state is Drift.EDITED:
        command = _command("apply --force", report, tree, options)
        return f"keep the edit elsewhere, then write it anew: {command}"
    if report.state is Drift.UNRECOGNISED:
        return "serve vLLM's own class until this tool follows, and report the place"
    again = _command("check --fix", report, tree, options)
    if report.state is Drift.SOUND:
        return f"to retire it: {again}"
    if report.state is Drift.IN_SYNC and report.folder and report.folder.vllm != tree.version:
        return f"to serve it with {tree.version}: {again}"
    return "" if report.state in (Drift.IN_SYNC, Drift.UNREADABLE) else f"to make it anew: {again}"


def _command(command: str, report: Report, tree: SourceTree, options: argparse.Namespace) -> str:
    """A command line for a target, with the vLLM and the folder of this one."""
    where: list[str] = []
    if options.source:
        where += ["--source", str(options.source)]
    elif options.vllm:
        where += ["--vllm", tree.version]
    if options.out != DEFAULT_OUT:
        where += ["--out", str(options.out)]
    return f"eplb-codegen {command} {shlex.join([report.family.name, *where])}"


def _diffs(report: Report) -> tuple[str, str]:
    """What changed upstream, and what that changes in the generated files."""
    return (
        "".join(f.upstream_diff or "" for f in report.files),
        "".join(f.result_diff or "" for f in report.files),
    )


def _print_json(tree: SourceTree, options: argparse.Namespace, checked: list[_Checked]) -> None:
    print_json(
        {
            "vllm": tree.version,
            "origin": tree.origin,
            "out": str(options.out),
            "targets": [_document(one, tree, options) for one in checked],
        }
    )


def _document(one: _Checked, tree: SourceTree, options: argparse.Namespace) -> dict[str, object]:
    report, folder = one.report, one.report.folder
    entry = folder.entry(report.family.name) if folder else None
    return {
        "family": report.family.name,
        "state": report.state.value,
        "exit": int(one.exit),
        "findings": [{"state": f.drift.value, "message": f.message} for f in report.findings],
        "advice": _advice(report, tree, options),
        "action": one.action,
        "message": one.message,
        "folder": str(folder.path) if folder else None,
        "made_from_vllm": folder.vllm if folder else None,
        "made_by_tool": entry.tool_version if entry else None,
        "upstream": describe(report.result),
        "files": [f._asdict() for f in report.files],
    }
