"""Copies between the simulated device and the host, and reads of single values."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..values import assumed_scalar
from .registry import kernel

_KNOWN_COPY = 1 << 24
"""Elements up to which known values are written into an existing host tensor."""


@kernel("aten::_local_scalar_dense")
def item(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`.item()`, `float()`, `if tensor:` ….

    The true value if it is known, else an assumption that is counted.
    """
    tensor = args[0]
    value = mode.values.get(tensor)
    if value is not None and not mode.values.is_assumed(tensor):
        return value.item()
    mode.values.assume("aten::_local_scalar_dense")
    return assumed_scalar(tensor.dtype) if value is None else value.item()


@kernel("aten::equal")
def equal(mode: Any, func: Any, args: Any, kwargs: Any) -> bool:
    first, second = args
    if first.shape != second.shape:
        return False
    a, b = mode.values.get(first), mode.values.get(second)
    if a is not None and b is not None:
        return bool(torch.equal(a, b))
    mode.values.assume("aten::equal")
    return first is second


@kernel("aten::_to_copy")
def to_copy(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """A copy to the host gives a real CPU tensor; from the host, a simulated one marked as an input."""
    tensor = args[0]
    device = kwargs.get("device")
    if device is None:
        return NotImplemented
    if torch.device(device).type == "cpu":
        if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
            real = on_host(mode, tensor, kwargs.get("dtype"))
            if real is not None:
                return real
    elif not isinstance(tensor, FakeTensor) or tensor.fake_device.type == "cpu":
        mode.next_category = "inputs"
    return NotImplemented


def on_host(mode: Any, tensor: Any, dtype: Any = None) -> Any | None:
    """A real CPU tensor for `tensor`; None when it is unknown and too large to be worth its memory."""
    dtype = dtype or tensor.dtype
    value = mode.values.get(tensor)
    if value is not None:
        return value.to(dtype).clone()
    mode.values.assume("copy to host")
    if tensor.numel() * tensor.element_size() > mode.host_limit:
        return None
    return torch.full(tuple(tensor.shape), assumed_scalar(dtype), dtype=dtype)


@kernel("aten::copy_")
def copy_(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Writes into a real host tensor; what is not known leaves it as it is."""
    target, source = args[0], args[1]
    if isinstance(target, FakeTensor) or not isinstance(source, FakeTensor):
        return NotImplemented
    value = mode.values.get(source)
    if value is None:
        mode.values.assume("copy to host")
    elif value.numel() <= _KNOWN_COPY:
        target.copy_(value)
    return target


@kernel("aten::_pin_memory", "aten::pin_memory", on_host=True)
def pin_memory(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    return args[0]


@kernel("aten::is_pinned", on_host=True)
def is_pinned(mode: Any, func: Any, args: Any, kwargs: Any) -> bool:
    return True


@kernel("aten::record_stream")
def record_stream(mode: Any, func: Any, args: Any, kwargs: Any) -> None:
    """The block stays active after its death until the other stream has caught up."""
    tensor, stream = args
    allocation = mode.tracker.allocation_of(tensor)
    if allocation is not None:
        mode.device.record_stream(allocation.block.address, allocation.device, stream.stream_id)
