"""What is known about the contents of simulated tensors.

No arithmetic is done on the simulated device, but programs look at some values: masks, positions, step
counters, the scale of a `GradScaler`, the experts a router chose. Small tensors therefore carry a real CPU
tensor beside them, and an operation whose inputs are all known is also done on those. Everything else is
unknown, and a program that reads it gets a documented assumption, which is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

Tensor = Any

_INTEGER_BYTES = 64 << 20
"""Integer and boolean tensors up to this size keep their values.

Routing tables of large mixtures of experts.
"""
_FLOAT_ELEMENTS = 4096
"""Floating-point tensors up to this many elements keep their values: scales, schedules, counters."""
_ATTRIBUTE = "_simulated_value"
_CANNOT = (RuntimeError, TypeError, ValueError, LookupError, ArithmeticError, AttributeError, AssertionError)
"""What an operation raises that does not work on a CPU, or not with these values; never a lack of memory."""


class Known:
    """A value, and whether it still holds: views share the token, an unknown write spends it.

    The token is [holds] or [holds, True] where the value follows from an assumption.
    """

    __slots__ = ("density", "token", "value")

    def __init__(self, value: Tensor | None, token: list[bool], density: float | None = None) -> None:
        self.value = value
        self.token = token
        self.density = density
        """Where the value is not known: the expected share of non-zero elements."""


def fits(tensor: Tensor) -> bool:
    """Whether the values of a tensor of this shape and type are worth keeping."""
    if all(stride == 0 for stride in tensor.stride()):
        return True
    dtype = tensor.dtype
    if dtype.is_floating_point or dtype.is_complex:
        return bool(tensor.numel() <= _FLOAT_ELEMENTS)
    return bool(tensor.numel() * tensor.element_size() <= _INTEGER_BYTES)


def assumed_scalar(dtype: Any) -> Any:
    """What a program reads where nothing is known: 1.0, 0 or False."""
    if dtype is torch.bool:
        return False
    return 1.0 if dtype.is_floating_point or dtype.is_complex else 0


class Values:
    """Values of simulated tensors."""

    def __init__(self) -> None:
        self.assumed: dict[str, int] = {}
        """Operation -> how often a program was told an assumed value or shape."""
        self.notes: list[str] = []
        self.generator = torch.Generator()
        self.generator.manual_seed(0)

    def get(self, tensor: Tensor) -> Tensor | None:
        """The real CPU tensor that holds the values of `tensor`, None when they are unknown."""
        if not isinstance(tensor, FakeTensor):
            return tensor
        known = getattr(tensor, _ATTRIBUTE, None)
        return known.value if known is not None and known.token[0] else None

    def put(self, tensor: Tensor, value: Tensor, token: list[bool] | None = None) -> None:
        setattr(tensor, _ATTRIBUTE, Known(value, [True] if token is None else token))

    def is_assumed(self, tensor: Tensor) -> bool:
        """Whether the value of `tensor` follows from an assumption."""
        known = getattr(tensor, _ATTRIBUTE, None)
        return known is not None and len(known.token) > 1

    def forget(self, tensor: Tensor) -> None:
        """Something unknown was written into `tensor`."""
        known = getattr(tensor, _ATTRIBUTE, None)
        if known is not None:
            known.token[0] = False

    def density(self, tensor: Tensor) -> float | None:
        """Expected share of non-zero elements, None when nothing is known."""
        known = getattr(tensor, _ATTRIBUTE, None)
        return known.density if known is not None and known.token[0] else None

    def put_density(self, tensor: Tensor, share: float) -> None:
        setattr(tensor, _ATTRIBUTE, Known(None, [True], share))

    def put_constant(self, tensor: Tensor, value: Any) -> None:
        """Every element of `tensor` has this value; takes no memory."""
        self.put(tensor, torch.tensor(value).to(tensor.dtype).expand(tuple(tensor.shape)))

    def assume(self, operation: str) -> None:
        """Count that a program was told something that is not known."""
        self.assumed[operation] = self.assumed.get(operation, 0) + 1

    # --- propagation

    def propagate(self, info: Any, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> None:
        """Carry values through one operation that has just been done on simulated tensors."""
        if not info.is_plain:
            return
        known = not info.is_random and _all_known(args) and (not kwargs or _all_known(tuple(kwargs.values())))
        if known and not info.is_view:
            known = all(getattr(out, _ATTRIBUTE, None) is not None or fits(out) for out in outs)
            if not known and info.passes_density and len(outs) == 1:
                source: Any = self.get(args[0])
                self.put_density(outs[0], int(torch.count_nonzero(source)) / max(source.numel(), 1))
                return
        if known and (outs or info.written) and not info.is_uninitialized:
            if self._compute(info, func, args, kwargs, outs):
                return
            known = False
        if info.written and not known and not info.keeps_values:
            self._forget(info, args, kwargs)
        elif info.passes_density and not known and outs and args:
            self._pass_density(args[0], outs)
        elif info.is_comparison and len(outs) == 1 and self._is_open(outs[0]):
            # What a program would read, so that conditions made of it are consistent and loops come to an end.
            self.put(outs[0], torch.zeros(tuple(outs[0].shape), dtype=outs[0].dtype), [True, True])

    def _is_open(self, out: Tensor) -> bool:
        """A small result of which the operation's own kernel said nothing (`x == x` is true whatever x is)."""
        return out.numel() <= _FLOAT_ELEMENTS and getattr(out, _ATTRIBUTE, None) is None

    def _compute(self, info: Any, func: Any, args: Any, kwargs: Any, outs: list[Tensor]) -> bool:
        real_args = tuple(_real(argument) for argument in args)
        real_kwargs = {key: _real(value) for key, value in kwargs.items()}
        if real_kwargs.get("device") is not None:
            real_kwargs["device"] = torch.device("cpu")
        real_kwargs.pop("pin_memory", None)
        try:
            with torch.no_grad():
                result = func(*real_args, **real_kwargs)
        except _CANNOT:  # a value that cannot be computed is an unknown value
            return False
        assumed = _any_assumed(args)
        if info.written:  # in place: the values themselves were changed
            if assumed:
                for target in (args[position] for position, _ in info.written if position < len(args)):
                    _mark_assumed(target)
            return True
        results = result if isinstance(result, (tuple, list)) else (result,)
        results = [each for each in results if isinstance(each, torch.Tensor)]
        if len(results) == len(outs):
            token = [True, True] if assumed else None
            if info.is_view and args and isinstance(args[0], FakeTensor):
                token = getattr(args[0], _ATTRIBUTE).token
            for out, value in zip(outs, results):
                if value.shape == out.shape and value.dtype == out.dtype:
                    self.put(out, value, token)
        return True

    @staticmethod
    def _forget(info: Any, args: Any, kwargs: Any) -> None:
        for position, name in info.written:
            target = args[position] if position < len(args) else kwargs.get(name)
            for each in target if isinstance(target, (list, tuple)) else (target,):
                known = getattr(each, _ATTRIBUTE, None)
                if known is not None:
                    known.token[0] = False

    def _pass_density(self, source: Tensor, outs: list[Tensor]) -> None:
        known = getattr(source, _ATTRIBUTE, None)
        if known is not None and known.density is not None and known.token[0]:
            for out in outs:
                setattr(out, _ATTRIBUTE, Known(None, known.token, known.density))


def _any_assumed(arguments: Any) -> bool:
    for argument in arguments:
        if isinstance(argument, (list, tuple)):
            if _any_assumed(argument):
                return True
        else:
            known = getattr(argument, _ATTRIBUTE, None)
            if known is not None and len(known.token) > 1:
                return True
    return False


def _mark_assumed(target: Any) -> None:
    for each in target if isinstance(target, (list, tuple)) else (target,):
        known = getattr(each, _ATTRIBUTE, None)
        if known is not None and len(known.token) == 1:
            known.token.append(True)


def _all_known(arguments: Any) -> bool:
    for argument in arguments:
        if isinstance(argument, FakeTensor):
            known = getattr(argument, _ATTRIBUTE, None)
            if known is None or known.value is None or not known.token[0]:
                return False
        elif isinstance(argument, torch.Tensor):
            if not fits(argument):
                return False
        elif isinstance(argument, (list, tuple)) and argument and not _all_known(argument):
            return False
    return True


def _real(argument: Any) -> Any:
    if isinstance(argument, FakeTensor):
        return getattr(argument, _ATTRIBUTE).value
    if isinstance(argument, (list, tuple)):
        return type(argument)(_real(each) for each in argument)
    return argument
