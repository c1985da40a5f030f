"""Checkpoints the blocks in the loop of a model's forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.text import Patched, add_import, parse, target_names
from oomscope.errors import PatchDoesNotApply


class _CallOfBlock(cst.CSTTransformer):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.count = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not (isinstance(updated_node.func, cst.Name) and updated_node.func.value == self.name):
            return updated_node
        self.count += 1
        args = [cst.Arg(updated_node.func, comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))]
        args += updated_node.args
        last = args[-1].with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        flag = cst.Arg(
            cst.Name("False"),
            keyword=cst.Name("use_reentrant"),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
        )
        return updated_node.with_changes(func=cst.Name("checkpoint"), args=[*args[:-1], last, flag])


class _Loops(cst.CSTTransformer):
    def __init__(self, containers: frozenset[str]) -> None:
        super().__init__()
        self.containers = containers
        self.changes: list[str] = []

    def leave_For(self, original_node: cst.For, updated_node: cst.For) -> cst.For:  # noqa: N802
        iterated = updated_node.iter
        if m.matches(iterated, m.Call(func=m.Name("enumerate"))) and isinstance(iterated, cst.Call):
            iterated = iterated.args[0].value
        if not (isinstance(iterated, cst.Attribute) and m.matches(iterated.value, m.Name("self"))):
            return updated_node
        container = iterated.attr.value
        names = target_names(updated_node.target)
        if not names or (self.containers and container not in self.containers):
            return updated_node
        inner = _CallOfBlock(names[-1])
        body = updated_node.body.visit(inner)
        if inner.count and isinstance(body, cst.BaseSuite):
            self.changes.append(f"each block of self.{container} is checkpointed")
            return updated_node.with_changes(body=body)
        return updated_node


def checkpoint(source: str, options: Mapping[str, Any]) -> Patched:
    """`checkpoint(block, x, use_reentrant=False)` in place of `block(x)` in loops over `self.<container>`.

    Args:
        source: the module with the model's class.
        options: `containers`: names of the attributes that hold the blocks (default: any).

    Raises:
        PatchDoesNotApply: it is there already, or there is no such loop.
    """
    if "checkpoint(" in source and "use_reentrant" in source:
        raise PatchDoesNotApply("the file calls torch.utils.checkpoint already")
    module = parse(source)
    transform = _Loops(frozenset(str(each) for each in options.get("containers") or ()))
    changed = module.visit(transform)
    if not transform.changes:
        raise PatchDoesNotApply("no loop `for block in self.<blocks>` that calls the block in this file")
    notes: tuple[str, ...] = ()
    if "BatchNorm" in source:
        notes = (
            "BatchNorm layers count a recomputed batch twice: set momentum to 1 − sqrt(1 − momentum) in these blocks",
        )
    return Patched(
        add_import(changed, "torch.utils.checkpoint", "checkpoint").code, tuple(transform.changes), notes
    )
