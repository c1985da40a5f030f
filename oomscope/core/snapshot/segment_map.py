"""Segments, the free bytes inside them, and what keeps them from being given back."""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass

import numpy as np

from oomscope.core.snapshot.columns import Action, BlockState, BoolArray, IntArray
from oomscope.core.snapshot.lifetimes import Lifetimes
from oomscope.core.snapshot.model import DEFAULT_POOL, DeviceSnapshot, Snapshot


@dataclass(frozen=True, slots=True)
class PoolUse:
    """One pool on one stream: a request can be served only from its own."""

    pool: tuple[int, int]
    """(0, 0) is the default pool; the others belong to CUDA graphs or MemPools."""
    stream: int
    """Stream handle."""
    is_large: bool
    segments: int
    reserved_bytes: int
    active_bytes: int
    inactive_bytes: int
    largest_free_bytes: int
    """Largest inactive block: a larger request needs a new segment even if `inactive_bytes` would cover
    it."""
    free_blocks: int
    whole_free_bytes: int
    """In segments without any live block: given back to the driver before an out-of-memory error is
    raised."""
    stranded_bytes: int
    """Inactive bytes beside live blocks in plain segments: nothing can give them back (torch's
    inactive_split)."""
    pending_bytes: int
    """Freed by the program, but still in use on another stream."""

    @property
    def is_private(self) -> bool:
        return self.pool != DEFAULT_POOL


@dataclass(frozen=True, slots=True)
class Pin:
    """A segment that is mostly free, and the largest live block that keeps it."""

    address: int
    total_bytes: int
    free_bytes: int
    live_blocks: int
    live_bytes: int
    stack: int
    """Stack of the largest live block, or -1."""


def pool_use(snapshot: Snapshot, device: DeviceSnapshot) -> list[PoolUse]:
    """Use of each (pool, stream, size class), most reserved bytes first."""
    segments, blocks = device.segments, device.blocks
    if not len(segments):
        return []
    key = (segments.pool.astype(np.int64) << 33) | (segments.stream.astype(np.int64) << 1) | segments.is_large
    distinct, group = np.unique(key, return_inverse=True)
    owner = group[blocks.segment]
    free = blocks.state == BlockState.INACTIVE
    inactive, whole, _ = free_by_segment(device)
    strands = np.where(whole | segments.is_expandable, 0, inactive)
    rows = []
    for number in range(len(distinct)):
        mine, inside = group == number, owner == number
        first = int(np.flatnonzero(mine)[0])
        sizes = blocks.size[inside & free]
        rows.append(
            PoolUse(
                pool=snapshot.pools[int(segments.pool[first])],
                stream=snapshot.streams[int(segments.stream[first])],
                is_large=bool(segments.is_large[first]),
                segments=int(mine.sum()),
                reserved_bytes=int(segments.total_size[mine].sum()),
                active_bytes=int(segments.active_size[mine].sum()),
                inactive_bytes=int(sizes.sum()),
                largest_free_bytes=int(sizes.max()) if len(sizes) else 0,
                free_blocks=len(sizes),
                whole_free_bytes=int(inactive[mine & whole & ~segments.is_expandable].sum()),
                stranded_bytes=int(strands[mine].sum()),
                pending_bytes=int(blocks.size[inside & (blocks.state == BlockState.PENDING_FREE)].sum()),
            )
        )
    return sorted(rows, key=lambda row: -row.reserved_bytes)


def free_by_segment(device: DeviceSnapshot) -> tuple[IntArray, BoolArray, IntArray]:
    """Per segment: inactive bytes, whether all of it is inactive, and the largest inactive block."""
    segments, blocks = device.segments, device.blocks
    free = blocks.state == BlockState.INACTIVE
    inactive = np.zeros(len(segments), np.int64)
    np.add.at(inactive, blocks.segment[free], blocks.size[free])
    live = np.bincount(blocks.segment[~free], minlength=len(segments))
    largest = np.zeros(len(segments), np.int64)
    np.maximum.at(largest, blocks.segment[free], blocks.size[free])
    return inactive, (live == 0) & (inactive > 0), largest


