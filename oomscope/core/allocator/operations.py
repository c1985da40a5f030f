"""Rows of a history grouped into what the program did: allocate, free, empty the cache.

One allocation can have many rows: frees that completed, segments returned, memory mapped, the allocation
itself. Which rows belong together is mostly certain, because rows of one allocation carry its call stack;
where stacks are missing there are several readings, and `Growth.readings` lists them, the likeliest first.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oomscope.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    OOM,
    RELEASE_ACTIONS,
    SEGMENT_ACTIONS,
    SNAPSHOT,
    History,
)

#: Rows that may lie between the first row of an allocation and its last.
_WITHIN = SEGMENT_ACTIONS | {FREE_COMPLETED, SNAPSHOT}

#: Kinds of operations. MALLOC, FREE, FREE_LATER and COMPLETED refer to a row; GROW and EMPTY to an entry of
#: `Operations.growths` and `Operations.bursts`.
MALLOC, FREE, FREE_LATER, COMPLETED, GROW, EMPTY = range(6)


@dataclass(frozen=True, slots=True)
class Reading:
    """One way to understand the rows of an allocation.

    `completed_before`: so many of the leading `free_completed` rows came from asking events before the
    search; the others from the synchronisation after a failed cudaMalloc. `emptied`: so many of the rows
    after them were a call of empty_cache() before the allocation.
    """

    completed_before: int = 0
    emptied: int = 0


@dataclass(slots=True)
class Growth:
    """An allocation that asked the driver for memory or returned some."""

    row: int
    """Its `alloc` or `oom` row."""
    failed: bool
    lead: list[int]
    """`free_completed` rows directly before, which may belong to it."""
    rows: list[int]
    """Segment rows in order, and `free_completed` rows between them."""
    readings: list[Reading]


@dataclass(slots=True)
class Operations:
    """The program's side of a history, in order."""

    kinds: list[int] = field(default_factory=list)
    rows: list[int] = field(default_factory=list)
    """Row of the history, or index into `growths` or `bursts`."""
    growths: list[Growth] = field(default_factory=list)
    bursts: list[list[int]] = field(default_factory=list)
    """Rows of each empty_cache()."""
    stray: list[int] = field(default_factory=list)
    """Rows that made memory for no allocation: something is missing."""


def read_operations(history: History, *, free_requests_recorded: bool = True) -> Operations:
    """Group the rows of `history`."""
    action = history.action
    codes = np.asarray(action, np.uint8)
    address = np.asarray(history.address, np.int64)
    kind = np.full(len(codes), -1, np.int8)
    kind[codes == ALLOC] = MALLOC
    kind[codes == FREE_REQUESTED] = FREE_LATER
    kind[codes == FREE_COMPLETED] = COMPLETED if free_requests_recorded else FREE
    if len(codes) > 1:
        pair = (codes[:-1] == FREE_REQUESTED) & (codes[1:] == FREE_COMPLETED)
        first = np.nonzero(pair & (address[:-1] == address[1:]))[0]
        kind[first] = FREE
        kind[first + 1] = -1
    operations = Operations()
    targets = _group_special_rows(history, kind, operations)
    rows = np.nonzero(kind >= 0)[0]
    operations.kinds = kind[rows].tolist()
    operations.rows = rows.tolist()
    for position in np.nonzero(kind[rows] >= GROW)[0].tolist():
        operations.rows[position] = targets[operations.rows[position]]
    return operations


