"""The allocator's state before the first recorded row, worked out backwards from the final state.

A history is a ring: it starts in the middle of a run. What was there before follows from the final
segments, undone row by row. Rows that contradict each other are counted as problems: the file was cut,
edited or made up.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from dataclasses import dataclass, field

import numpy as np

from oomscope.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    FREE_REQUESTED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    FinalBlock,
    History,
    PoolId,
)
from oomscope.core.allocator.model import DEFAULT_POOL
from oomscope.core.allocator.model_config import SMALL_BUFFER

#: The problem that makes a replay pointless.
OVERLAPPING = "segments overlap"


@dataclass(slots=True)
class InitialBlock:
    """A block that was live before the first row."""

    address: int
    requested: int
    pending: bool
    """The program had already freed it; an event was outstanding."""
    size: int | None
    """Block bytes, known when it is still there at the end."""


@dataclass(slots=True)
class InitialSegment:
    """A segment of its own (not expandable) before the first row."""

    size: int
    stream: int
    small: bool
    pool: PoolId


@dataclass(slots=True)
class InitialState:
    """Everything that can be known about the state before the first row."""

    segments: dict[int, InitialSegment]
    """By address."""
    mapped: Intervals
    """Ranges with memory in expandable segments."""
    live: dict[int, InitialBlock]
    """By address, in no order."""
    free_requests_recorded: bool
    """False when the history has only `free_completed` rows, which then stand for the whole free."""
    problems: Counter[str] = field(default_factory=Counter)
    """What contradicts itself -> how often; empty for a file as torch wrote it."""

    @property
    def reserved_bytes(self) -> int:
        return sum(segment.size for segment in self.segments.values()) + self.mapped.total

    def memory(self) -> Intervals:
        """All ranges with memory; segments that overlap are a problem."""
        memory = self.mapped.copy()
        for address, segment in self.segments.items():
            if memory.overlaps(address, address + segment.size):
                self.problems[OVERLAPPING] += 1
            memory.add(address, address + segment.size)
        return memory


class Intervals:
    """Disjoint, sorted, coalesced address ranges."""

    def __init__(self) -> None:
        self.starts: list[int] = []
        self.ends: list[int] = []

    def add(self, start: int, end: int) -> None:
        """Add a range; joined with what touches it."""
        left = bisect_left(self.ends, start)
        right = bisect_right(self.starts, end)
        if left < right:
            start, end = min(start, self.starts[left]), max(end, self.ends[right - 1])
        self.starts[left:right] = [start]
        self.ends[left:right] = [end]

    def remove(self, start: int, end: int) -> bool:
        """Remove a range; False, and nothing removed, when not all of it is there."""
        index = bisect_right(self.starts, start) - 1
        if index < 0 or end > self.ends[index]:
            return False
        parts = [(self.starts[index], start), (end, self.ends[index])]
        kept = [part for part in parts if part[0] < part[1]]
        self.starts[index : index + 1] = [part[0] for part in kept]
        self.ends[index : index + 1] = [part[1] for part in kept]
        return True

    def overlaps(self, start: int, end: int) -> bool:
        """Whether a part of the range is in one of these."""
        index = bisect_right(self.starts, start) - 1
        if index >= 0 and self.ends[index] > start:
            return True
        return index + 1 < len(self.starts) and self.starts[index + 1] < end

    def copy(self) -> Intervals:
        twin = Intervals()
        twin.starts, twin.ends = self.starts[:], self.ends[:]
        return twin

    @property
    def total(self) -> int:
        return sum(self.ends) - sum(self.starts)


def reconstruct(history: History) -> InitialState:
    """The state before row 0. Takes time linear in the rows, plus sorting by address."""
    problems: Counter[str] = Counter()
    state = InitialState({}, Intervals(), {}, _requests_recorded(history), problems)
    _undo_segments(history, state)
    _undo_blocks(history, state)
    return state


def _requests_recorded(history: History) -> bool:
    """False when blocks are freed by a `free_completed` row alone."""
    if FREE_REQUESTED in history.action:
        return True
    allocated: set[int] = set()
    for action, address in zip(history.action, history.address, strict=True):
        if action == ALLOC:
            allocated.add(address)
        elif action == FREE_COMPLETED and address in allocated:
            return False
    return True


def _undo_segments(history: History, state: InitialState) -> None:
    segments = state.segments
    for final in history.segments:
        if final.expandable:
            state.mapped.add(final.address, final.address + final.size)
        else:
            segments[final.address] = InitialSegment(final.size, final.stream, final.small, final.pool)
    action, address, size = history.action, history.address, history.size
    codes = np.asarray(action, np.uint8)
    wanted = (codes >= SEGMENT_ALLOC) & (codes <= SEGMENT_UNMAP)
    for row in np.nonzero(wanted)[0][::-1].tolist():
        code, start = action[row], address[row]
        if code == SEGMENT_ALLOC:
            if segments.pop(start, None) is None:
                state.problems["a segment that was made is not there afterwards"] += 1
        elif code == SEGMENT_FREE:
            pool = history.pool[row] if history.pool is not None else DEFAULT_POOL
            segments[start] = InitialSegment(size[row], history.stream[row], size[row] == SMALL_BUFFER, pool)
        elif code == SEGMENT_MAP:
            if not state.mapped.remove(start, start + size[row]):
                state.problems["a range that was mapped is not there afterwards"] += 1
        else:
            state.mapped.add(start, start + size[row])


def _undo_blocks(history: History, state: InitialState) -> None:
    """Which blocks were live: those whose first row is a free, and those without any row."""
    final = {block.address: block for segment in history.segments for block in segment.blocks if block.live}
    codes = np.asarray(history.action, np.uint8)
    rows = np.nonzero(codes <= FREE_COMPLETED)[0]
    address = np.asarray(history.address, np.int64)[rows]
    order = np.argsort(address, kind="stable")
    rows, address = rows[order], address[order]
    code = codes[rows]
    starts = np.ones(len(rows), np.bool_)
    starts[1:] = address[1:] != address[:-1]
    ends = np.roll(starts, -1)
    _check_sequences(code, starts, state)
    for row in rows[starts & (code != ALLOC)].tolist():
        start = history.address[row]
        pending = history.action[row] == FREE_COMPLETED and state.free_requests_recorded
        state.live[start] = InitialBlock(start, history.size[row], pending, None)
    mentioned = set(address[starts].tolist())
    for start, block in final.items():
        if start not in mentioned:
            state.live[start] = InitialBlock(start, block.requested, block.pending, block.size)
    _check_ends(history, rows[ends].tolist(), final, state)
    _sizes_that_last(history, rows[starts], rows[ends], final, state)


def _sizes_that_last(
    history: History,
    first: np.ndarray[tuple[int], np.dtype[np.int64]],
    last: np.ndarray[tuple[int], np.dtype[np.int64]],
    final: dict[int, FinalBlock],
    state: InitialState,
) -> None:
    """A block whose only row is `free_requested` is still pending at the end, which has its size."""
    for row in first[first == last].tolist():
        if history.action[row] == FREE_REQUESTED:
            block = final.get(history.address[row])
            if block is not None:
                state.live[block.address].size = block.size


def _check_sequences(
    code: np.ndarray[tuple[int], np.dtype[np.uint8]],
    starts: np.ndarray[tuple[int], np.dtype[np.bool_]],
    state: InitialState,
) -> None:
    """At each address: alloc, free_requested, free_completed, and over again."""
    if len(code) < 2:
        return
    before, after = code[:-1], code[1:]
    same = ~starts[1:]
    twice = same & (after == ALLOC) & (before != FREE_COMPLETED)
    if twice.any():
        state.problems["a block is allocated twice without being freed"] += int(twice.sum())
    again = same & (after == FREE_REQUESTED) & (before != ALLOC)
    if again.any():
        state.problems["a block is freed twice"] += int(again.sum())
    wanted = FREE_REQUESTED if state.free_requests_recorded else ALLOC
    odd = same & (after == FREE_COMPLETED) & (before != wanted)
    if odd.any():
        state.problems["a free is completed that was not requested"] += int(odd.sum())


def _check_ends(history: History, last: list[int], final: dict[int, FinalBlock], state: InitialState) -> None:
    """The last row of each address must agree with the final state."""
    wrong = 0
    for row in last:
        block = final.get(history.address[row])
        code = history.action[row]
        if code == FREE_COMPLETED:
            wrong += block is not None
        else:
            wrong += block is None or block.pending != (code == FREE_REQUESTED)
    if wrong:
        state.problems["the final blocks disagree with the last rows of their addresses"] += wrong
