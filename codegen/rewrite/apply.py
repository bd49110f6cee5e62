"""Carries out edits: one parse, one walk, every edit found by its path in the original."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Sequence

import libcst as cst

from ..analysis.syntax import StatementPath
from ..errors import Refusal
from . import style
from .edits import (
    AddArguments,
    AddBase,
    AddImport,
    Edit,
    Insert,
    NewCode,
    Remove,
    Replace,
    ReplaceArgument,
    SetLoop,
)
from .imports import add_imports

Statement = cst.SimpleStatementLine | cst.BaseCompoundStatement


def rewrite(source: str, edits: Sequence[Edit], where: str, by_ruff: bool) -> str:
    """The source with all edits made, in its own style.

    Args:
        source: the file as upstream has it.
        edits: paths are into `source`.
        by_ruff: whether it follows ruff's style or yapf's (`style.follows_ruff`).
        where: the file's name, for messages.

    Raises:
        Refusal: LibCST cannot parse the file, or an edit does not fit what stands at its path.
    """
    try:
        module = cst.parse_module(source)
    except (cst.ParserSyntaxError, RecursionError) as error:
        line = getattr(error, "raw_line", 1)
        raise Refusal("LibCST cannot parse this file", f"{where}:{line}") from None
    rewriter = _Rewriter(module, edits, where, aligned=not by_ruff)
    changed = module.visit(rewriter)
    if left := [e for edits in rewriter.edits.values() for e in edits]:
        raise Refusal(f"an edit found no place: {left[0]}", where)
    imports = {(e.module, e.name) for e in edits if isinstance(e, AddImport)}
    changed = changed.with_changes(
        body=add_imports(list(changed.body), imports, not by_ruff, rewriter.parse_line)
    )
    return style.format_with_ruff(changed.code) if by_ruff else changed.code


class _Rewriter(cst.CSTTransformer):
    def __init__(
        self, module: cst.Module, edits: Iterable[Edit], where: str, aligned: bool
    ) -> None:
        super().__init__()
        self.module = module
        self.where = where
        self.aligned = aligned
        self.edits: dict[cst.CSTNode, list[Edit]] = {}
        self.depth: dict[cst.CSTNode, int] = {}
        self.entered: set[cst.CSTNode] = set()
        placed = [e for e in edits if not isinstance(e, AddImport)]
        for edit in placed:
            way = self._way(edit.path)
            self.edits.setdefault(way[-1], []).append(edit)
            self.depth[way[-1]] = len(way) - 1
            self.entered.update(way)
        self.new = self._parse_all(placed)

    def parse_line(self, code: str) -> cst.SimpleStatementLine:
        statement = cst.parse_statement(code, self.module.config_for_parsing)
        assert isinstance(statement, cst.SimpleStatementLine)
        return statement

    def on_visit(self, node: cst.CSTNode) -> bool:
        # of the statements only those on the way to an edit are worth entering
        if isinstance(node, cst.BaseCompoundStatement):
            return node in self.entered
        return not isinstance(node, cst.SimpleStatementLine)

    def leave_Module(self, original: cst.Module, updated: cst.Module) -> cst.Module:
        return updated.with_changes(body=self._body(original.body, updated.body))

    def leave_IndentedBlock(
        self, original: cst.IndentedBlock, updated: cst.IndentedBlock
    ) -> cst.BaseSuite:
        return updated.with_changes(body=self._body(original.body, updated.body))

    def _way(self, path: StatementPath) -> list[cst.CSTNode]:
        """The statements on the way to a path, the one that it names last."""
        way: list[cst.CSTNode] = []
        node: cst.CSTNode = self.module
        for block, index in path:
            found = _statements(node, block)
            if index >= len(found):
                raise Refusal("LibCST reads the file otherwise than Python does", self.where)
            if isinstance(getattr(node, "body", None), cst.SimpleStatementSuite):
                code = self.module.code_for_node(node).strip()
                raise Refusal(f"a block on one line: {code}", self.where)
            node = found[index]
            way.append(node)
        line = way[-1]
        if isinstance(line, cst.SimpleStatementLine) and len(line.body) > 1:
            raise Refusal(
                f"two statements on one line: {self.module.code_for_node(line).strip()}", self.where
            )
        return way

    def _body(
        self, original: Sequence[cst.CSTNode], updated: Sequence[cst.CSTNode]
    ) -> list[cst.CSTNode]:
        body: list[cst.CSTNode] = []
        place: Sequence[cst.EmptyLine] | None = None
        for old, new in zip(original, updated, strict=True):
            assert isinstance(new, Statement)
            if place is not None:
                new = new.with_changes(leading_lines=place)
                place = None
            if any(isinstance(edit, Remove) for edit in self.edits.get(old, ())):
                del self.edits[old]
                place = new.leading_lines
                continue
            before: list[cst.CSTNode] = []
            behind: list[cst.CSTNode] = []
            here: list[cst.CSTNode] = [new]
            for edit in self.edits.pop(old, ()):
                if isinstance(edit, Insert):
                    (behind if edit.behind else before).extend(self.new[edit.code])
                else:
                    here = self._change(edit, here, old)
            body += [*before, *here, *behind]
        return body

    def _change(self, edit: Edit, here: list[cst.CSTNode], old: cst.CSTNode) -> list[cst.CSTNode]:
        node = here[0]
        if isinstance(edit, Replace):
            assert isinstance(old, Statement)
            new = self.new[edit.code]
            first = new[0]
            assert isinstance(first, Statement)
            leading = [*old.leading_lines, *first.leading_lines]
            return [first.with_changes(leading_lines=leading), *new[1:]]
        if isinstance(edit, AddArguments | ReplaceArgument):
            changer = _CallChanger(self.module, edit)
            changed = node.visit(changer)
            assert isinstance(changed, cst.CSTNode)
            if changer.found != 1:
                raise Refusal(
                    f"expected one call of {edit.callee}, found {changer.found}", self.where
                )
            return [changed, *here[1:]]
        if isinstance(edit, SetLoop) and isinstance(node, cst.For):
            node = node.with_changes(iter=cst.parse_expression(edit.iterable))
            if edit.target is not None:
                node = node.with_changes(target=cst.parse_expression(edit.target))
            return [node, *here[1:]]
        if isinstance(edit, AddBase) and isinstance(node, cst.ClassDef):
            return [self._with_base(node, edit.base), *here[1:]]
        raise Refusal(f"{type(edit).__name__} does not fit {type(node).__name__}", self.where)

    def _parse_all(self, edits: Iterable[Edit]) -> dict[str, list[cst.CSTNode]]:
        """The statements of all new code, from one parse."""
        codes = {e.code: self.depth[self._way(e.path)[-1]] for e in edits if isinstance(e, NewCode)}
        blocks = []
        for code, depth in codes.items():
            fitted = style.wrap_as_yapf(code, depth) if self.aligned else code
            # the first line keeps blank lines above new code from becoming the module's header
            blocks.append(f"pass\n{fitted}")
        text = "".join(blocks).replace("\n", self.module.default_newline)
        parsed = cst.parse_module(text, self.module.config_for_parsing)
        parsed = parsed.visit(_BareBlankLines())
        found: dict[str, list[cst.CSTNode]] = {}
        rest = list(parsed.body)
        for code in codes:
            count = len(ast.parse(code).body)
            found[code] = list(rest[1 : count + 1])
            rest = rest[count + 1 :]
        return found

    def _with_base(self, node: cst.ClassDef, base: str) -> cst.ClassDef:
        if any("#" in self.module.code_for_node(argument) for argument in node.bases):
            raise Refusal(f"comments among the bases of {node.name.value}", self.where)
        bases = [self._code(a.value) for a in node.bases] + [base]
        head = f"class {node.name.value}("
        flat = f"{head}{', '.join(bases)}):"
        text = style.fill(head, bases, "):") if self.aligned else flat
        parsed = cst.parse_statement(f"{text}\n    pass", self.module.config_for_parsing)
        assert isinstance(parsed, cst.ClassDef)
        return node.with_changes(
            bases=parsed.bases,
            lpar=parsed.lpar,
            rpar=parsed.rpar,
            whitespace_after_name=parsed.whitespace_after_name,
        )

    def _code(self, node: cst.CSTNode) -> str:
        return re.sub(r"\s*\n\s*", " ", self.module.code_for_node(node)).strip()


class _BareBlankLines(cst.CSTTransformer):
    """Blank lines between statements without the indentation of the place where they go.

    Those in the blocks of the new statements have none, in a template as in what is parsed.
    """

    def on_visit(self, node: cst.CSTNode) -> bool:
        return not isinstance(node, cst.BaseExpression | cst.BaseSmallStatement | cst.IndentedBlock)

    def leave_EmptyLine(self, original: cst.EmptyLine, updated: cst.EmptyLine) -> cst.EmptyLine:
        return updated if updated.comment else updated.with_changes(indent=False)


class _CallChanger(cst.CSTTransformer):
    """Changes the arguments of one call in a statement, not of calls in the blocks below it."""

    def __init__(self, module: cst.Module, edit: AddArguments | ReplaceArgument) -> None:
        super().__init__()
        self.module = module
        self.edit = edit
        self.found = 0

    def visit_IndentedBlock(self, node: cst.IndentedBlock) -> bool:
        return False

    def leave_Call(self, original: cst.Call, updated: cst.Call) -> cst.Call:
        if self.module.code_for_node(original.func) != self.edit.callee or not original.args:
            return updated
        if isinstance(self.edit, AddArguments):
            self.found += 1
            return updated.with_changes(args=_with_arguments(updated.args, self.edit.arguments))
        args = [
            arg.with_changes(value=cst.Name(self.edit.new))
            if isinstance(arg.value, cst.Name) and arg.value.value == self.edit.old
            else arg
            for arg in updated.args
        ]
        self.found += args != list(updated.args)
        return updated.with_changes(args=args)


def _with_arguments(present: Sequence[cst.Arg], wanted: Iterable[tuple[str, str]]) -> list[cst.Arg]:
    args = list(present)
    none = cst.SimpleWhitespace("")
    for name, value in wanted:
        last = args[-1]
        # a new argument stands as the one before the last did: on its own line, or not
        between = args[-2].comma if len(args) > 1 else cst.MaybeSentinel.DEFAULT
        if not isinstance(between, cst.Comma):
            between = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
        space = between.whitespace_after
        if isinstance(space, cst.ParenthesizedWhitespace):
            # a comment there speaks of the argument that it stands behind
            line = space.first_line.with_changes(comment=None, whitespace=none)
            between = between.with_changes(whitespace_after=space.with_changes(first_line=line))
        args[-1] = last.with_changes(comma=between, whitespace_after_arg=none)
        args.append(
            cst.Arg(
                value=cst.parse_expression(value),
                keyword=cst.Name(name),
                equal=cst.AssignEqual(whitespace_before=none, whitespace_after=none),
                comma=last.comma,
                whitespace_after_arg=last.whitespace_after_arg,
            )
        )
    return args


def _statements(node: cst.CSTNode, block: str) -> list[cst.CSTNode]:
    """The statements of a block as `ast` counts them: each of a line `a; b` on its own."""
    found: list[cst.CSTNode] = []
    if isinstance(node, cst.Module):
        suite: object = node
    elif block == "handlers":
        return list(getattr(node, "handlers", ()))
    elif block == "body":
        suite = getattr(node, "body", None)
    else:
        suite = getattr(node, block, None)
        if isinstance(suite, cst.If):
            return [suite]  # elif
        suite = getattr(suite, "body", None)
    for line in getattr(suite, "body", ()):
        found += [line] * (len(line.body) if isinstance(line, cst.SimpleStatementLine) else 1)
    return found
