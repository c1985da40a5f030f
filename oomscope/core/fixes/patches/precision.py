"""Wraps the forward pass and the loss of a training step in bfloat16 autocast."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.facts import ScriptFacts, backward_of, facts_of
from oomscope.core.fixes.patches.text import Patched, add_import, calls_in, names_used, parse, target_names
from oomscope.errors import PatchDoesNotApply

_MOVES = m.Call(func=m.Attribute(attr=m.OneOf(m.Name("to"), m.Name("cuda"))))


def forward_region(body: Sequence[cst.CSTNode], facts: ScriptFacts) -> tuple[int, int] | None:
    """Where the forward pass starts and where it ends (exclusive) in the body of a loop or function.

    Walks back from `backward()` over the assignments that the loss depends on; stops where data is moved to the device.
    """
    end = next((index for index, each in enumerate(body) if backward_of(each) is not None), None)
    if end is None:
        return None
    loss = backward_of(body[end])
    needed = names_used(loss) if loss is not None else set()
    first, last = end, -1
    for index in range(end - 1, -1, -1):
        bound = _bound_names(body[index])
        if not bound & needed:
            continue
        calls = calls_in(body[index])
        runs_model = any(
            isinstance(call.func, cst.Name) and call.func.value in facts.models for call in calls
        )
        if not runs_model and (
            any(m.matches(call, _MOVES) for call in calls) or not _computes(body[index], needed)
        ):
            break
        needed |= names_used(body[index])
        first, last = index, max(last, index)
        if runs_model:
            break
    return (first, last + 1) if last >= first else None


def _bound_names(statement: cst.CSTNode) -> set[str]:
    names: set[str] = set()
    for found in m.findall(statement, m.Assign() | m.AugAssign() | m.AnnAssign()):
        if isinstance(found, cst.Assign):
            names |= {name for target in found.targets for name in target_names(target.target)}
        elif isinstance(found, (cst.AugAssign, cst.AnnAssign)):
            names |= set(target_names(found.target))
    return names


def _computes(statement: cst.CSTNode, needed: set[str]) -> bool:
    return bool(calls_in(statement)) or bool(names_used(statement) & needed)


class _Autocast(cst.CSTTransformer):
    def __init__(self, facts: ScriptFacts, device: str | None, dtype: str) -> None:
        super().__init__()
        self.facts, self.device, self.dtype = facts, device, dtype
        self.count = 0

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        body = list(updated_node.body)
        region = forward_region(body, self.facts)
        if region is None:
            return updated_node
        first, end = region
        if not any(
            isinstance(c.func, cst.Name) and c.func.value in self.facts.models
            for s in body[first:end]
            for c in calls_in(s)
        ):
            return updated_node
        self.count += 1
        inside = body[first:end]
        head = inside[0]
        leading = getattr(head, "leading_lines", ())
        inside[0] = head.with_changes(leading_lines=())
        item = cst.WithItem(
            cst.parse_expression(f"torch.autocast({self._device(body[first:end])}, dtype=torch.{self.dtype})")
        )
        block = cst.With(items=[item], body=cst.IndentedBlock(body=inside), leading_lines=leading)
        return updated_node.with_changes(body=[*body[:first], block, *body[end:]])

    def _device(self, statements: Sequence[cst.CSTNode]) -> str:
        """The device as an expression: that of the model's first argument, so that it follows the script."""
        if self.device:
            return f'"{self.device}"'
        for statement in statements:
            for call in calls_in(statement):
                if isinstance(call.func, cst.Name) and call.func.value in self.facts.models and call.args:
                    value = call.args[0].value
                    if isinstance(value, cst.Name):
                        return f"{value.value}.device.type"
        return '"cuda"'


def autocast(source: str, options: Mapping[str, Any]) -> Patched:
    """`with torch.autocast(…)` around the statements from the model's call to the loss.

    Args:
        source: the script.
        options: `device` (default: the device of the model's input), `dtype` (default "bfloat16").

    Raises:
        PatchDoesNotApply: autocast is there already, or the training step is in no form that is understood.
    """
    if "autocast(" in source:
        raise PatchDoesNotApply("autocast is active already in this file")
    module = parse(source)
    transform = _Autocast(facts_of(module), options.get("device"), str(options.get("dtype", "bfloat16")))
    changed = module.visit(transform)
    if not transform.count:
        raise PatchDoesNotApply(
            "no statements `output = model(…)` to `loss.backward()` in a form that is understood"
        )
    return Patched(
        add_import(changed, "torch").code, (f"{transform.count} training step runs under autocast",)
    )
