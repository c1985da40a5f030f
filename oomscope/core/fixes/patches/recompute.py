"""Changes the loop over a model's blocks: checkpointed, wholly or in part, or with what they save in host memory."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.text import (
    Patched,
    add_import,
    add_to_imports,
    calls_in,
    free_name,
    names_used,
    parse,
    target_names,
    with_keyword,
)
from oomscope.errors import PatchDoesNotApply
from oomscope.protocol.recompute import KEPT_OPERATORS

_NAMES = "".join(f'        "{name}",\n' for name in KEPT_OPERATORS)
#: What a selective checkpoint keeps, as the run-time fix does.
_KEEP_PRODUCTS = f'''
def _keep_products():
    """Results of products and attention are kept; all else in a block is computed again in backward."""
    names = (
{_NAMES}    )
    kept = [getattr(torch.ops.aten, name).default for name in names if hasattr(torch.ops.aten, name)]
    return create_selective_checkpoint_contexts(kept)
'''
_CHECKPOINT = "torch.utils.checkpoint"


def _checkpointed(call: cst.Call, context: str | None) -> cst.Call:
    """`checkpoint(block, …, use_reentrant=False)` for the call `block(…)`."""
    separator = cst.Comma(whitespace_after=cst.SimpleWhitespace(" "))
    function = cst.Arg(call.func, comma=separator if call.args else cst.MaybeSentinel.DEFAULT)
    made = call.with_changes(func=cst.Name("checkpoint"), args=[function, *call.args])
    made = with_keyword(made, "use_reentrant", "False")
    return with_keyword(made, "context_fn", context) if context else made


class _CallOfBlock(cst.CSTTransformer):
    """Replaces calls of the name `block` by what `replace` makes of them."""

    def __init__(self, name: str, context: str | None) -> None:
        super().__init__()
        self.name, self.context = name, context
        self.count = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not m.matches(updated_node.func, m.Name(self.name)):
            return updated_node
        self.count += 1
        return _checkpointed(updated_node, self.context)


class _Loops(cst.CSTTransformer):
    """Finds the loops over the blocks; what becomes of one is up to `change`."""

    def __init__(self, containers: frozenset[str]) -> None:
        super().__init__()
        self.containers = containers
        self.changes: list[str] = []

    def change(self, loop: cst.For, block: str, container: str) -> cst.For | None:
        """The changed loop and a sentence in `changes`, or None when it does not call the block."""
        raise NotImplementedError

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
        return self.change(updated_node, names[-1], container) or updated_node


class _Checkpoint(_Loops):
    def __init__(self, containers: frozenset[str], context: str | None = None) -> None:
        super().__init__(containers)
        self.context = context

    def change(self, loop: cst.For, block: str, container: str) -> cst.For | None:
        inner = _CallOfBlock(block, self.context)
        body = loop.body.visit(inner)
        if not inner.count or not isinstance(body, cst.BaseSuite):
            return None
        kept = ", but products and attention are kept" if self.context else ""
        self.changes.append(f"each block of self.{container} is checkpointed{kept}")
        return loop.with_changes(body=body)


class _EverySecond(_Loops):
    def visit_Module(self, node: cst.Module) -> None:  # noqa: N802
        self.module = node

    def change(self, loop: cst.For, block: str, container: str) -> cst.For | None:
        statement = _only_call(loop, block)
        if statement is None:
            return None
        target = loop.target
        if m.matches(loop.iter, m.Call(func=m.Name("enumerate"))):
            names = target_names(target)
            if len(names) != 2 or len(cst.ensure_type(loop.iter, cst.Call).args) != 1:
                return None
            index = names[0]
        else:
            index = free_name(self.module, "index", names_used(loop))  # `loop` may hold a changed one
            loop = loop.with_changes(
                target=cst.Tuple([cst.Element(cst.Name(index)), cst.Element(target)], lpar=[], rpar=[]),
                iter=cst.Call(cst.Name("enumerate"), [cst.Arg(loop.iter)]),
            )
        call = cst.ensure_type(statement.value, cst.Call)
        choice = cst.IfExp(
            test=cst.parse_expression(f"{index} % 2 == 0"), body=_checkpointed(call, None), orelse=call
        )
        self.changes.append(f"every second block of self.{container} is checkpointed")
        return cst.ensure_type(loop.deep_replace(statement, statement.with_changes(value=choice)), cst.For)


class _Offload(_Loops):
    def change(self, loop: cst.For, block: str, container: str) -> cst.For | None:
        if not any(m.matches(call.func, m.Name(block)) for call in calls_in(loop.body)):
            return None
        if not isinstance(loop.body, cst.IndentedBlock):
            return None
        where = "torch.autograd.graph.save_on_cpu(pin_memory=torch.cuda.is_available())"
        inside = cst.With(
            items=[cst.WithItem(cst.parse_expression(where))], body=cst.IndentedBlock(body=loop.body.body)
        )
        self.changes.append(f"what the blocks of self.{container} save for backward goes to host memory")
        return loop.with_changes(body=loop.body.with_changes(body=[inside]))


def _only_call(loop: cst.For, block: str) -> cst.Assign | None:
    """The assignment `name = block(…)`, when nothing else in the loop calls the block."""
    calls = [call for call in calls_in(loop.body) if m.matches(call.func, m.Name(block))]
    found = m.findall(loop.body, m.Assign(value=m.Call(func=m.Name(block))))
    return cst.ensure_type(found[0], cst.Assign) if len(calls) == 1 and found else None


def _containers(options: Mapping[str, Any]) -> frozenset[str]:
    return frozenset(str(each) for each in options.get("containers") or ())


def _changed(source: str, transform: _Loops) -> cst.Module:
    """The module after `transform`.

    Raises:
        PatchDoesNotApply: the blocks are checkpointed or offloaded already, or there is no such loop.
    """
    if "checkpoint(" in source and "use_reentrant" in source:
        raise PatchDoesNotApply("the file calls torch.utils.checkpoint already")
    if "save_on_cpu" in source:
        raise PatchDoesNotApply("the file keeps what is saved for backward in host memory already")
    changed = parse(source).visit(transform)
    if not transform.changes:
        raise PatchDoesNotApply("no loop `for block in self.<blocks>` that calls the block in this file")
    return changed


def checkpoint(source: str, options: Mapping[str, Any]) -> Patched:
    """`checkpoint(block, x, use_reentrant=False)` in place of `block(x)` in loops over `self.<container>`.

    Args:
        source: the module with the model's class.
        options: `containers`: names of the attributes that hold the blocks (default: any).

    Raises:
        PatchDoesNotApply: it is there already, or there is no such loop.
    """
    transform = _Checkpoint(_containers(options))
    changed = add_import(_changed(source, transform), _CHECKPOINT, "checkpoint")
    return Patched(changed.code, tuple(transform.changes), _batch_norm_note(source))


def every_second(source: str, options: Mapping[str, Any]) -> Patched:
    """As `checkpoint`, for the first, third, fifth block … of each loop."""
    transform = _EverySecond(_containers(options))
    changed = add_import(_changed(source, transform), _CHECKPOINT, "checkpoint")
    return Patched(changed.code, tuple(transform.changes), _batch_norm_note(source))


def selective(source: str, options: Mapping[str, Any]) -> Patched:
    """As `checkpoint`, with a function beside it that keeps the results of products and attention."""
    transform = _Checkpoint(_containers(options), "_keep_products")
    changed = add_to_imports(_changed(source, transform), _KEEP_PRODUCTS)
    for name in ("create_selective_checkpoint_contexts", "checkpoint"):
        changed = add_import(changed, _CHECKPOINT, name)
    return Patched(add_import(changed, "torch").code, tuple(transform.changes), _batch_norm_note(source))


def offload(source: str, options: Mapping[str, Any]) -> Patched:
    """`torch.autograd.graph.save_on_cpu` around the body of loops over `self.<container>`."""
    transform = _Offload(_containers(options))
    changed = _changed(source, transform)
    return Patched(add_import(changed, "torch").code, tuple(transform.changes))


def _batch_norm_note(source: str) -> tuple[str, ...]:
    if "BatchNorm" not in source:
        return ()
    return (
        "BatchNorm layers count a recomputed batch twice: set momentum to 1 − sqrt(1 − momentum) in these blocks",
    )
