"""Operations without a fake kernel: done once on small CPU tensors, to learn the shapes of their outputs."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils import _pytree as pytree

_BYTES = 64 << 20
"""All inputs together; larger ones are not made up."""


def run_on_host(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Outputs of an operation of torch's own, from known values or ones; NotImplemented where that cannot be done.

    Results that are numbers or whose values were made up are counted as assumed.
    """
    flat, spec = pytree.tree_flatten((args, kwargs))
    fakes = [each for each in flat if isinstance(each, FakeTensor)]
    size = sum(each.numel() * each.element_size() for each in fakes)
    if not func._schema.name.startswith("aten::") or not fakes or size > _BYTES or func._schema.is_mutable:
        return NotImplemented
    known = all(mode.values.get(each) is not None for each in fakes)
    stand_ins = [_stand_in(mode, each) if isinstance(each, FakeTensor) else each for each in flat]
    host_args, host_kwargs = pytree.tree_unflatten(stand_ins, spec)
    if host_kwargs.get("device") is not None:
        host_kwargs["device"] = torch.device("cpu")
    try:
        with torch.no_grad():
            result = func(*host_args, **host_kwargs)
    except (RuntimeError, NotImplementedError, ValueError, TypeError, IndexError):
        return NotImplemented
    if not known:
        mode.values.assume(func._schema.name)
    device = next(
        (each.fake_device for each in fakes if each.fake_device.type == "cuda"), fakes[0].fake_device
    )
    return pytree.tree_map(lambda each: _as_fake(mode, each, device, known), result)


def _stand_in(mode: Any, fake: Any) -> Any:
    value = mode.values.get(fake)
    if value is not None:
        return value.clone()
    return torch.ones(tuple(fake.shape), dtype=fake.dtype)


def _as_fake(mode: Any, value: Any, device: Any, known: bool) -> Any:
    if not isinstance(value, torch.Tensor) or value.layout is not torch.strided:
        return value
    with mode.fake:
        made = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
    if known:
        mode.values.put(made, value)
    return made