def _group_special_rows(
    history: History, kind: np.ndarray[tuple[int], np.dtype[np.int8]], operations: Operations
) -> dict[int, int]:
    """Mark GROW and EMPTY in `kind`; returns row -> index into growths or bursts."""
    action = history.action
    codes = np.asarray(action, np.uint8)
    special = np.nonzero(np.isin(codes, [*SEGMENT_ACTIONS, OOM]))[0].tolist()
    targets: dict[int, int] = {}
    taken = -1
    for start in special:
        if start <= taken:
            continue
        end = start
        while end < len(action) and action[end] in _WITHIN:
            end += 1
        ends_well = end < len(action) and action[end] in (ALLOC, OOM)
        if not ends_well:
            while action[end - 1] not in SEGMENT_ACTIONS:
                end -= 1
        rows = [row for row in range(start, end) if action[row] != SNAPSHOT]
        taken = end if ends_well else end - 1
        burst = _emptied_rows(history, rows, end if ends_well else None)
        if burst:
            kind[rows[:burst]] = -1
            kind[rows[0]] = EMPTY
            targets[rows[0]] = len(operations.bursts)
            operations.bursts.append(rows[:burst])
        if not ends_well:
            operations.stray.extend(rows[burst:])
            kind[rows[burst:]] = -1
            continue
        kind[rows[burst:]] = -1
        _add_growth(history, kind, operations, targets, rows[burst:], end, may_lead=not burst)
    return targets


def _emptied_rows(history: History, rows: list[int], end: int | None) -> int:
    """How many of the first rows were surely an empty_cache(): by stack, or as no allocation follows."""
    count = 0
    while count < len(rows) and history.action[rows[count]] in RELEASE_ACTIONS:
        if end is not None and history.stack[rows[count]] not in history.emptied:
            break
        count += 1
    return count


def _add_growth(
    history: History,
    kind: np.ndarray[tuple[int], np.dtype[np.int8]],
    operations: Operations,
    targets: dict[int, int],
    rows: list[int],
    end: int,
    *,
    may_lead: bool,
) -> None:
    action = history.action
    failed = action[end] == OOM
    if not rows and not failed:  # everything before was an empty_cache()
        return
    releases = any(action[row] in RELEASE_ACTIONS for row in rows)
    lead: list[int] = []
    paired = False
    if may_lead and (releases or failed or any(action[row] == FREE_COMPLETED for row in rows)):
        lead, paired = _leading_frees(history, kind, rows[0] if rows else end)
    readings = _readings(history, lead, paired, rows, end)
    kind[end] = GROW
    targets[end] = len(operations.growths)
    operations.growths.append(Growth(end, failed, lead, rows, readings))


def _leading_frees(
    history: History, kind: np.ndarray[tuple[int], np.dtype[np.int8]], start: int
) -> tuple[list[int], bool]:
    """The `free_completed` rows just before `start`, taken out of `kind`; and if the first was half a pair.

    A free whose two rows are adjacent may be one that waited for an event, if it is the first of them.
    """
    row = start - 1
    lead: list[int] = []
    while row >= 0 and kind[row] == COMPLETED:
        lead.append(row)
        kind[row] = -1
        row -= 1
    lead.reverse()
    if row >= 1 and kind[row] == -1 and kind[row - 1] == FREE and history.action[row] == FREE_COMPLETED:
        kind[row - 1] = FREE_LATER
        lead.insert(0, row)
        return lead, True
    return lead, False


def _readings(history: History, lead: list[int], paired: bool, rows: list[int], end: int) -> list[Reading]:
    stack = history.stack
    wanted = stack[end]
    before = 0
    for number, row in enumerate(lead):
        foreign = wanted >= 0 and stack[row] >= 0 and stack[row] != wanted
        if foreign or (number == 0 and paired and (stack[row] == stack[row - 1] or wanted < 0)):
            before = number + 1
    counts = [before, len(lead), *range(len(lead))]
    readings = [Reading(count) for count in dict.fromkeys(counts)]
    releasing = foreign_rows = 0
    while releasing < len(rows) and history.action[rows[releasing]] in RELEASE_ACTIONS:
        mark = stack[rows[releasing]]
        foreign_rows += mark >= 0 and wanted >= 0 and mark != wanted
        releasing += 1
    if foreign_rows:
        readings.insert(0, Reading(len(lead), foreign_rows))
    elif releasing and (wanted < 0 or stack[rows[0]] < 0):
        readings.append(Reading(len(lead), releasing))
    return readings
