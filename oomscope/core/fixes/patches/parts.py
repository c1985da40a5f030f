"""Runs a model, or a large output layer with its loss, in parts that are computed again in backward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.facts import ScriptFacts, facts_of
from oomscope.core.fixes.patches.precision import forward_region
from oomscope.core.fixes.patches.text import (
    Patched,
    add_import,
    add_to_imports,
    code_of,
    dotted,
    free_name,
    keyword,
    last_name,
    parse,
)
from oomscope.errors import PatchDoesNotApply

_CHECKPOINT = "torch.utils.checkpoint"

#: What makes a part of a batch compute something else than the whole, or run at another time: word -> reason.
_WHOLE_BATCH = {
    "BatchNorm": "BatchNorm needs the statistics of the whole batch",
    "DistributedDataParallel": "DistributedDataParallel expects one forward for each backward",
    "fully_shard": "FSDP frees gathered parameters between calls only",
    "FullyShardedDataParallel": "FSDP frees gathered parameters between calls only",
    "torch.compile": "the model is compiled for the whole batch",
}


class _InParts(cst.CSTTransformer):
    """Replaces `model(batch)` before a `backward()`."""

    def __init__(self, facts: ScriptFacts, count: int, name: str) -> None:
        super().__init__()
        self.facts, self.count = facts, count
        self.name = name
        """Of the joined parts, where they need one."""
        self.changes: list[str] = []

    def leave_IndentedBlock(  # noqa: N802
        self, original_node: cst.IndentedBlock, updated_node: cst.IndentedBlock
    ) -> cst.IndentedBlock:
        region = forward_region(updated_node.body, self.facts)
        if region is None:
            return updated_node
        body: list[cst.BaseStatement] = []
        for place, statement in enumerate(updated_node.body):
            call = self._call_in(statement) if place in range(*region) else None
            body += [statement] if call is None else self._in_parts(statement, call)
        return updated_node.with_changes(body=body)

    def _in_parts(self, statement: cst.BaseStatement, call: cst.Call) -> list[cst.BaseStatement]:
        """The statement with the parts in place of `call`; on a line of their own when it stands in an expression."""
        model, batch = code_of(call.func), code_of(call.args[0].value)
        self.changes.append(f"{model}({batch}) runs in {self.count} parts")
        parts = f"torch.cat([checkpoint({model}, part, use_reentrant=False) for part in {batch}.chunk({self.count})])"
        assigned = m.findall(statement, m.Assign())
        if any(cst.ensure_type(each, cst.Assign).value is call for each in assigned):
            made = statement.deep_replace(call, cst.parse_expression(parts))
            return [cst.ensure_type(made, cst.SimpleStatementLine)]
        first = cst.ensure_type(cst.parse_statement(f"{self.name} = {parts}"), cst.SimpleStatementLine)
        rest = cst.ensure_type(statement.deep_replace(call, cst.Name(self.name)), cst.SimpleStatementLine)
        return [first.with_changes(leading_lines=rest.leading_lines), rest.with_changes(leading_lines=[])]

    def _call_in(self, statement: cst.CSTNode) -> cst.Call | None:
        """The model's call in a simple statement, when it takes one variable and its result is one tensor."""
        if not isinstance(statement, cst.SimpleStatementLine):
            return None
        if m.findall(statement, m.AssignTarget(target=m.Tuple() | m.List())):
            return None
        form = m.Call(func=m.Name(), args=[m.Arg(value=m.Name(), keyword=None, star="")])
        calls = [cst.ensure_type(found, cst.Call) for found in m.findall(statement, form)]
        return next((call for call in calls if dotted(call.func) in self.facts.models), None)


def in_parts(source: str, options: Mapping[str, Any]) -> Patched:
    """`torch.cat([checkpoint(model, part, …) for part in batch.chunk(4)])` in place of `model(batch)`.

    The loss still sees the whole batch, so this is exact for every loss, which accumulation is not.

    Args:
        source: the script.
        options: `chunks` (default 4).

    Raises:
        PatchDoesNotApply: the model needs the whole batch, or is not called with one variable before a backward().
    """
    for word, reason in _WHOLE_BATCH.items():
        if word in source:
            raise PatchDoesNotApply(reason)
    if "checkpoint(" in source and "use_reentrant" in source:
        raise PatchDoesNotApply("the file calls torch.utils.checkpoint already")
    module = parse(source)
    transform = _InParts(facts_of(module), int(options.get("chunks", 4)), free_name(module, "outputs"))
    changed = module.visit(transform)
    if not transform.changes:
        raise PatchDoesNotApply(
            "no `output = model(batch)` before `loss.backward()` in a form that is understood"
        )
    code = add_import(add_import(changed, _CHECKPOINT, "checkpoint"), "torch").code
    return Patched(
        code, tuple(transform.changes), ("the model must return one tensor with a row for each sample",)
    )


_HELPER = '''
def _head_cross_entropy(hidden, head, target, ignore_index=-100):
    """Cross entropy of `head(hidden)`, some rows at a time: their logits are computed again in backward."""

    def summed(part, labels):
        return torch.nn.functional.cross_entropy(
            head(part), labels, ignore_index=ignore_index, reduction="sum"
        )

    rows = max(128, hidden.shape[0] * hidden.shape[1] // head.out_features)
    parts = zip(hidden.split(rows), target.split(rows))
    total = sum(checkpoint(summed, part, labels, use_reentrant=False) for part, labels in parts)
    return total / (target != ignore_index).sum()
'''


