"""Jagged nested tensors on the simulated device: their ragged dimension is an ordinary symbol."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def install(mode: Any) -> None:
    """Give simulated offsets a symbol of their own, as real ones have.

    For fake tensors torch asks an active `FakeTensorMode`, and on the simulated device there is none.
    """
    from torch.nested._internal import nested_tensor
    from torch.nested._internal.nested_int import NestedIntNode

    original = nested_tensor.get_tensor_symint

    def get_tensor_symint(tensor: Any, *, coeff: int = 1) -> Any:
        if not isinstance(tensor, FakeTensor) or tensor.fake_mode is not mode.fake:
            return original(tensor, coeff=coeff)
        registry = nested_tensor._tensor_symint_registry
        found = registry.get(tensor)
        if found is None:
            found = torch.SymInt(NestedIntNode(nested_tensor._tensor_id_counter, coeff))
            nested_tensor._tensor_id_counter += 1
            registry[tensor] = found
        return found

    nested_tensor.get_tensor_symint = get_tensor_symint
