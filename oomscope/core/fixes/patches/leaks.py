"""Detaches a loss where it is kept: in a list, a sum, a dictionary."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m
from libcst import metadata

from oomscope.core.fixes.patches.facts import ScriptFacts, facts_of
from oomscope.core.fixes.patches.text import Patched, parse
from oomscope.errors import PatchDoesNotApply

_KEEPERS = ("append", "appendleft", "add", "put")


class _Detach(cst.CSTTransformer):
    METADATA_DEPENDENCIES = (metadata.PositionProvider,)

    def __init__(self, facts: ScriptFacts, line: int | None) -> None:
        super().__init__()
        self.facts = facts
        self.line = line
        self.changes: list[str] = []

    def _wanted(self, node: cst.CSTNode, what: str) -> bool:
        position = self.get_metadata(metadata.PositionProvider, node)
        start, end = position.start.line, position.end.line
        if self.line is not None and not start <= self.line <= end:
            return False
        self.changes.append(f"line {start}: {what}")
        return True

    def _is_loss(self, node: cst.CSTNode) -> bool:
        return isinstance(node, cst.Name) and node.value in self.facts.losses

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        function = updated_node.func
        if (
            isinstance(function, cst.Attribute)
            and function.attr.value in _KEEPERS
            and not self._is_loss(function.value)
            and len(updated_node.args) == 1
            and self._is_loss(updated_node.args[0].value)
            and self._wanted(original_node, f"{function.attr.value}() keeps a tensor with its graph")
        ):
            arg = updated_node.args[0]
            return updated_node.with_changes(args=[arg.with_changes(value=_detached(arg.value))])
        return updated_node

    def leave_AugAssign(self, original_node: cst.AugAssign, updated_node: cst.AugAssign) -> cst.AugAssign:  # noqa: N802
        if (
            isinstance(updated_node.operator, cst.AddAssign)
            and self._is_loss(updated_node.value)
            and not self._is_loss(updated_node.target)
            and self._wanted(original_node, "+= keeps the graph of every term")
        ):
            return updated_node.with_changes(value=_detached(updated_node.value))
        return updated_node

    def leave_Assign(self, original_node: cst.Assign, updated_node: cst.Assign) -> cst.Assign:  # noqa: N802
        if len(updated_node.targets) != 1:
            return updated_node
        target, value = updated_node.targets[0].target, updated_node.value
        if isinstance(target, cst.Subscript) and self._is_loss(value):
            if self._wanted(original_node, "the slot keeps a tensor with its graph"):
                return updated_node.with_changes(value=_detached(value))
        elif (
            isinstance(target, cst.Name)
            and not self._is_loss(target)
            and m.matches(value, m.BinaryOperation(left=m.Name(target.value), operator=m.Add()))
            and isinstance(value, cst.BinaryOperation)
            and self._is_loss(value.right)
            and self._wanted(original_node, "the sum keeps the graph of every term")
        ):
            return updated_node.with_changes(value=value.with_changes(right=_detached(value.right)))
        return updated_node


def _detached(node: cst.BaseExpression) -> cst.Call:
    return cst.Call(cst.Attribute(node, cst.Name("detach")))


def detach(source: str, options: Mapping[str, Any]) -> Patched:
    """Insert `.detach()` where a loss is kept.

    Args:
        source: the script.
        options: `line`: change only the statement on this line.

    Raises:
        PatchDoesNotApply: no loss is kept there in a form that is understood.
    """
    module = parse(source)
    wrapper = metadata.MetadataWrapper(module)
    line = options.get("line")
    transform = _Detach(facts_of(module), int(line) if line is not None else None)
    changed = wrapper.visit(transform)
    if not transform.changes:
        where = f" on line {line}" if line is not None else ""
        raise PatchDoesNotApply(
            f"no list, sum or dictionary keeps a loss{where} in a form that this patch understands"
        )
    return Patched(changed.code, tuple(transform.changes))
