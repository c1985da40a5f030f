"""Which pool a row of a history belongs to: rows say so since torch 2.12; before, only final segments do."""

from __future__ import annotations

from bisect import bisect_right

from oomscope.core.allocator.history import (
    OOM,
    RELEASE_ACTIONS,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_UNMAP,
    History,
    PoolId,
)
from oomscope.core.allocator.model import DEFAULT_POOL


class PoolFinder:
    """Pool of each row: as recorded, or that of the final segment around the address since that was made."""

    def __init__(self, history: History) -> None:
        self._history = history
        self._private = [each for each in history.segments if each.pool != DEFAULT_POOL]
        self._starts = [each.address for each in self._private]
        self._since = [-1] * len(self._private)
        self.any = bool(self._private) or (history.pool is not None and set(history.pool) != {DEFAULT_POOL})
        if self._private and history.pool is None:
            self._find_beginnings()
        self.unknown_rows = 0
        """Rows that return segments of which no one knows the pool."""
        if self._private and history.pool is None:
            self.unknown_rows = sum(action in RELEASE_ACTIONS for action in history.action)

    def _find_beginnings(self) -> None:
        """An address can have been another segment's before."""
        history = self._history
        for row, (action, address) in enumerate(zip(history.action, history.address, strict=True)):
            if action in (SEGMENT_ALLOC, SEGMENT_UNMAP, SEGMENT_FREE):
                index = bisect_right(self._starts, address) - 1
                if index >= 0 and address < self._starts[index] + self._private[index].size:
                    self._since[index] = row

    def of_row(self, row: int) -> PoolId:
        """Pool of the allocation or segment in `row`; the default pool when nothing says otherwise."""
        history = self._history
        if history.pool is not None:
            return history.pool[row]
        index = bisect_right(self._starts, history.address[row]) - 1
        if index < 0 or history.action[row] == OOM or row < self._since[index]:
            return DEFAULT_POOL
        segment = self._private[index]
        return segment.pool if history.address[row] < segment.address + segment.size else DEFAULT_POOL
