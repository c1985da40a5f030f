"""Operations that reach the CUDA key of torch's dispatcher without passing the dispatch mode.

Two kinds: code that switches Python dispatch off (`torch.tensor([cuda_scalar])`, parts of FSDP), and
operations that have a native CUDA kernel but only a composite one in a CPU build, which would be taken
apart for CUDA tensors in C++: `silu_backward` would then hold seven temporaries of full size. A test lists
the second kind for the installed torch and fails when there is a new one.
"""

from __future__ import annotations

import warnings
from typing import Any

import torch

aten = torch.ops.aten

#: Operations with a CompositeImplicitAutograd kernel and a native CPU one: CUDA builds have one as well.
COMPOSITE_WITH_NATIVE_KERNEL = (
    "aten::silu_backward",
    "aten::mish_backward",
    "aten::native_channel_shuffle",
)
_OVERLOADS = (
    aten._local_scalar_dense.default,
    aten._to_copy.default,
    aten.copy_.default,
    aten.empty.memory_format,
    aten.empty_strided.default,
    aten.record_stream.default,
    aten.silu_backward.default,
    aten.mish_backward.default,
    aten.native_channel_shuffle.default,
    *([aten._fused_rms_norm.default] if hasattr(aten, "_fused_rms_norm") else []),
)
_libraries: list[Any] = []


def composite_with_native_kernel() -> list[str]:
    """The list above, as the installed torch has it."""
    has = torch._C._dispatch_has_kernel_for_dispatch_key
    return sorted(
        name
        for name in torch._C._dispatch_get_all_op_names()
        if name.startswith("aten::") and has(name, "CompositeImplicitAutograd") and has(name, "CPU")
    )


def install(mode: Any) -> None:
    """Register the mode as the CUDA kernel of these operations."""
    library = torch.library.Library("aten", "IMPL")
    for overload in _OVERLOADS:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            library.impl(overload, _entry(mode, overload), "CUDA")
    _libraries.append(library)


def _entry(mode: Any, overload: Any) -> Any:
    def run(*args: Any, **kwargs: Any) -> Any:
        return mode.simulate(overload, args, kwargs)

    return run
