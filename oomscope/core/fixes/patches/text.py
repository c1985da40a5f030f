"""What every patch needs: parsing, imports, small questions about nodes, and a unified diff."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from itertools import count

import libcst as cst
import libcst.matchers as m
from libcst.codemod import CodemodContext
from libcst.codemod.visitors import AddImportsVisitor

from oomscope.errors import PatchDoesNotApply


@dataclass(frozen=True, slots=True)
class Patched:
    """A changed module."""

    code: str
    changes: tuple[str, ...]
    """One sentence for each change, with its line."""
    notes: tuple[str, ...] = ()
    """What the person has to change besides."""


def parse(source: str) -> cst.Module:
    """The module.

    Raises:
        PatchDoesNotApply: not valid Python.
    """
    try:
        return cst.parse_module(source)
    except cst.ParserSyntaxError as error:
        raise PatchDoesNotApply(
            f"line {error.raw_line}: the file is not valid Python for this patch"
        ) from error


def add_import(module: cst.Module, name: str, item: str | None = None) -> cst.Module:
    """`import name` or `from name import item`, once, where the imports are."""
    context = CodemodContext()
    AddImportsVisitor.add_needed_import(context, name, item)
    return AddImportsVisitor(context).transform_module(module)


def add_to_imports(module: cst.Module, code: str) -> cst.Module:
    """`code` (functions) after the last import at the top of the module, two blank lines around it."""
    body = list(module.body)
    last = max((place for place, each in enumerate(body) if _is_import(each)), default=-1)
    if last < 0 and body and m.matches(body[0], m.SimpleStatementLine([m.Expr(m.SimpleString())])):
        last = 0
    added = [
        each.with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2)
        for each in cst.parse_module(code, module.config_for_parsing).body
    ]
    rest = body[last + 1 :]
    if rest and hasattr(rest[0], "leading_lines"):
        comments = [line for line in rest[0].leading_lines if line.comment is not None]
        rest[0] = rest[0].with_changes(leading_lines=[cst.EmptyLine(indent=False)] * 2 + comments)
    return module.with_changes(body=[*body[: last + 1], *added, *rest])


def _is_import(statement: cst.CSTNode) -> bool:
    return m.matches(statement, m.SimpleStatementLine([m.Import() | m.ImportFrom()]))


def code_of(node: cst.CSTNode) -> str:
    return cst.Module([]).code_for_node(node)


def dotted(node: cst.BaseExpression) -> str:
    """`torch.optim.AdamW` of a name or attribute; empty for anything else."""
    if isinstance(node, cst.Name):
        return node.value
    if isinstance(node, cst.Attribute):
        before = dotted(node.value)
        return f"{before}.{node.attr.value}" if before else ""
    return ""


def last_name(node: cst.BaseExpression) -> str:
    return dotted(node).rpartition(".")[2]


def target_names(node: cst.CSTNode) -> list[str]:
    """Names that an assignment target or a loop target binds."""
    if isinstance(node, cst.Name):
        return [node.value]
    if isinstance(node, (cst.Tuple, cst.List)):
        return [name for element in node.elements for name in target_names(element.value)]
    return []


def names_used(node: cst.CSTNode) -> set[str]:
    return {found.value for found in m.findall(node, m.Name()) if isinstance(found, cst.Name)}


def free_name(node: cst.CSTNode, stem: str, taken: Collection[str] = ()) -> str:
    """`stem`, else `stem_2`, `stem_3` …: the first that neither `node` (the whole module) uses nor is in `taken`."""
    used = names_used(node).union(taken)
    names = (stem if number == 1 else f"{stem}_{number}" for number in count(1))
    return next(name for name in names if name not in used)


def calls_in(node: cst.CSTNode) -> list[cst.Call]:
    return [found for found in m.findall(node, m.Call()) if isinstance(found, cst.Call)]


def keyword(call: cst.Call, name: str) -> cst.Arg | None:
    return next((arg for arg in call.args if arg.keyword is not None and arg.keyword.value == name), None)


def with_keyword(call: cst.Call, name: str, value: str) -> cst.Call:
    """`call` with `name=value`, in the layout of its other arguments."""
    args = list(call.args)
    new = cst.Arg(
        cst.parse_expression(value),
        keyword=cst.Name(name),
        equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
    )
    for index, arg in enumerate(args):
        if arg.keyword is not None and arg.keyword.value == name:
            args[index] = arg.with_changes(value=new.value)
            return call.with_changes(args=args)
    plain = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    if args and isinstance(args[-1].comma, cst.Comma):
        # A trailing comma, perhaps one argument a line: the new one gets it, and the last one its neighbour's.
        before = args[-2].comma if len(args) > 1 and isinstance(args[-2].comma, cst.Comma) else plain
        new = new.with_changes(comma=args[-1].comma)
        args[-1] = args[-1].with_changes(comma=before)
    elif args:
        args[-1] = args[-1].with_changes(comma=plain)
    return call.with_changes(args=[*args, new])


def without_arguments(call: cst.Call, unwanted: Sequence[cst.Arg]) -> cst.Call:
    """`call` without some of its arguments, and without a comma at the end that was not there."""
    kept = [arg for arg in call.args if not any(arg is other for other in unwanted)]
    if kept and not isinstance(call.args[-1].comma, cst.Comma):
        kept[-1] = kept[-1].with_changes(comma=cst.MaybeSentinel.DEFAULT)
    return call.with_changes(args=kept)


def unified_diff(name: str, before: str, after: str) -> str:
    """A diff of one file that `git apply` takes; `name` is relative to where it will be applied, with slashes."""
    lines = difflib.unified_diff(
        before.splitlines(keepends=True), after.splitlines(keepends=True), f"a/{name}", f"b/{name}"
    )
    return "".join(
        line if line.endswith("\n") else f"{line}\n\\ No newline at end of file\n" for line in lines
    )
