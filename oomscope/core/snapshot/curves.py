"""Bytes over time: live and reserved after every row, and their peaks.

A history says only what changed; the level comes from the segments at its end: level before row 0 = final
level - sum of all changes.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oomscope.core.snapshot.columns import Action, BoolArray, Events, IntArray
from oomscope.core.snapshot.lifetimes import Lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot

BEFORE_FIRST_ROW = -1
"""Peak row of a device that held most before its history began."""

SMALL_REQUEST = 1 << 20
"""Requests up to this many bytes go to the small pool (kSmallSize, c10/core/AllocatorConfig.h)."""


@dataclass(slots=True)
class Curve:
    """A level in bytes, before the first row and after each row."""

    before: int
    after: IntArray
    """(n_events,) int64."""

    def at(self, row: int) -> int:
        """Level just after `row`; row -1 is before the first one."""
        return (
            self.before if row < 0 or not len(self.after) else int(self.after[min(row, len(self.after) - 1)])
        )

    def peak(self, stop: int | None = None) -> tuple[int, int]:
        """(highest level, first row that reaches it) before `stop`; row -1 is the level before row 0."""
        part = self.after[:stop]
        if not len(part):
            return self.before, BEFORE_FIRST_ROW
        row = int(np.argmax(part))
        return (int(part[row]), row) if int(part[row]) > self.before else (self.before, BEFORE_FIRST_ROW)


def requested_changes(events: Events) -> IntArray:
    """(n,) int64 change of live requested bytes at each row: + at alloc, - at free_completed."""
    sign = _SIGN_OF_REQUESTED[events.action]
    if not (events.action == Action.FREE_COMPLETED).any():
        # The recorder can be told to skip rows; then the request to free is the best that is known.
        sign = np.where(events.action == Action.FREE_REQUESTED, -1, sign)
    changes: IntArray = sign * events.size
    return changes


def live_curve(device: DeviceSnapshot) -> Curve:
    """Requested bytes of blocks that are allocated or wait for a stream."""
    changes = requested_changes(device.events)
    after = np.cumsum(changes)
    final = int(device.segments.requested_size.sum())
    before = final - (int(after[-1]) if len(after) else 0)
    after += before
    return Curve(before, after)


def reserved_curve(device: DeviceSnapshot) -> Curve:
    """Bytes of segments held from the driver."""
    changes = _SIGN_OF_RESERVED[device.events.action] * device.events.size
    after = np.cumsum(changes)
    final = int(device.segments.total_size.sum())
    before = final - (int(after[-1]) if len(after) else 0)
    after += before
    return Curve(before, after)


def curve_of(lives: Lifetimes, which: BoolArray) -> Curve:
    """Live requested bytes of some of the allocations."""
    changes = np.zeros(lives.n_events + 1, np.int64)
    size = lives.size[which]
    birth, death = lives.birth[which], lives.death[which]
    born = birth >= 0
    np.add.at(changes, birth[born], size[born])
    np.subtract.at(changes, death, size)
    before = int(size[~born].sum())
    return Curve(before, before + np.cumsum(changes[:-1]))


def curves_by(lives: Lifetimes, group: IntArray, count: int, rows: IntArray) -> IntArray:
    """Live requested bytes of each group just after each of `rows`.

    Args:
        lives: the allocations.
        group: (n_allocations,) int, group of each, 0 to `count` - 1.
        count: number of groups.
        rows: (m,) int64 ascending.

    Returns:
        (count, m) int64. O(n + count * m): changes are summed between the rows asked for, not at every row.
    """
    columns = len(rows) + 1
    table = np.zeros(count * columns, np.int64)
    start = np.searchsorted(rows, lives.birth)  # first asked row at or after the birth
    end = np.searchsorted(rows, lives.death)
    np.add.at(table, group * columns + start, lives.size)
    np.subtract.at(table, group * columns + end, lives.size)
    levels: IntArray = np.cumsum(table.reshape(count, columns), axis=1)[:, :-1]
    return levels


def column_rows(after: IntArray, start: int, stop: int, width: int) -> IntArray:
    """The row that stands for each of `width` columns: the highest of its stretch."""
    count = stop - start
    if count <= 0 or not len(after):
        return np.full(width, start - 1 if len(after) else -1, np.int64)
    if count <= width:
        rows: IntArray = start + (np.arange(width) * count) // width
        return rows
    edges = start + (np.arange(width + 1) * count) // width
    best = np.maximum.reduceat(after[start:stop], edges[:-1] - start)
    found = [int(np.argmax(after[a:b] == top)) for a, b, top in zip(edges[:-1], edges[1:], best, strict=True)]
    return edges[:-1] + np.array(found, np.int64)


def _signs(plus: tuple[Action, ...], minus: tuple[Action, ...]) -> IntArray:
    table = np.zeros(256, np.int64)
    table[list(plus)] = 1
    table[list(minus)] = -1
    return table


_SIGN_OF_REQUESTED = _signs((Action.ALLOC,), (Action.FREE_COMPLETED,))
_SIGN_OF_RESERVED = _signs(
    (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP), (Action.SEGMENT_FREE, Action.SEGMENT_UNMAP)
)