def pins(device: DeviceSnapshot, count: int = 20) -> list[Pin]:
    """Plain segments with more free than live bytes, most free first."""
    segments, blocks = device.segments, device.blocks
    inactive, whole, _ = free_by_segment(device)
    held = np.flatnonzero(~whole & ~segments.is_expandable & (2 * inactive > segments.total_size))
    found = []
    for number in held[np.argsort(-inactive[held], kind="stable")][:count].tolist():
        rows = np.arange(segments.first_block[number], segments.first_block[number + 1])
        rows = rows[blocks.state[rows] != BlockState.INACTIVE]
        largest = int(rows[np.argmax(blocks.size[rows])])
        found.append(
            Pin(
                address=int(segments.address[number]),
                total_bytes=int(segments.total_size[number]),
                free_bytes=int(inactive[number]),
                live_blocks=len(rows),
                live_bytes=int(blocks.size[rows].sum()),
                stack=int(blocks.stack[largest]),
            )
        )
    return found


@dataclass(slots=True)
class SegmentsAt:
    """The segments at some moment of the history, with the allocations in them."""

    address: IntArray
    size: IntArray
    allocation: IntArray
    """(m,) int64, allocations alive at that moment, by address: rows of `Lifetimes`."""
    segment: IntArray
    """(m,) int64, row in `address` of the segment that holds each, -1 when none does."""


def segments_at(device: DeviceSnapshot, lives: Lifetimes, row: int) -> SegmentsAt:
    """Segments and live allocations just after `row`, found by undoing later rows from the end.

    Expandable ranges are joined where they touch. Sizes of live blocks are the requested ones: the exact
    blocks take a replay.
    """
    spans = dict(zip(device.segments.address.tolist(), device.segments.total_size.tolist(), strict=True))
    events = device.events
    changed = np.flatnonzero(
        (events.action >= Action.SEGMENT_ALLOC) & (events.action <= Action.SEGMENT_UNMAP)
    )
    changed = changed[changed > row]
    ranges = _Ranges(spans)
    for number in changed[::-1].tolist():
        start, size = int(events.address[number]), int(events.size[number])
        if events.action[number] in (Action.SEGMENT_ALLOC, Action.SEGMENT_MAP):
            ranges.remove(start, start + size)
        else:
            ranges.add(start, start + size, join=events.action[number] == Action.SEGMENT_UNMAP)
    starts, ends = ranges.sorted()
    address = np.array(starts, np.int64)
    alive = np.flatnonzero(lives.at(row))
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    place = np.searchsorted(address, lives.address[alive], side="right") - 1
    sizes = np.array(ends, np.int64) - address
    inside = place >= 0
    inside[inside] = lives.address[alive][inside] < address[place[inside]] + sizes[place[inside]]
    return SegmentsAt(address, sizes, alive, np.where(inside, place, -1))


class _Ranges:
    """Disjoint address ranges. Undoing a map takes a part out of a range, so ranges may be cut and joined."""

    def __init__(self, spans: dict[int, int]) -> None:
        self._end = {start: start + size for start, size in spans.items()}
        self._starts: list[int] = sorted(self._end)

    def remove(self, start: int, stop: int) -> None:
        index = bisect_right(self._starts, start) - 1
        if index < 0:
            return
        first = self._starts[index]
        last = self._end[first]
        if last < stop:
            return
        del self._end[first]
        del self._starts[index]
        for begin, end in ((first, start), (stop, last)):
            if begin < end:
                self._end[begin] = end
                insort(self._starts, begin)

    def add(self, start: int, stop: int, *, join: bool) -> None:
        index = bisect_left(self._starts, start)
        if join:
            if index and self._end[self._starts[index - 1]] == start:
                index -= 1
                start = self._starts.pop(index)
                del self._end[start]
            if index < len(self._starts) and self._starts[index] == stop:
                stop = self._end.pop(self._starts.pop(index))
        self._end[start] = stop
        insort(self._starts, start)

    def sorted(self) -> tuple[list[int], list[int]]:
        return self._starts, [self._end[start] for start in self._starts]
