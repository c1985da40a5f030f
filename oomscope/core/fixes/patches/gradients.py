"""Small edits of calls: zero_grad, evaluation functions, DistributedDataParallel, optimizers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import libcst as cst
import libcst.matchers as m

from oomscope.core.fixes.patches.text import (
    Patched,
    add_import,
    calls_in,
    code_of,
    dotted,
    keyword,
    last_name,
    parse,
    with_keyword,
    without_arguments,
)
from oomscope.errors import PatchDoesNotApply

_DDP = ("DistributedDataParallel", "DDP")
_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_EVALUATION = re.compile(
    r"(^|_)(eval|evaluate|evaluation|valid|validate|validation|val|test|infer|inference|predict)(_|$)"
)
_GUARDS = ("no_grad", "inference_mode", "set_grad_enabled", "enable_grad", "backward")


class _ZeroGrad(cst.CSTTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        if not m.matches(updated_node.func, m.Attribute(attr=m.Name("zero_grad"))):
            return updated_node
        flag = keyword(updated_node, "set_to_none")
        if flag is None or not m.matches(flag.value, m.Name("False")):
            return updated_node
        self.count += 1
        return without_arguments(updated_node, [flag])


def zero_none(source: str, options: Mapping[str, Any]) -> Patched:
    """Remove `set_to_none=False` from calls of `zero_grad`.

    Raises:
        PatchDoesNotApply: there is none.
    """
    transform = _ZeroGrad()
    changed = parse(source).visit(transform)
    if not transform.count:
        raise PatchDoesNotApply("no zero_grad(set_to_none=False) in this file")
    return Patched(changed.code, (f"{transform.count} calls of zero_grad free the gradients",))


class _NoGrad(cst.CSTTransformer):
    def __init__(self) -> None:
        super().__init__()
        self.functions: list[str] = []

    def leave_FunctionDef(  # noqa: N802
        self, original_node: cst.FunctionDef, updated_node: cst.FunctionDef
    ) -> cst.FunctionDef:
        name = updated_node.name.value
        if not _EVALUATION.search(name.lower()):
            return updated_node
        calls = calls_in(updated_node.body)
        if any(last_name(call.func) in _GUARDS for call in calls):
            return updated_node
        if any(
            word in code_of(each)
            for each in updated_node.decorators
            for word in ("grad", "inference", "fixture")
        ):
            return updated_node
        if not any(_runs_a_model(call) for call in calls):
            return updated_node
        self.functions.append(name)
        decorator = cst.Decorator(cst.parse_expression("torch.no_grad()"))
        return updated_node.with_changes(decorators=[*updated_node.decorators, decorator])


def _runs_a_model(call: cst.Call) -> bool:
    return bool(re.fullmatch(r"(self\.)?\w*(model|net|network|encoder)", dotted(call.func)))


def no_grad(source: str, options: Mapping[str, Any]) -> Patched:
    """Decorate functions that evaluate a model with `torch.no_grad()`.

    Raises:
        PatchDoesNotApply: no such function without it was found.
    """
    transform = _NoGrad()
    changed = parse(source).visit(transform)
    if not transform.functions:
        raise PatchDoesNotApply("no evaluation function without torch.no_grad() was found in this file")
    done = tuple(f"{name}() runs under torch.no_grad()" for name in transform.functions)
    return Patched(add_import(changed, "torch").code, done)


class _Keyword(cst.CSTTransformer):
    def __init__(self, functions: tuple[str, ...], name: str, value: str, prefix: str) -> None:
        super().__init__()
        self.functions, self.name, self.value, self.prefix = functions, name, value, prefix
        self.count = 0
        self.already = 0

    def leave_Call(self, original_node: cst.Call, updated_node: cst.Call) -> cst.Call:  # noqa: N802
        full = dotted(updated_node.func)
        if full.rpartition(".")[2] not in self.functions or (self.prefix and self.prefix not in f".{full}"):
            return updated_node
        given = keyword(updated_node, self.name)
        if given is not None and code_of(given.value) == self.value:
            self.already += 1
            return updated_node
        self.count += 1
        return with_keyword(updated_node, self.name, self.value)


def _set_keyword(
    source: str, functions: tuple[str, ...], name: str, value: str, *, prefix: str = ""
) -> Patched:
    transform = _Keyword(functions, name, value, prefix)
    changed = parse(source).visit(transform)
    if not transform.count:
        found = (
            "is active already"
            if transform.already
            else f"no call of {' or '.join(functions[:2])} in this file"
        )
        raise PatchDoesNotApply(f"{name}={value}: {found}")
    return Patched(changed.code, (f"{transform.count} calls get {name}={value}",))


def bucket_view(source: str, options: Mapping[str, Any]) -> Patched:
    """`gradient_as_bucket_view=True` for DistributedDataParallel.

    Raises:
        PatchDoesNotApply: the file wraps no model, or does it with the option already.
    """
    return _set_keyword(source, _DDP, "gradient_as_bucket_view", "True")


def fused(source: str, options: Mapping[str, Any]) -> Patched:
    """`fused=True` for torch's own optimizers.

    Raises:
        PatchDoesNotApply: the file makes none that has a fused implementation, or it is fused already.
    """
    try:
        return _set_keyword(source, _FUSED, "fused", "True", prefix=".optim.")
    except PatchDoesNotApply:
        if re.search(r"from torch\.optim import", source):
            return _set_keyword(source, _FUSED, "fused", "True")
        raise
