"""Replaces functions of torch.distributed wherever torch has copied their names to."""

from __future__ import annotations

import sys
from typing import Any

import torch


def replace(functions: dict[str, Any]) -> dict[str, Any]:
    """Put new functions in the place of those of `torch.distributed.distributed_c10d`.

    Returns the old ones.
    """
    c10d = torch.distributed.distributed_c10d
    old = {name: getattr(c10d, name) for name in functions if hasattr(c10d, name)}
    by_identity = {id(function): name for name, function in old.items()}
    for name, function in functions.items():
        setattr(c10d, name, function)
        setattr(torch.distributed, name, function)
    for module in list(sys.modules.values()):
        if getattr(module, "__name__", "").startswith(("torch.distributed", "torch.nn.parallel")):
            for key, value in list(vars(module).items()):
                found = by_identity.get(id(value))
                if found is not None and old[found] is value:
                    setattr(module, key, functions[found])
    return old
