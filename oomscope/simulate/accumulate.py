"""Gradients that meet in the autograd engine are added in place, as on a real device.

`torch::autograd::InputBuffer` does `old.add_(new)` when it holds the last reference to `old`, but adds out
of place for tensor subclasses and under any dispatch mode. Where the engine itself adds and nobody else
holds `old`, the sum therefore takes over old's memory.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .tracker import Tracker

_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ENGINE = ("_engine_run_backward",)
_lone_count: int | None = None
"""`_use_count()` of a gradient that only the engine holds, as seen from here."""
_probe: list[int] | None = None


def joins_in_place(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether this addition is the engine's own.

    If so, `out` has taken over the memory of its first input.
    """
    if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    old = args[0]
    if not isinstance(old, FakeTensor) or old.fake_device.type != "cuda" or not _called_by_engine():
        return False
    count = old._use_count()
    if _probe is not None:
        _probe.append(count)
        return False
    if _lone_count is None or count > _lone_count or old.shape != out.shape or old.dtype != out.dtype:
        return False
    return tracker.adopt(out, old)


def calibrate() -> None:
    """Find out how many references a gradient has that nobody else holds."""
    global _lone_count, _probe
    _probe = []
    leaf = torch.empty(4, device="cuda", requires_grad=True)
    (leaf.sin() + leaf.cos()).sum().backward()
    _lone_count = _probe[0] if _probe else None
    _probe = None


def _called_by_engine() -> bool:
    """Whether no Python code stands between this operation and the engine."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_name == "run_backward":
            return True
        frame = frame.f_back
    return frame is None or frame.f_code.co_name in _ENGINE
