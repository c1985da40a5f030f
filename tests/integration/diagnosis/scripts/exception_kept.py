# ruff: noqa: T201, PERF401
"""A caught out-of-memory error is kept, and with its traceback the tensors of the failed function."""

import torch
from torch import nn


def fill() -> Exception | None:
    layers = []
    try:
        for _ in range(100):
            layers.append(nn.Linear(10000, 10000, device="cuda"))
    except torch.OutOfMemoryError as error:
        return error
    return None


first = fill()
print("first:", type(first).__name__)
second = fill()
print("second:", type(second).__name__)
if second is not None:
    raise second
