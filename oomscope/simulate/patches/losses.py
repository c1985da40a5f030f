"""The CTC loss with lengths in tensors: torch takes another way for tensor subclasses, which mixes devices."""

from __future__ import annotations

from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor


def install(mode: Any) -> None:
    """Read the lengths first, as `ctc_loss` does for plain tensors (aten/src/ATen/native/LossCTC.cpp)."""
    plain = torch.ctc_loss

    def ctc_loss(
        log_probs: Any, targets: Any, input_lengths: Any, target_lengths: Any, *args: Any, **kwargs: Any
    ) -> Any:
        if isinstance(log_probs, FakeTensor):
            longest = targets.shape[1] if targets.dim() == 2 else targets.shape[0]
            input_lengths = _numbers(mode, input_lengths, log_probs.shape[0])
            target_lengths = _numbers(mode, target_lengths, longest)
        return plain(log_probs, targets, input_lengths, target_lengths, *args, **kwargs)

    torch.ctc_loss = ctc_loss


def _numbers(mode: Any, lengths: Any, most: int) -> Any:
    """Lengths that are not known are the longest that are possible."""
    if not isinstance(lengths, torch.Tensor):
        return lengths
    value = mode.values.get(lengths)
    if value is None or mode.values.is_assumed(lengths):
        mode.values.assume("aten::ctc_loss")
        return [most] * lengths.numel()
    return value.tolist()
