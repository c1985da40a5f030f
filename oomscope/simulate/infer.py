"""Output shapes of operations, remembered: the same operation on the same shapes is inferred once.

`FakeTensorMode` has a cache of its own, but making its keys costs more than all the rest of the simulation.
Here a key is made of shapes, strides, types and devices only, and operations whose outputs cannot be
rebuilt from those (sparse tensors, views by way of other functions, anything with symbols) are left to
torch.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from .device import Device
from .ops.registry import Info

_PLAIN_TYPES = frozenset(
    (int, float, bool, str, complex, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format)
)
_FRESH, _SAME, _VALUE = 0, 1, 2


class NoKey(Exception):
    """An argument that cannot be part of a key."""


class Plan:
    """How to rebuild the outputs of an operation."""

    __slots__ = ("parts", "sequence")

    def __init__(self, sequence: Any, parts: list[tuple[Any, ...]]) -> None:
        self.sequence = sequence
        """None for one output, else `tuple` or `list`."""
        self.parts = parts
        """(kind, …): fresh with shape, stride, dtype and device.

        The position of an argument; a number or None.
        """


class Inference:
    """Infers outputs through one `FakeTensorMode`."""

    def __init__(self, fake: FakeTensorMode, device: Device) -> None:
        self.fake = fake
        self.device = device
        self._plans: dict[Any, Plan | None] = {}
        self._templates: dict[Any, dict[str, Any]] = {}

    def __call__(self, info: Info, func: Any, args: Any, kwargs: Any) -> Any:
        """The outputs of `func` as fake tensors, not yet allocated."""
        if info.is_pure_view and isinstance(args[0], FakeTensor) and not kwargs:
            return self._view(func, args)
        if not info.is_cachable:
            return self.fake.dispatch(func, (), self._twins(args), kwargs)
        try:
            key = self._whole_key(info, func, args, kwargs)
        except (NoKey, TypeError, RuntimeError):
            args = self._twins(args)
            try:
                key = self._whole_key(info, func, args, kwargs)
            except (NoKey, TypeError, RuntimeError):
                return self.fake.dispatch(func, (), args, kwargs)
        plan = self._plans.get(key)
        if plan is not None:
            return self._rebuild(plan, args)
        out = self.fake.dispatch(func, (), args, kwargs)
        if key not in self._plans:
            self._plans[key] = self._plan(args, kwargs, out)
        return out

    def _whole_key(self, info: Info, func: Any, args: Any, kwargs: Any) -> Any:
        default = None if info.has_tensors else torch.get_default_dtype()
        # "cuda" without a number is the current device.
        current = self.device.current if kwargs and "device" in kwargs else None
        return (func, _key(args), _key(kwargs.items()) if kwargs else None, default, current)

    def _twins(self, args: Any) -> Any:
        """The arguments with fake tensors in the place of real ones, which only lend their shape."""
        if not any(type(each) in _REAL or isinstance(each, (list, tuple)) for each in args):
            return args
        return type(args)(
            self._twin(each)
            if type(each) in _REAL
            else self._twins(each)
            if type(each) in (list, tuple)
            else each
            for each in args
        )

    def _twin(self, real: Any) -> Any:
        if real.layout is not torch.strided or real.is_quantized or real.dtype.is_complex:
            return real
        with torch._C._DisableTorchDispatch():
            plain = torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device="meta")
        return self._wrap(plain, real.device)

    # --- plans

    @staticmethod
    def _plan(args: Any, kwargs: Any, out: Any) -> Plan | None:
        """How to make `out` again; None when it cannot be made from shapes alone."""
        taken = {
            each.untyped_storage()._cdata for each in _tensors((args, kwargs)) if each.layout is torch.strided
        }
        sequence = list if isinstance(out, list) else tuple if isinstance(out, tuple) else None
        parts: list[tuple[Any, ...]] = []
        for each in out if sequence is not None else (out,):
            if each is None or type(each) in (int, float, bool):
                parts.append((_VALUE, each))
                continue
            position = next((index for index, argument in enumerate(args) if argument is each), None)
            if position is not None:
                parts.append((_SAME, position))
                continue
            if type(each) is not FakeTensor or each.layout is not torch.strided or each.constant is not None:
                return None
            shape, stride = tuple(each.shape), each.stride()
            storage = each.untyped_storage()
            same_size = torch.empty_strided(shape, stride, dtype=each.dtype, device="meta")
            if (
                storage._cdata in taken
                or each.storage_offset() != 0
                or same_size.untyped_storage().nbytes() != storage.nbytes()
            ):
                return None
            taken.add(storage._cdata)
            parts.append((_FRESH, shape, stride, each.dtype, each.fake_device))
        return Plan(sequence, parts)

    def _rebuild(self, plan: Plan, args: Any) -> Any:
        if plan.sequence is None:
            return self._part(plan.parts[0], args)
        return plan.sequence([self._part(part, args) for part in plan.parts])

    def _part(self, part: tuple[Any, ...], args: Any) -> Any:
        kind = part[0]
        if kind == _FRESH:
            with torch._C._DisableTorchDispatch():
                plain = torch.empty_strided(part[1], part[2], dtype=part[3], device="meta")
            return self._wrap(plain, part[4])
        return args[part[1]] if kind == _SAME else part[1]

    # --- tensors

    def _view(self, func: Any, args: Any) -> Any:
        source = args[0]
        fake = self.fake
        with torch._C._DisableTorchDispatch(), torch._C._PreserveDispatchKeyGuard():
            fake.in_kernel_invocation = True
            torch._C._set_meta_in_tls_dispatch_include(True)
            try:
                out = func(*args)
            finally:
                fake.in_kernel_invocation = False
        device = source.fake_device
        if isinstance(out, (list, tuple)):
            return [self._wrap(each, device) for each in out]
        return self._wrap(out, device)

    def _wrap(self, plain: Any, device: Any) -> Any:
        """A `FakeTensor` as its constructor makes it, without the checks of the constructor."""
        made = torch.Tensor._make_subclass(
            FakeTensor, plain, False, dispatch_device=True, device_for_backend_keys=device
        )
        torch._C._set_throw_on_mutable_data_ptr(made)
        template = self._templates.get(device)
        if template is None:
            template = self._templates[device] = dict(FakeTensor(self.fake, plain, device).__dict__)
        made.__dict__.update(template)
        return made


def _key(arguments: Any) -> tuple[Any, ...]:
    """Everything about arguments that the shapes of outputs can depend on.

    Raises:
        NoKey: a tensor that is not simulated, or a value of another kind.
        RuntimeError: a tensor without strides.
    """
    parts: list[Any] = []
    add = parts.append
    for argument in arguments:
        kind = type(argument)
        if kind is FakeTensor:
            if argument.constant is not None or argument.dtype.is_complex:
                raise NoKey
            add((argument.shape, argument.stride(), argument.dtype, argument._fake_device))
        elif kind in _PLAIN_TYPES:
            add(kind)
            add(argument)
        elif kind is list or kind is tuple or kind is torch.Size:
            add(_key(argument))
        else:
            raise NoKey
    return tuple(parts)


_REAL = frozenset((torch.Tensor, torch.nn.Parameter))


def _tensors(arguments: Any) -> Any:
    for argument in arguments.values() if isinstance(arguments, dict) else arguments:
        if isinstance(argument, torch.Tensor):
            yield argument
        elif isinstance(argument, (list, tuple, dict)):
            yield from _tensors(argument)
