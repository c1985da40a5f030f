"""Operations of torchvision whose output size depends on values."""

from __future__ import annotations

from typing import Any

import torch

from .registry import kernel


@kernel("torchvision::nms")
def non_maximum_suppression(mode: Any, func: Any, args: Any, kwargs: Any) -> Any:
    """Indices of the boxes that stay: all of them, the upper bound, where boxes or scores are not known."""
    boxes, scores = args[0], args[1]
    known = [mode.values.get(each) for each in (boxes, scores)]
    if any(each is None for each in known) or mode.values.is_assumed(scores):
        mode.values.assume("torchvision::nms")
        kept = torch.arange(boxes.shape[0])
    else:
        kept = func(*known, args[2])
    with mode.fake:
        out = torch.empty(kept.shape[0], dtype=torch.int64, device=boxes.fake_device)
    mode.values.put(out, kept)
    return out
