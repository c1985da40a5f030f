"""`torch.save` and `torch.load`: simulated tensors are stored as shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._pytree import tree_map


def install(mode: Any) -> None:
    """Replace `torch.save` and `torch.load`."""
    plain_save, plain_load = torch.save, torch.load

    def save(obj: Any, f: Any, *args: Any, **kwargs: Any) -> Any:
        return plain_save(tree_map(_as_shape, obj), f, *args, **kwargs)

    def load(f: Any, map_location: Any = None, *args: Any, **kwargs: Any) -> Any:
        target = None if map_location is None or callable(map_location) else map_location
        on_card = target is not None and not isinstance(target, dict) and "cuda" in str(target)
        plain_target = "cpu" if on_card or isinstance(map_location, dict) else map_location
        loaded = plain_load(f, plain_target, *args, **kwargs)
        if str(target) == "meta":
            return loaded

        def revive(each: Any) -> Any:
            if not isinstance(each, torch.Tensor):
                return each
            if each.device.type == "meta":
                return _revived(mode, each, target if target is not None else "cuda")
            return each.to(target) if on_card else each

        return tree_map(revive, loaded)

    save.__doc__, load.__doc__ = plain_save.__doc__, plain_load.__doc__
    torch.save, torch.load = save, load


def _as_shape(each: Any) -> Any:
    if not isinstance(each, FakeTensor):
        return each
    shape = torch.empty_strided(each.shape, each.stride(), dtype=each.dtype, device="meta")
    return torch.nn.Parameter(shape, each.requires_grad) if isinstance(each, torch.nn.Parameter) else shape


def _revived(mode: Any, shape: Any, device: Any) -> Any:
    if "cuda" in str(device):
        new = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device=device)
    else:
        with mode.fake:
            new = torch.empty_strided(shape.shape, shape.stride(), dtype=shape.dtype, device="cpu")
    return torch.nn.Parameter(new, shape.requires_grad) if isinstance(shape, torch.nn.Parameter) else new
