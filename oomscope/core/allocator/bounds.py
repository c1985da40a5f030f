"""How much of a need is fragmentation at all: what a placement with knowledge of the future would take."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from oomscope.core.allocator.model_config import AllocatorConfig
from oomscope.core.allocator.requests import ASK, DONE, GIVE, TRY, RequestTrace

IntArray = NDArray[np.int64]

#: More allocations than this take too long: the placement compares each with all others.
MAX_ALLOCATIONS = 20_000


@dataclass(frozen=True, slots=True)
class Lifetimes:
    """When each allocation of a trace was live, and how large its block is."""

    start: IntArray
    """(n,) int64, number of the request that asked."""
    end: IntArray
    """(n,) int64, number of the request that gave it back; the length of the trace when none did."""
    size: IntArray
    """(n,) int64 bytes, rounded to 512."""

    @classmethod
    def of(cls, trace: RequestTrace) -> Lifetimes:
        """Lifetimes in order of their start; failed requests last one request."""
        round_size = AllocatorConfig().round_size
        start = np.zeros(trace.n_slots, np.int64)
        end = np.full(trace.n_slots, len(trace), np.int64)
        size = np.zeros(trace.n_slots, np.int64)
        for number, (kind, slot) in enumerate(zip(trace.kind, trace.slot, strict=True)):
            if kind in (ASK, TRY):
                start[slot] = number
                size[slot] = round_size(trace.size[number])
                if kind == TRY:
                    end[slot] = number + 1
            elif kind in (GIVE, DONE):
                end[slot] = number
        return cls(start, end, size)

    def __len__(self) -> int:
        return len(self.start)


def offline_placement(lifetimes: Lifetimes) -> int | None:
    """Bytes of one contiguous range that could hold all allocations, placed with knowledge of the future.

    The best of two greedy orders (largest first, largest area first), each block into the smallest gap that
    is free during its life: an upper bound of the optimum, within a few percent of the live peak on
    recorded traces. None when there are more than `MAX_ALLOCATIONS`. Expandable segments can need less,
    because they move pages.
    """
    if len(lifetimes) > MAX_ALLOCATIONS:
        return None
    if not len(lifetimes):
        return 0
    size = lifetimes.size
    area = size.astype(np.float64) * (lifetimes.end - lifetimes.start)
    orders = (np.lexsort((lifetimes.start, -size)), np.argsort(-area, kind="stable"))
    return min(_place(lifetimes, order) for order in orders)


def _place(lifetimes: Lifetimes, order: IntArray) -> int:
    count = len(order)
    start, end, offset, size = (np.empty(count, np.int64) for _ in range(4))
    height = 0
    for placed, index in enumerate(order.tolist()):
        first, last, need = lifetimes.start[index], lifetimes.end[index], lifetimes.size[index]
        beside = (start[:placed] < last) & (end[:placed] > first)
        position = _smallest_gap(offset[:placed][beside], size[:placed][beside], int(need))
        start[placed], end[placed], offset[placed], size[placed] = first, last, position, need
        height = max(height, position + int(need))
    return height


def _smallest_gap(offset: IntArray, size: IntArray, need: int) -> int:
    """Lowest address of the smallest sufficient gap between blocks that are live at the same time."""
    if not len(offset):
        return 0
    order = np.argsort(offset, kind="stable")
    low = offset[order]
    top = np.maximum.accumulate(low + size[order])
    gap_start = np.concatenate(([0], top))
    gap = np.concatenate((low, [np.iinfo(np.int64).max])) - gap_start
    fitting = np.nonzero(gap >= need)[0]
    return int(gap_start[fitting[np.argmin(gap[fitting])]])
