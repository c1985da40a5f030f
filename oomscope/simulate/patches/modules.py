"""`module.to()` and friends: parameters keep their identity when they move to the simulated device."""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .swap import become


def install(mode: Any) -> None:
    """Replace `nn.Module._apply`, and note parameters as they are registered."""
    module_class = torch.nn.Module
    tracker = mode.tracker

    def _apply(self: Any, fn: Callable[[Any], Any], recurse: bool = True) -> Any:
        before, tracker.hint = tracker.hint, "parameters"
        if before is None:
            tracker.name_modules(self)
        try:
            if recurse:
                for child in self.children():
                    child._apply(fn)
            for parameter in self._parameters.values():
                if parameter is not None:
                    _move(parameter, fn)
            tracker.hint = "buffers"
            for name, buffer in self._buffers.items():
                if buffer is not None:
                    self._buffers[name] = fn(buffer)
        finally:
            tracker.hint = before
        return self

    register = module_class.register_parameter

    def register_parameter(self: Any, name: str, param: Any) -> None:
        register(self, name, param)
        mark(mode, param, "parameters")

    module_class._apply = _apply
    module_class.register_parameter = register_parameter


def mark(mode: Any, tensor: Any, category: str) -> None:
    """Say what the memory behind a tensor is for."""
    local = getattr(tensor, "_local_tensor", tensor)
    if isinstance(local, FakeTensor) and local.fake_device.type == "cuda":
        allocation = mode.tracker.allocation_of(local)
        if allocation is not None:
            allocation.category = category


def _move(parameter: Any, fn: Callable[[Any], Any]) -> None:
    gradient, parameter.grad = parameter.grad, None  # it may only be set where its device is the parameter's
    with torch.no_grad():
        moved = fn(parameter)
    if moved is not parameter:
        if (
            type(moved) is type(parameter)
            and not isinstance(moved, FakeTensor)
            and torch._has_compatible_shallow_copy_type(parameter, moved)
        ):
            parameter.data = moved
        else:
            become(parameter, moved)
    if gradient is not None:
        with torch.no_grad():
            parameter.grad = fn(gradient)
