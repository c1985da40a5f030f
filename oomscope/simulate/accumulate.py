"""What torch's backward pass does in place on a real device, but not for tensor subclasses or under a mode.

`torch::autograd::InputBuffer` does `old.add_(new)` when it holds the last reference to `old` and to its storage
(a view shares its storage with its base). Derivatives that fill a fresh tensor of zeros (of indexing, `gather`,
`max`, `topk`, `masked_select`) write into it. For tensor subclasses, and under any dispatch mode, both are done
out of place. Where the engine itself runs such an operation, the result therefore takes over the memory of its
first input.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from .tracker import Tracker

aten = torch.ops.aten
_OURS = os.path.dirname(os.path.abspath(__file__)) + os.sep
_ENGINE = ("_engine_run_backward",)
_lone_count: int | None = None
"""`_use_count()` of a gradient that only the engine holds, as seen from here."""
_probe: list[int] | None = None


def is_in_place(mode: Any, func: Any, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether the engine itself runs this operation and a real device would write into the first input.

    If so, `out` has taken over the memory of that input.
    """
    tracker = mode.tracker
    if func is aten.add.Tensor:
        if mode.adds_in_place and args[0].shape == out.shape:
            return bool(tracker.adopt(out, args[0]))
        return _joins(tracker, args, kwargs, out)
    if torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled() or not _called_by_engine():
        return False
    if func is aten.index_put.default and not (args[3] if len(args) > 3 else kwargs.get("accumulate")):
        return False  # the derivative of writing into a tensor by index: out of place everywhere
    zeros = args[0]
    if not isinstance(zeros, FakeTensor) or zeros.fake_device.type != "cuda":
        return False
    return bool(tracker.adopt(out, zeros))


def _joins(tracker: Tracker, args: Any, kwargs: Any, out: Any) -> bool:
    """Whether two gradients meet here, the first of which nobody else holds."""
    if kwargs or torch._C._current_graph_task_id() == -1 or torch.is_grad_enabled():
        return False
    old = args[0]
    if not isinstance(old, FakeTensor) or old.fake_device.type != "cuda" or not _called_by_engine():
        return False
    count = old._use_count()
    if _probe is not None:
        _probe.append(count)
        return True
    if _lone_count is None or count > _lone_count or old.shape != out.shape or old.dtype != out.dtype:
        return False
    if old._is_view():
        return False
    return tracker.adopt(out, old)


def calibrate(mode: Any) -> None:
    """Find out how many references a gradient has that nobody else holds.

    Done before the first backward pass of the script, not earlier: the autograd engine starts threads then, and
    processes can no longer be forked. Nothing is allocated, and nothing is saved for the backward pass.
    """
    global _lone_count, _probe
    if _probe is not None:
        return
    tracker, operations = mode.tracker, mode.operations
    _probe = []
    tracker.track = lambda _tensor: None
    try:
        with torch.enable_grad():
            leaf = torch.empty(4, device="cuda", requires_grad=True)
            outputs, gradients = (leaf.neg() + leaf.neg(),), (torch.empty(4, device="cuda"),)
            engine = torch.autograd.Variable._execution_engine  # not by way of functions that others watch
            engine.run_backward(
                outputs, gradients, False, False, (), allow_unreachable=True, accumulate_grad=True
            )
    finally:
        del tracker.track
        _lone_count, _probe = (_probe[0] if _probe else None), None
        mode.operations = operations


def _called_by_engine() -> bool:
    """Whether no Python code stands between this operation and the engine."""
    frame: Any = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename.startswith(_OURS):
        if frame.f_code.co_name == "run_backward":
            return True
        frame = frame.f_back
    return frame is None or frame.f_code.co_name in _ENGINE
