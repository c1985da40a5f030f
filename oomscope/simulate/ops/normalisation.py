"""Batch normalisation over all ranks (`SyncBatchNorm`), for which torch has no fake kernels.

Source: aten/src/ATen/native/cuda/Normalization.cu; statistics are float32 also for half types.
"""

from __future__ import annotations

from typing import Any

import torch

from .registry import kernel


def _channels(mode: Any, source: Any, dtype: Any = None) -> Any:
    if dtype is None:
        dtype = torch.float64 if source.dtype is torch.float64 else torch.float32
    with mode.fake:
        return torch.empty(source.shape[1], dtype=dtype, device=source.fake_device)


@kernel(
    "aten::batch_norm_stats", "aten::batch_norm_gather_stats", "aten::batch_norm_gather_stats_with_counts"
)
def statistics(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(mean, inverse standard deviation) of each channel."""
    return _channels(mode, args[0]), _channels(mode, args[0])


@kernel("aten::batch_norm_elemt", "aten::batch_norm_backward_elemt")
def elementwise(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """The normalised input, or its gradient, in the layout of the first tensor."""
    with mode.fake:
        return torch.empty_like(args[0])


@kernel("aten::batch_norm_backward_reduce")
def reduce(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """(sum of gradients, weighted sum, gradient of the weight, of the bias); what is not wanted is None."""
    source, weight = args[1], args[4]
    of_input, of_weight, of_bias = args[5:8]
    kind = None if weight is None else weight.dtype
    return (
        *(_channels(mode, source) if of_input else None for _ in range(2)),
        *(_channels(mode, source, kind) if wanted else None for wanted in (of_weight, of_bias)),
    )
