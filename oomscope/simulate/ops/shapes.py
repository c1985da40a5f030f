"""Operations whose output size depends on values, and operations whose values can be assumed safely."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ..values import fits
from .registry import kernel

_SYNTHETIC = 1 << 24
"""Elements up to which a router's choices are made up."""


def _count(mode: Any, mask: Any, operation: str) -> int:
    """How many elements of `mask` are not zero; all of them when nothing is known."""
    value = mode.values.get(mask)
    if value is not None and not mode.values.is_assumed(mask):
        return int(torch.count_nonzero(value))
    mode.values.assume(operation)
    share = mode.values.density(mask)
    return math.ceil(float(mask.numel()) * (1.0 if share is None else share))


def _empty(mode: Any, like: Any, size: tuple[int, ...], dtype: Any) -> Any:
    with mode.fake:
        return torch.empty(size, dtype=dtype, device=like.fake_device)


@kernel("aten::nonzero")
def nonzero(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    count = _count(mode, tensor, "aten::nonzero")
    with mode.fake:
        strides = (1, count) if tensor.dim() > 1 else (max(tensor.dim(), 1), 1)
        out = torch.empty_strided(
            (count, tensor.dim()), strides, dtype=torch.int64, device=tensor.fake_device
        )
    value = mode.values.get(tensor)
    if value is not None and not mode.values.is_assumed(tensor):
        mode.values.put(out, torch.nonzero(value))
    return out


@kernel("aten::masked_select")
def masked_select(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor, mask = args
    source, chosen = mode.values.get(tensor), mode.values.get(mask)
    chosen = None if mode.values.is_assumed(mask) else chosen
    shape = torch.broadcast_shapes(tensor.shape, mask.shape)
    count = _count(mode, mask, "aten::masked_select") * (math.prod(shape) // max(mask.numel(), 1))
    out = _empty(mode, tensor, (count,), tensor.dtype)
    if source is not None and chosen is not None:
        mode.values.put(out, torch.masked_select(source, chosen))
    return out


@kernel("aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_")
def index_by_mask(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Indexing with a mask: the mask becomes one index tensor per dimension, as in the real kernel."""
    tensor, indices = args[0], args[1]
    if not any(_is_mask(index) for index in indices):
        return NotImplemented
    expanded: list[Any] = []
    for index in indices:
        if not _is_mask(index):
            expanded.append(index)
            continue
        count = _count(mode, index, "indexing with a mask")
        device = index.fake_device if isinstance(index, FakeTensor) else index.device
        with mode.fake:
            expanded.extend(
                torch.empty((count,), dtype=torch.int64, device=device) for _ in range(index.dim())
            )
        mode.hold(expanded[-index.dim() :])
    return mode.infer(func, (tensor, expanded, *args[2:]), kwargs)


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


@kernel("aten::_unique2")
def unique(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    value = mode.values.get(tensor)
    inverse = args[2] if len(args) > 2 else kwargs.get("return_inverse", False)
    counts = args[3] if len(args) > 3 else kwargs.get("return_counts", False)
    if value is None:
        mode.values.assume("aten::_unique2")
        real = None
        count = tensor.numel()
    else:
        real = func(value, *args[1:], **kwargs)
        count = real[0].numel()
    outs = (
        _empty(mode, tensor, (count,), tensor.dtype),
        _empty(mode, tensor, tuple(tensor.shape) if inverse else (0,), torch.int64),
        _empty(mode, tensor, (count,) if counts else (0,), torch.int64),
    )
    for out, known in zip(outs, real or ()):
        mode.values.put(out, known)
    return outs


@kernel("aten::bincount")
def bincount(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    least = kwargs.get("minlength", args[2] if len(args) > 2 else 0)
    weights = kwargs.get("weights", args[1] if len(args) > 1 else None)
    value = mode.values.get(tensor)
    if value is None:
        mode.values.assume("aten::bincount")
        return _empty(mode, tensor, (max(least, 1),), torch.int64)
    real = torch.bincount(value, minlength=least)
    out = _empty(mode, tensor, tuple(real.shape), torch.int64 if weights is None else weights.dtype)
    if weights is None:
        mode.values.put(out, real)
    return out


@kernel("aten::repeat_interleave.Tensor")
def repeat_interleave(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    tensor = args[0]
    size = kwargs.get("output_size")
    value = mode.values.get(tensor)
    if size is None and value is None:
        mode.values.assume("aten::repeat_interleave")
    out_size = size if size is not None else int(value.sum()) if value is not None else tensor.numel()
    out = _empty(mode, tensor, (out_size,), tensor.dtype)
    if value is not None:
        mode.values.put(out, torch.repeat_interleave(value))
    return out


@kernel("aten::topk")
def topk(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The choices of a router are made up when they are not known.

    Balanced, as a trained router's nearly are.
    """
    values, indices = mode.infer(func, args, kwargs)
    scores = args[0]
    known = mode.values.get(scores)
    if known is None and 0 < indices.numel() <= _SYNTHETIC and indices.dim() >= 1:
        choices = scores.shape[int(args[2]) if len(args) > 2 else kwargs.get("dim", -1)]
        mode.values.assume("aten::topk")
        mode.values.put(indices, (torch.arange(indices.numel()) % choices).view(tuple(indices.shape)))
    return values, indices


@kernel("aten::scatter.value", "aten::scatter_.value")
def scatter_value(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Writing ones into zeros is how one-hot tables are made: remember how many ones there are."""
    out = mode.infer(func, args, kwargs)
    target, index = args[0], args[2]
    if mode.values.get(index) is None or mode.values.get(target) is None:
        mode.values.put_density(out, min(1.0, index.numel() / max(out.numel(), 1)))
    return out


@kernel("aten::isnan", "aten::isinf")
def never(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Unknown values are assumed to be finite."""
    out = mode.infer(func, args, kwargs)
    value = mode.values.get(args[0])
    if value is None:
        mode.values.put_constant(out, False)
    else:
        mode.values.put(out, func(value))
    return out


@kernel("aten::ne.Scalar")
def not_infinite(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`x != inf`, half of `torch.isfinite`."""
    if not isinstance(args[1], float) or not math.isinf(args[1]) or mode.values.get(args[0]) is not None:
        return NotImplemented
    out = mode.infer(func, args, kwargs)
    mode.values.put_constant(out, True)
    return out


@kernel("aten::eq.Tensor")
def equals_itself(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """`x == x`, the other half of `torch.isfinite`; `index == arange`, by which one-hot tables are made.

    Where such a table is too large to keep, its share of ones is still known: one in each row.
    """
    first, second = args
    if first is second:
        out = mode.infer(func, args, kwargs)
        mode.values.put_constant(out, True)
        return out
    classes = mode.values.get(second)
    if classes is None or classes.dim() != 1 or first.dim() < 2 or first.shape[-1] != 1:
        return NotImplemented
    out = mode.infer(func, args, kwargs)
    if not fits(out) and mode.values.get(first) is not None:
        mode.values.put_density(out, 1.0 / max(classes.numel(), 1))
    return out


@kernel("aten::mul.Tensor", "aten::logical_and", "aten::bitwise_and.Tensor", "aten::logical_or")
def combine_constants(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Two constant tensors give a constant one, however large they are."""
    corners = [_corner(mode.values.get(each)) for each in args[:2] if isinstance(each, FakeTensor)]
    if len(corners) != 2 or any(each is None for each in corners):
        return NotImplemented
    out = mode.infer(func, args, kwargs)
    result = func(*corners)
    mode.values.put(out, result.expand(tuple(out.shape)))
    return out


@kernel("aten::any", "aten::any.dim", "aten::all", "aten::all.dim")
def reduce_constant(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    corner = _corner(mode.values.get(args[0]))
    if corner is None:
        return NotImplemented
    out = mode.infer(func, args, kwargs)
    mode.values.put_constant(out, bool(corner))
    return out


def _corner(value: Any) -> Any:
    """The one element of a tensor whose strides are all zero, None for any other."""
    if value is None or value.numel() == 0 or any(stride != 0 for stride in value.stride()):
        return None
    return value[(0,) * value.dim()]


@kernel("aten::randint", "aten::randint.low", "aten::randperm")
def random_integers(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Random integers are really drawn, by a generator of our own: masks made from them are known."""
    out = mode.infer(func, args, kwargs)
    if out.numel() <= _SYNTHETIC // 16:
        kept = {"dtype": kwargs["dtype"]} if kwargs.get("dtype") is not None else {}
        packet = func._overloadpacket
        drawn = packet.low_generator if func._overloadname.startswith("low") else packet.generator
        mode.values.put(out, drawn(*args, generator=mode.values.generator, **kept))
    return out
