"""Tables of what an operation needs besides its output shape: own kernels, and memory used inside its kernel.

`kernel` replaces an operation; `workspace` names memory that the real kernel takes for itself. Both are
open to
plugins: a function decorated before the simulated device starts is used like a built-in one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Callable, Optional

import torch

Kernel = Callable[[Any, Any, tuple[Any, ...], dict[str, Any]], Any]
"""(mode, operation, args, kwargs) -> result, or NotImplemented for the ordinary way."""
Workspace = Callable[[Any, Any, tuple[Any, ...], dict[str, Any], list[Any]], Optional[list[int]]]
"""(mode, operation, args, kwargs, outputs) -> bytes of each temporary; they are freed together."""

_kernels: dict[str, tuple[Kernel, bool]] = {}
_workspaces: dict[str, Workspace] = {}


def kernel(*names: str, on_host: bool = False) -> Callable[[Kernel], Kernel]:
    """Register an own kernel for operations "aten::name" (all overloads) or "aten::name.overload".

    With `on_host` it is also asked when no simulated tensor takes part.
    """

    def register(function: Kernel) -> Kernel:
        for name in names:
            _kernels[name] = (function, on_host)
        return function

    return register


def workspace(*names: str) -> Callable[[Workspace], Workspace]:
    """Register the temporary memory of operations, by name as in `kernel`."""

    def register(function: Workspace) -> Workspace:
        for name in names:
            _workspaces[name] = function
        return function

    return register


class Info:
    """What the dispatch mode wants to know about one operation, worked out once."""

    __slots__ = (
        "has_tensors",
        "is_cachable",
        "is_comparison",
        "is_composite",
        "is_plain",
        "is_pure_view",
        "is_random",
        "is_uninitialized",
        "is_view",
        "keeps_values",
        "kernel",
        "may_be_in_place",
        "on_host",
        "passes_density",
        "workspace",
        "written",
    )

    def __init__(self, func: Any) -> None:
        self.is_plain = isinstance(func, torch._ops.OpOverload)
        self.kernel: Kernel | None = None
        self.on_host = False
        self.workspace: Workspace | None = None
        self.written: list[tuple[int, str]] = []
        self.is_random = self.is_view = self.is_composite = self.is_uninitialized = self.keeps_values = False
        self.is_comparison = self.may_be_in_place = False
        self.is_pure_view = self.is_cachable = self.has_tensors = self.passes_density = False
        if not self.is_plain:
            return
        self.is_random = torch.Tag.nondeterministic_seeded in func.tags
        self.is_view = func.is_view
        self.passes_density = self.is_view or func._schema.name in ("aten::_to_copy", "aten::clone")
        name = func._schema.name
        key = torch._C.DispatchKey
        # A real CPU kernel beside the composite one means that CUDA has its own kernel too: one launch, no
        # temporaries.
        self.is_composite = func.has_kernel_for_dispatch_key(key.CompositeImplicitAutograd) and not (
            func.has_kernel_for_dispatch_key(key.CPU) or name in COMPOSITE_EXCEPT_ON_CUDA
        )
        for position, argument in enumerate(func._schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self.written.append((position, argument.name))
        overload = func._overloadname
        self.is_comparison = name in _COMPARISONS
        self.may_be_in_place = name in OUT_OF_PLACE or f"{name}.{overload}" in OUT_OF_PLACE
        self.is_uninitialized = name in _UNINITIALIZED
        self.keeps_values = name in _KEEPS_VALUES
        for each in (f"{name}.{overload}", name):
            if each in _kernels:
                self.kernel, self.on_host = _kernels[each]
                break
        self.workspace = _workspaces.get(f"{name}.{overload}", _workspaces.get(name))
        self.has_tensors = any("Tensor" in str(argument.type) for argument in func._schema.arguments)
        # Functions of one tensor that only give another shape to its memory.
        self.is_pure_view = name in _PURE_VIEWS
        self.is_cachable = (
            name.startswith("aten::")
            and not self.is_view
            and not any(tag in func.tags for tag in _NEVER_CACHED)
            and name not in _CHANGES_SHAPE
        )


COMPOSITE_EXCEPT_ON_CUDA = ("aten::_fused_rms_norm",)
"""Operations that a CPU build has only in composite form, but a CUDA build as a kernel (native_functions.yaml)."""
_NEVER_CACHED = (torch.Tag.inplace_view, torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_CHANGES_SHAPE = {
    "aten::resize_",
    "aten::resize_as_",
    "aten::set_",
    "aten::_unsafe_view",
    "aten::lift_fresh",
    "aten::lift",
}
_PURE_VIEWS = {
    f"aten::{name}"
    for name in (
        "alias",
        "as_strided",
        "detach",
        "diagonal",
        "expand",
        "permute",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "t",
        "transpose",
        "unbind",
        "unfold",
        "unsqueeze",
        "view",
    )
}
OUT_OF_PLACE = {
    f"aten::{name}"
    for name in (
        "add.Tensor",
        "index_add",
        "index_put",
        "masked_scatter",
        "put",
        "scatter.src",
        "scatter_add",
    )
}
"""Operations that the backward pass runs in the place of `add_`, `index_add_`, …; see `accumulate`."""
_COMPARISONS = {f"aten::{name}" for name in ("eq", "ne", "lt", "le", "gt", "ge", "isin")}
_UNINITIALIZED = {
    "aten::empty",
    "aten::empty_strided",
    "aten::empty_like",
    "aten::new_empty",
    "aten::new_empty_strided",
}
_KEEPS_VALUES = {"aten::_amp_foreach_non_finite_check_and_unscale_"}
"""These write to their tensors, but nothing that a program looks at changes: no overflow is assumed."""


def operations() -> Iterator[str]:
    """Names of all operations with an own kernel or workspace, for the tests."""
    yield from sorted({*_kernels, *_workspaces})
