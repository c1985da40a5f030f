"""What the memory at the peak was for, by category and by module.

Each allocation is judged when all is known: whether its memory became a parameter, a gradient or optimizer
state, and whether a tensor of the forward pass lived on into the backward pass.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch._subclasses.fake_tensor import FakeTensor

from .tracker import Allocation, Peak, Tracker

#: Every category, in the order of reports.
CATEGORIES = (
    "parameters",
    "gradients",
    "optimizer state",
    "activations",
    "temporaries",
    "workspaces",
    "inputs",
    "buffers",
    "communication",
    "other",
)


def mark_optimizer(tracker: Tracker, optimizer: Any) -> None:
    """Say which memory is a parameter, its gradient or its state."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            _mark(tracker, parameter, "parameters")
    mark_gradients(tracker, optimizer)
    for state in list(optimizer.state.values()):
        if isinstance(state, dict):
            for value in state.values():
                _mark(tracker, value, "optimizer state")


def mark_gradients(tracker: Tracker, optimizer: Any) -> None:
    """Say which memory holds the gradients of an optimizer's parameters."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter.requires_grad:
                _mark(tracker, parameter.grad, "gradients")


def _mark(tracker: Tracker, tensor: Any, category: str) -> None:
    tensor = getattr(tensor, "_local_tensor", tensor)
    if isinstance(tensor, FakeTensor) and tensor.fake_device.type == "cuda":
        allocation = tracker.allocation_of(tensor)
        if allocation is not None:
            allocation.category = category


def category_of(allocation: Allocation) -> str:
    """What an allocation was for."""
    if allocation.category is not None:
        return allocation.category
    if allocation.phase == "forward":
        if not allocation.grad or allocation.died_epoch == allocation.born_epoch:
            return "temporaries"
        return "activations"
    if allocation.phase == "backward":
        return "activations" if allocation.grad else "temporaries"
    return "temporaries" if allocation.phase == "optimizer" else "other"


def alive_at(tracker: Tracker, peak: Peak) -> Iterable[Allocation]:
    """Everything that was allocated at the peak."""
    for allocation in list(tracker.allocations):
        if allocation.birth <= peak.event:
            yield allocation
    yield from peak.died_since


def unknown_bytes(tracker: Tracker, index: int) -> tuple[int, int]:
    """By how much the peak of card `index` may be lower and higher, because libraries choose sizes of their own."""
    peak = tracker.peaks.get(index)
    ranges = [] if peak is None else [each.unknown for each in alive_at(tracker, peak)]
    return sum(each[0] for each in ranges), sum(each[1] for each in ranges)


def compose(tracker: Tracker, index: int) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The peak of card `index` as [{"category", "bytes"}] and [{"module", "bytes"}], largest first."""
    for optimizer in list(tracker.optimizers):
        mark_optimizer(tracker, optimizer)
    peak = tracker.peaks.get(index)
    categories: dict[str, int] = {}
    modules: dict[str, int] = {}
    if peak is not None:
        for allocation in alive_at(tracker, peak):
            category = category_of(allocation)
            categories[category] = categories.get(category, 0) + allocation.size
            if category in ("activations", "temporaries", "workspaces"):
                name = allocation.module or ""
                modules[name] = modules.get(name, 0) + allocation.size
    by_size = sorted(categories.items(), key=lambda item: -item[1])
    by_module = sorted(modules.items(), key=lambda item: -item[1])[:200]
    return (
        [{"category": name, "bytes": size} for name, size in by_size],
        [{"module": name, "bytes": size} for name, size in by_module],
    )
