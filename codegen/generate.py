"""From a tree and a family to finished files: plan, rewrite, check, relocate."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import NamedTuple

from . import __version__
from .analysis.modules import Module, Modules
from .analysis.moe_methods import MoEMethod, MoEMethods
from .analysis.soundness import Fault
from .checks.names import new_name_faults
from .checks.resolves import unresolved_imports
from .errors import EnvironmentFault, Refusal
from .families import Family
from .output.manifest import FamilyEntry, FileEntry
from .output.relocate import relocate
from .output.writer import digest
from .planning.family import plan_family
from .planning.method import plan_method
from .planning.plan import FilePlan, Plan, State
from .render import render
from .rewrite.apply import rewrite
from .rewrite.edits import AddImport
from .rewrite.style import follows_ruff
from .source import SourceTree


class Generated(NamedTuple):
    """One file: upstream's text, that text patched in place, and the file for the output folder."""

    name: str
    upstream: str
    original: str
    patched: str
    output: str


class Result(NamedTuple):
    """What became of a family. `files` and `entry` are there where there is something to write."""

    family: Family
    state: State
    reason: str
    files: tuple[Generated, ...] = ()
    entry: FamilyEntry | None = None
    faults: tuple[Fault, ...] = ()


class Generator:
    """Generates families from one tree; what was read of it serves all of them."""

    def __init__(self, tree: SourceTree) -> None:
        self.tree = tree
        self._parsed: dict[str, Module | None] = {}

    def generate(self, family: Family) -> Result:
        """The files of a family. A Refusal or a file that cannot be read becomes its state."""
        modules = Modules(self.tree, self._parsed)
        try:
            plan = (plan_method if family.methods else plan_family)(modules, family)
            if not plan.files:
                return Result(family, plan.state, plan.reason)
            return self._finish(modules, plan)
        except Refusal as refusal:
            return Result(family, State.UNRECOGNISED, str(refusal))
        except RecursionError:
            return Result(family, State.UNRECOGNISED, "the file is nested too deeply to be read")
        except EnvironmentFault as fault:
            return Result(family, State.UNREADABLE, str(fault))

    def moe_methods(self) -> list[MoEMethod]:
        """Every MoE method of the tree, and whether EPLB runs with it.

        Raises:
            Refusal: what the expert layer asks for was not found.
        """
        return MoEMethods(Modules(self.tree, self._parsed)).every()

    def _finish(self, modules: Modules, plan: Plan) -> Result:
        stems = [PurePosixPath(f.module.path).stem for f in plan.files]
        files: list[Generated] = []
        entries: dict[str, FileEntry] = {}
        for part in plan.files:
            module = part.module
            by_ruff = follows_ruff(module.source)
            patched = rewrite(module.source, part.edits, module.path, by_ruff)
            result = Module(module.name, module.path, patched)
            _check(modules, part, result)
            stem = PurePosixPath(module.path).stem
            header = render(
                "header.py",
                tool_version=__version__,
                family=plan.family.name,
                of="these MoE methods" if plan.family.methods else "this model",
                version=self.tree.version,
                upstream=module.path,
                upstream_sha256=module.sha256,
                repairs=list(dict.fromkeys(f.kind.what for f in plan.faults)),
                repaired=plan.state is State.REPAIRED,
            )
            if "\r\n" in module.source:
                header = header.replace("\n", "\r\n")
            output = header + relocate(result, set(stems) - {stem}, by_ruff)
            _check_compiles(output, module.path)
            name = f"{stem}.py"
            files.append(Generated(name, module.path, module.source, patched, output))
            entries[name] = FileEntry(
                module.path, module.sha256, digest(output), dict(part.architectures)
            )
        entry = FamilyEntry(__version__, entries, modules.read)
        return Result(plan.family, plan.state, plan.reason, tuple(files), entry, plan.faults)


def _check(modules: Modules, part: FilePlan, result: Module) -> None:
    """Refuse a file that names something that is not there."""
    added = {e.name for e in part.edits if isinstance(e, AddImport)}
    faults = new_name_faults(part.module.source, result.source)
    faults += unresolved_imports(modules, result, only=added)
    if faults:
        raise Refusal(f"the patched file would not be sound: {'; '.join(faults)}", result.path)


def _check_compiles(source: str, path: str) -> None:
    try:
        compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError) as error:
        raise Refusal(f"the patched file would not compile: {error}", path) from None
