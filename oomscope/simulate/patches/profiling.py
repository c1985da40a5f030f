"""torch's profiler records the host only: there are no kernels to time."""

from __future__ import annotations

from typing import Any

import torch


def install(mode: Any) -> None:
    """Leave the CUDA activity out, which would warn at every operation."""
    profile_class = torch.profiler.profiler._KinetoProfile
    original = profile_class.__init__

    def init(self: Any, *, activities: Any = None, **kwargs: Any) -> None:
        original(self, activities=[torch.profiler.ProfilerActivity.CPU], **kwargs)

    profile_class.__init__ = init
