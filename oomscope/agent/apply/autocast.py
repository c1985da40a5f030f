"""Mixed precision around the outermost module call, with float32 results, for a script that has none.

Entering autocast once for the whole process would be wrong: its cache of cast weights is cleared when the
outermost block ends, so evaluation after a step would use stale weights. Around each call it is cleared each
time.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Callable

import torch
from torch import nn

from .runtime import APPLIED, REFUSED, Runtime, device_type

_LOW = (torch.float16, torch.bfloat16)


def install(runtime: Runtime, options: dict[str, Any], fix: str = "amp-bf16") -> None:
    """Run every outermost module call under autocast.

    Args:
        runtime: hooks and reporting.
        options: `dtype` ("bfloat16" or "float16"), `fp32_outputs` (default true).
        fix: the id under which the result is reported.
    """
    dtype = getattr(torch, str(options.get("dtype", "bfloat16")))
    keep_low = options.get("fp32_outputs", True) is False

    def around(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        kind = device_type(module)
        if next(module.parameters(), None) is None:
            return call(*args, **kwargs)
        if torch.is_autocast_enabled(kind):
            runtime.report(fix, REFUSED, "already active: the script runs the model under autocast")
            return call(*args, **kwargs)
        if kind == "cuda" and dtype is torch.bfloat16 and not torch.cuda.is_bf16_supported(False):
            runtime.report(fix, REFUSED, "the GPU has no bfloat16 arithmetic: use amp-fp16")
            return call(*args, **kwargs)
        if all(parameter.dtype in _LOW for parameter in module.parameters()):
            runtime.report(
                fix, REFUSED, f"already active: the parameters of {type(module).__qualname__} are 16 bit"
            )
            return call(*args, **kwargs)
        runtime.report(fix, APPLIED, f"{options.get('dtype', 'bfloat16')} around {type(module).__qualname__}")
        with torch.autocast(kind, dtype=dtype):
            result = call(*args, **kwargs)
        return result if keep_low else to_float32(result)

    runtime.around(around)
    runtime.settle(lambda: _settle(runtime, fix))


def _settle(runtime: Runtime, fix: str) -> None:
    if runtime.state(fix) is None:
        runtime.report(fix, REFUSED, "no model was called")


def to_float32(value: Any) -> Any:
    """`value` with every 16-bit floating tensor in it as float32; containers keep their type."""
    if isinstance(value, torch.Tensor):
        return value.float() if value.dtype in _LOW else value
    if isinstance(value, tuple):
        items = [to_float32(each) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, list):
        return type(value)(to_float32(each) for each in value)
    if isinstance(value, Mapping):
        return type(value)({key: to_float32(each) for key, each in value.items()})  # type: ignore[call-arg]
    return value
