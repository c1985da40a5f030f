"""`tensor.data`, addresses and pinned memory."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .swap import become

_BASE = torch._C.TensorBase


def install(mode: Any) -> None:
    """Patch `torch.Tensor`."""
    get_data = _BASE.data.__get__
    set_data = _BASE.data.__set__

    def assign(self: Any, value: Any) -> None:
        if isinstance(self, FakeTensor):
            # Its values are not known in any case, and autograd's nodes must go on to refer to the same
            # tensor.
            if not isinstance(value, FakeTensor):
                value = _without_values(mode, value)
            set_data(self, value)
            self._fake_device = value.fake_device
        elif isinstance(value, FakeTensor):
            become(self, value)
        else:
            set_data(self, value)

    torch.Tensor.data = property(lambda self: get_data(self), assign)

    def data_ptr(self: Any) -> int:
        """The address of the block, plus the offset of a view."""
        if not isinstance(self, FakeTensor):
            return int(_BASE.data_ptr(self))
        allocation = mode.tracker.allocation_of(self)
        if allocation is None:
            return 0 if self.fake_device.type == "cuda" else int(self.untyped_storage()._cdata)
        return int(allocation.block.address + self.storage_offset() * self.element_size())

    torch.Tensor.data_ptr = data_ptr
    torch.Tensor.pin_memory = lambda self, *_args, **_kwargs: self
    torch.Tensor.is_pinned = lambda self, *_args, **_kwargs: self.device.type == "cpu"
    torch.Tensor.share_memory_ = _share_memory(torch.Tensor.share_memory_)
    _storage_addresses(mode)


def _without_values(mode: Any, tensor: Any) -> Any:
    with mode.fake:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _share_memory(original: Any) -> Any:
    def share_memory_(self: Any) -> Any:
        return self if isinstance(self, FakeTensor) else original(self)

    return share_memory_


def _storage_addresses(mode: Any) -> None:
    original = torch.UntypedStorage.data_ptr

    def data_ptr(self: Any) -> int:
        record = mode.tracker.live.get(id(self))
        if record is not None and record[0]() is self:
            return int(record[1].block.address) if record[1] is not None else 0
        try:
            return int(original(self))
        except RuntimeError:  # a host tensor without memory: its storage object stands for the address
            return int(self._cdata)

    torch.UntypedStorage.data_ptr = data_ptr
    plain_copy = torch.UntypedStorage.copy_

    def copy_(self: Any, source: Any, non_blocking: Any = None) -> Any:
        """There is nothing to copy out of or into a storage without memory."""
        if "meta" in (self.device.type, source.device.type):
            return self
        return plain_copy(self, source, non_blocking)

    torch.UntypedStorage.copy_ = copy_
