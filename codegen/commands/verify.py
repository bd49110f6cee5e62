"""`eplb-codegen verify`: prove that a model class is right, on the vLLM of some interpreter."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

from ..errors import EnvironmentFault, Exit, Fault
from ..speech import flush, say
from ..verify import Outcome, Request, Subject, verify
from ..verify.interpreter import executable, vllm_of
from ..verify.page import page
from ..verify.subjects import experts_of, methods, of_checkpoint, subjects
from ..verify.text import as_json, lines
from .common import coloured, print_json, targets

LAYOUTS = {"per-expert": ("per-expert",), "fused": ("fused",), "both": ("per-expert", "fused")}


def run(options: argparse.Namespace) -> Exit:
    """Judge every class of every target; the worst exit code wins.

    0: every check ran and passed. 1: one failed, or one that applies did not run. 2: usage, or a
    vLLM that cannot be run here.
    """
    _check_numbers(options)
    if options.report:
        _check_writable(options.report)
    python = executable(options.python or sys.executable)
    tree = vllm_of(python)
    generated = None if options.upstream else options.generated
    found = [s for f in targets(options.targets) for s in subjects(f, tree, generated)]
    if options.checkpoint:
        found = of_checkpoint(found, options.checkpoint)
    files = methods(tree, generated) if options.quantization and generated else {}
    requests = [(s, _request(options, python, s, files)) for s in found]
    outcomes: list[Outcome] = []
    worst = Exit.OK
    for subject, request in requests:
        try:
            report = verify(request, _progress(subject))
        except Fault as fault:
            print(f"eplb-codegen: {subject.model}: {fault}", file=sys.stderr)
            worst = max(worst, fault.exit)
            continue
        outcome = Outcome(subject, request, report)
        outcomes.append(outcome)
        worst = max(worst, Exit.OK if report.passed else Exit.DIFFERENCE)
        if not options.json:
            say("\n".join(lines(outcome, coloured())))
            flush()
    if options.json:
        print_json(as_json(outcomes, tree.version, str(python)))
    if options.report and outcomes:
        options.report.write_text(page(outcomes, tree, str(python)), encoding="utf-8")
        print(f"report: {options.report}", file=sys.stderr)
    return worst


def _request(
    options: argparse.Namespace, python: Path, subject: Subject, files: Mapping[str, Path]
) -> Request:
    checkpoint = options.checkpoint
    experts = experts_of(checkpoint, subject.model) if checkpoint else options.experts
    return Request(
        python=python,
        family=subject.model,
        module=subject.file,
        ranks=options.ranks,
        redundant=_redundant(options, experts),
        layouts=_layouts(options),
        skip_unknown_layouts=options.layout == "both" and not checkpoint,
        experts=experts,
        quantization=options.quantization,
        methods=files,
        checkpoint=checkpoint,
        seed=options.seed,
        device=options.device,
        timeout=options.timeout,
    )


def _layouts(options: argparse.Namespace) -> tuple[str, ...]:
    if options.checkpoint:
        # It has the layout that it has.
        return ("checkpoint",)
    if options.quantization and options.layout == "both":
        return LAYOUTS["per-expert"]
    return LAYOUTS[options.layout]


def _redundant(options: argparse.Namespace, experts: int) -> tuple[int, ...]:
    """The R that were asked for; by default the two smallest that spread evenly.

    Raises:
        EnvironmentFault: one does not spread evenly over the ranks.
    """
    ranks = options.ranks
    first = -experts % ranks
    if not options.redundant:
        return (first, first + ranks)
    for redundant in options.redundant:
        if (experts + redundant) % ranks:
            fits = redundant + -(experts + redundant) % ranks
            raise EnvironmentFault(
                f"{experts} experts and {redundant} redundant ones do not spread evenly over "
                f"{ranks} ranks",
                f"Give --redundant {fits}, for one.",
            )
    return tuple(dict.fromkeys(options.redundant))


def _check_numbers(options: argparse.Namespace) -> None:
    least = {"ranks": 2, "experts": 1, "timeout": 1, "seed": 0}
    for name, value in least.items():
        if getattr(options, name) < value:
            raise EnvironmentFault(f"--{name} must be at least {value}")
    if options.quantization and (options.checkpoint or options.layout == "fused"):
        raise EnvironmentFault("--quantization is for the tiny checkpoint in the per-expert layout")
    if options.device == "cuda" and (options.quantization or "").startswith("wna16"):
        raise EnvironmentFault(
            "--quantization wna16 is proven with reference kernels", "Leave --device cuda out."
        )
    if any(redundant < 0 for redundant in options.redundant or []):
        raise EnvironmentFault("--redundant must be at least 0")


def _check_writable(report: Path) -> None:
    """Better told now than in two minutes."""
    try:
        with report.open("a", encoding="utf-8"):
            pass
    except OSError as error:
        raise EnvironmentFault(f"{report} cannot be written: {error.strerror}") from None


def _progress(subject: Subject) -> Callable[[str], None]:
    def tell(case: str) -> None:
        if sys.stderr.isatty():
            print(f"{subject.model}: {case} ...", file=sys.stderr, flush=True)

    return tell
