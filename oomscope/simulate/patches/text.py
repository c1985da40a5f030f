"""Printing, formatting and conversion to lists and numpy arrays."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

_PRINTED = 1000


def install(mode: Any) -> None:
    """Patch `torch.Tensor` and `FakeTensor`."""
    tensor_class = torch.Tensor
    plain_repr, plain_format = tensor_class.__repr__, tensor_class.__format__
    plain_list, plain_numpy = tensor_class.tolist, tensor_class.numpy

    def show(self: Any, *, tensor_contents: Any = None) -> str:
        if not isinstance(self, FakeTensor):
            return str(plain_repr(self, tensor_contents=tensor_contents))
        value = mode.values.get(self)
        body = str(value.tolist()) if value is not None and value.numel() < _PRINTED else "..."
        gradient = ""
        if self.grad_fn is not None:
            gradient = f", grad_fn=<{type(self.grad_fn).__name__}>"
        elif self.requires_grad:
            gradient = ", requires_grad=True"
        place = f"device='{self.fake_device}', size={tuple(self.shape)}, dtype={self.dtype}"
        return f"tensor({body}, {place}{gradient})"

    def format_(self: Any, spec: str) -> str:
        if isinstance(self, FakeTensor) and self.dim() == 0:
            return str(self.item().__format__(spec))
        return str(plain_format(self, spec))

    def tolist(self: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return plain_list(self)
        with torch.no_grad():
            host = self.detach().cpu()
        return plain_list(
            torch.zeros(tuple(host.shape), dtype=host.dtype) if isinstance(host, FakeTensor) else host
        )

    def numpy(self: Any, *args: Any, **kwargs: Any) -> Any:
        if not isinstance(self, FakeTensor):
            return plain_numpy(self, *args, **kwargs)
        if self.fake_device.type == "cuda":
            raise TypeError(
                f"can't convert {self.fake_device} device type tensor to numpy. "
                "Use Tensor.cpu() to copy the tensor to host memory first."
            )
        scalar = plain_numpy(torch.zeros((), dtype=self.dtype))
        # numpy is there, or torch could not have made the scalar; it is no dependency of ours in the job.
        return sys.modules["numpy"].broadcast_to(scalar, tuple(self.shape))

    tensor_class.__repr__ = FakeTensor.__repr__ = show
    tensor_class.__format__ = format_
    tensor_class.tolist = FakeTensor.tolist = tolist
    tensor_class.numpy = numpy
