"""Replaces DistributedDataParallel by FSDP2, and an optimizer by its ZeRO-1 form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst

from oomscope.core.fixes.patches.text import Patched, add_import, code_of, dotted, parse
from oomscope.errors import PatchDoesNotApply

_DDP = ("DistributedDataParallel", "DDP")
_SAVE_NOTE = (
    "saving becomes collective: every rank calls get_model_state_dict(model, options=StateDictOptions("
    "full_state_dict=True, cpu_offload=True)) of torch.distributed.checkpoint.state_dict, rank 0 writes it"
)
_SYNC_NOTE = "model.no_sync() becomes model.set_requires_gradient_sync(False) … (True)"
_CONSOLIDATE_NOTE = "before optimizer.state_dict() every rank calls optimizer.consolidate_state_dict()"


class _FullyShard(cst.CSTTransformer):
    def __init__(self, containers: tuple[str, ...]) -> None:
        super().__init__()
        self.containers = containers
        self.wrapped: set[str] = set()

    def leave_SimpleStatementLine(  # noqa: N802
        self, original_node: cst.SimpleStatementLine, updated_node: cst.SimpleStatementLine
    ) -> cst.SimpleStatementLine | cst.FlattenSentinel[cst.BaseStatement]:
        if len(updated_node.body) != 1 or not isinstance(updated_node.body[0], cst.Assign):
            return updated_node
        assign = updated_node.body[0]
        call = assign.value
        if (
            not isinstance(call, cst.Call)
            or dotted(call.func).rpartition(".")[2] not in _DDP
            or not call.args
        ):
            return updated_node
        target, model = code_of(assign.targets[0].target), code_of(call.args[0].value)
        lines: list[cst.BaseStatement] = [
            cst.ensure_type(
                cst.parse_statement(f"for block in {model}.{container}:\n    fully_shard(block)\n"), cst.For
            )
            for container in self.containers
        ]
        lines.append(
            cst.ensure_type(cst.parse_statement(f"{target} = fully_shard({model})"), cst.SimpleStatementLine)
        )
        lines[0] = lines[0].with_changes(leading_lines=updated_node.leading_lines)
        self.wrapped.add(target)
        return cst.FlattenSentinel(lines)

    def leave_Attribute(  # noqa: N802
        self, original_node: cst.Attribute, updated_node: cst.Attribute
    ) -> cst.BaseExpression:
        if updated_node.attr.value == "module" and code_of(updated_node.value) in self.wrapped:
            return updated_node.value
        return updated_node


def fsdp2(source: str, options: Mapping[str, Any]) -> Patched:
    """`fully_shard` of each block and the root in place of `DDP(model)`.

    Args:
        source: the script.
        options: `containers`: dotted paths of the containers of blocks in the model (default "blocks").

    Raises:
        PatchDoesNotApply: no assignment `x = DDP(model)`.
    """
    containers = tuple(str(each) for each in options.get("containers") or ("blocks",))
    transform = _FullyShard(containers)
    changed = parse(source).visit(transform)
    if not transform.wrapped:
        raise PatchDoesNotApply("no statement `model = DistributedDataParallel(model, …)` in this file")
    code = add_import(changed, "torch.distributed.fsdp", "fully_shard").code
    notes = tuple(
        note for word, note in (("state_dict()", _SAVE_NOTE), ("no_sync", _SYNC_NOTE)) if word in code
    )
    return Patched(code, ("DistributedDataParallel becomes fully_shard",), notes)


class _ZeroOptimizer(cst.CSTTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        full = dotted(updated_node.func)
        if not full.startswith(("torch.optim.", "optim.")) or not full.rpartition(".")[2][:1].isupper():
            return updated_node
        positional = [arg for arg in updated_node.args if arg.keyword is None]
        if len(positional) != 1:
            return updated_node
        self.count += 1
        first, *rest = updated_node.args
        chosen = cst.Arg(
            updated_node.func,
            keyword=cst.Name("optimizer_class"),
            equal=cst.AssignEqual(cst.SimpleWhitespace(""), cst.SimpleWhitespace("")),
            comma=first.comma if rest else cst.MaybeSentinel.DEFAULT,
        )
        first = first.with_changes(comma=cst.Comma(whitespace_after=cst.SimpleWhitespace(" ")))
        return updated_node.with_changes(
            func=cst.Name("ZeroRedundancyOptimizer"), args=[first, chosen, *rest]
        )


def zero1(source: str, options: Mapping[str, Any]) -> Patched:
    """`ZeroRedundancyOptimizer(parameters, optimizer_class=…)` in place of the optimizer.

    Raises:
        PatchDoesNotApply: no optimizer of torch.optim is made with keyword arguments only.
    """
    transform = _ZeroOptimizer()
    changed = parse(source).visit(transform)
    if not transform.count:
        raise PatchDoesNotApply("no call torch.optim.X(parameters, name=value, …) in this file")
    code = add_import(changed, "torch.distributed.optim", "ZeroRedundancyOptimizer").code
    notes = (_CONSOLIDATE_NOTE,) if "state_dict()" in code else ()
    return Patched(code, ("the optimizer state is spread over the ranks",), notes)