class _FusedHead(cst.CSTTransformer):
    """In one function: `logits = self.head(hidden)` and the only use of it, a cross entropy."""

    def __init__(self, layers: frozenset[str], hidden: str) -> None:
        super().__init__()
        self.layers, self.hidden = layers, hidden
        self.changes: list[str] = []
        self.reasons: list[str] = []

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        for assign in m.findall(updated_node.body, m.Assign(value=m.Call(args=[m.Arg(keyword=None)]))):
            made = self._fused(updated_node, cst.ensure_type(assign, cst.Assign))
            if made is not None:
                return made
        return updated_node

    def _fused(self, function: cst.FunctionDef, assign: cst.Assign) -> cst.FunctionDef | None:
        layer = cst.ensure_type(assign.value, cst.Call)
        target = assign.targets[0].target
        if (
            len(assign.targets) != 1
            or not isinstance(target, cst.Name)
            or dotted(layer.func) not in self.layers
        ):
            return None
        logits = target.value
        calls = [
            cst.ensure_type(found, cst.Call)
            for found in m.findall(function.body, m.Call())
            if last_name(cst.ensure_type(found, cst.Call).func) == "cross_entropy"
        ]
        for call in calls:
            rows = _rows(call.args[0].value, logits, self.hidden) if _is_plain(call) else None
            if rows is None:
                continue
            uses = len(m.findall(function.body, m.Name(logits)))
            if uses != 1 + len(m.findall(call, m.Name(logits))):
                self.reasons.append(f"{logits} is used for more than the loss in {function.name.value}()")
                return None
            ignored = keyword(call, "ignore_index")
            extra = f", ignore_index={code_of(ignored.value)}" if ignored else ""
            fused = cst.parse_expression(
                f"_head_cross_entropy({code_of(rows)}, {dotted(layer.func)}, {code_of(call.args[1].value)}{extra})"
            )
            hidden = assign.with_changes(
                targets=[assign.targets[0].with_changes(target=cst.Name(self.hidden))],
                value=layer.args[0].value,
            )
            self.changes.append(f"{dotted(layer.func)} and its cross entropy run some rows at a time")
            return cst.ensure_type(function.visit(_Replace({call: fused, assign: hidden})), cst.FunctionDef)
        return None


class _Replace(cst.CSTTransformer):
    """Puts other nodes in the place of some, which are found by identity."""

    def __init__(self, new: Mapping[cst.CSTNode, cst.CSTNode]) -> None:
        super().__init__()
        self.new = new

    def on_leave(self, original_node: cst.CSTNodeT, updated_node: cst.CSTNodeT) -> Any:
        return self.new.get(original_node) or super().on_leave(original_node, updated_node)


def _is_plain(call: cst.Call) -> bool:
    """Whether the cross entropy is a mean over rows, without weights and smoothing."""
    names = [arg.keyword.value if arg.keyword else None for arg in call.args]
    return len(names) >= 2 and names[:2] == [None, None] and set(names[2:]) <= {"ignore_index"}


def _rows(node: cst.BaseExpression, logits: str, hidden: str) -> cst.BaseExpression | None:
    """The expression `node` of the logits, for the hidden states in their place; None when it is not row-wise."""
    if m.matches(node, m.Name(logits)):
        return cst.Name(hidden)
    if isinstance(node, cst.Subscript) and not _touches_classes(node):
        inner = _rows(node.value, logits, hidden)
        return node.with_changes(value=inner) if inner is not None else None
    if not (isinstance(node, cst.Call) and isinstance(node.func, cst.Attribute)):
        return None
    inner = _rows(node.func.value, logits, hidden)
    name, words = node.func.attr.value, [code_of(arg.value) for arg in node.args]
    if inner is None:
        return None
    if name in ("float", "contiguous") and not words:
        return inner
    if (name == "flatten" and words == ["0", "1"]) or (
        name in ("view", "reshape") and len(words) == 2 and words[0] == "-1"
    ):
        return cst.Call(cst.Attribute(inner, cst.Name("flatten")), [*_numbers("0, -2")])
    return None


def _numbers(text: str) -> list[cst.Arg]:
    return list(cst.ensure_type(cst.parse_expression(f"f({text})"), cst.Call).args)


def _touches_classes(node: cst.Subscript) -> bool:
    """Whether an index could choose among the classes, the last dimension."""
    parts = [code_of(each.slice) for each in node.slice]
    if "..." in parts:
        return parts[-1] != ":"
    return len(parts) > 2


def fused_head(source: str, options: Mapping[str, Any]) -> Patched:
    """The output layer and its cross entropy over rows of the hidden states, in a function added to the file.

    Raises:
        PatchDoesNotApply: they do not stand in one function, or the logits are used for more than the loss.
    """
    if "_head_cross_entropy" in source:
        raise PatchDoesNotApply("the output layer and its loss run in parts already")
    module = parse(source)
    layers = frozenset(
        dotted(cst.ensure_type(found, cst.Assign).targets[0].target)
        for found in m.findall(module, m.Assign(value=m.Call()))
        if last_name(cst.ensure_type(cst.ensure_type(found, cst.Assign).value, cst.Call).func) == "Linear"
    )
    transform = _FusedHead(layers, free_name(module, "hidden"))
    changed = module.visit(transform)
    if not transform.changes:
        reason = "no function has both the output layer (logits = self.head(hidden)) and its cross entropy"
        raise PatchDoesNotApply(f"{(transform.reasons or [reason])[0]}: keep fused-ce in a plan file")
    changed = add_import(add_to_imports(changed, _HELPER), _CHECKPOINT, "checkpoint")
    return Patched(add_import(changed, "torch").code, tuple(transform.changes))
