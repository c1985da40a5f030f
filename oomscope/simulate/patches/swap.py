"""Turns one tensor object into another: the same Python object with another C++ tensor behind it.

On a real device `parameter.data = moved` changes device in place. A CPU parameter and a simulated one are
different Python types, so the C++ tensors are swapped together with class, attributes and slots;
optimizers, tied modules and hooks that hold the object see the new tensor.
"""

from __future__ import annotations

import copyreg
from typing import Any

import torch

_missing = object()


def become(target: Any, source: Any) -> None:
    """Make `target` hold what `source` holds, keeping its identity, attributes and `requires_grad`."""
    if isinstance(target, torch.nn.Parameter):
        _parameter_becomes(target, source)
    else:
        _swap(target, source.detach())


def _parameter_becomes(parameter: Any, source: Any) -> None:
    attributes = dict(parameter.__dict__)
    new = (
        source
        if isinstance(source, torch.nn.Parameter)
        else torch.nn.Parameter(source, parameter.requires_grad)
    )
    gradient, parameter.grad = parameter.grad, None
    names = copyreg._slotnames  # type: ignore[attr-defined]  # not in the stubs
    slots = set(names(parameter.__class__)) | set(names(new.__class__))
    values = [(name, getattr(parameter, name, _missing), getattr(new, name, _missing)) for name in slots]
    _swap(parameter, new)
    for name, old_value, new_value in values:
        _set_slot(parameter, name, new_value)
        _set_slot(new, name, old_value)
    for name, value in attributes.items():
        parameter.__dict__.setdefault(name, value)
    if gradient is not None and gradient.device == parameter.device:
        parameter.grad = gradient


def _swap(first: Any, second: Any) -> None:
    dictionaries = first.__dict__, second.__dict__
    classes = first.__class__, second.__class__
    torch._C._swap_tensor_impl(first, second)
    first.__class__, second.__class__ = classes[1], classes[0]
    first.__dict__, second.__dict__ = dictionaries[1], dictionaries[0]


def _set_slot(owner: Any, name: str, value: Any) -> None:
    try:
        if value is _missing:
            delattr(owner, name)
        else:
            setattr(owner, name, value)
    except AttributeError:
        pass
