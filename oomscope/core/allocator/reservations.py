"""The expandable segments of a history: which ranges belong to one reservation of address space.

A reservation leaves no row. It shows in the ranges that are mapped into it, which share the stream, the
pool and the size class. Address space is reused: what lies at an address can change during a history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection
from dataclasses import dataclass, field

import numpy as np

from oomscope.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    OOM,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
    PoolId,
)
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig
from oomscope.core.allocator.model_config import SMALL_SIZE
from oomscope.core.allocator.model_driver import UNLIMITED_TOTAL
from oomscope.core.allocator.pools import PoolFinder
from oomscope.core.allocator.reconstruct import InitialState

#: Address space for the largest card that is assumed when the rows do not show how much it is.
WIDEST = UNLIMITED_TOTAL + UNLIMITED_TOTAL // 8


@dataclass(frozen=True, slots=True)
class Kind:
    """What the ranges of one reservation have in common."""

    stream: int
    small: bool
    pool: PoolId


@dataclass(slots=True)
class Span:
    """A reservation that exists before the first row, with its mapped ranges."""

    base: int
    kind: Kind
    mapped: list[tuple[int, int]] = field(default_factory=list)


class Reservations:
    """The reservations before the first row, and where later ones appear."""

    def __init__(
        self, history: History, state: InitialState, config: AllocatorConfig, pools: PoolFinder
    ) -> None:
        self._history = history
        initial = _initial_ranges(history, state, config, pools)
        census = _Census(initial)
        census.follow(history, config, pools)
        self.spans = census.spans
        self._births = census.births
        self.total_bytes = (census.size - 2 * config.large_segment_size) * 8 // 9

    def next_place(
        self, row: int, stream: int, small: bool, pool: PoolId, existing: Collection[int]
    ) -> int | None:
        """Where the next new reservation of this kind appears, from `row` on; None when none does."""
        births = self._births.get(Kind(stream, small, pool), [])
        for index in range(bisect_left(births, (row, 0)), len(births)):
            if births[index][1] not in existing:
                return births[index][1]
        return None


class _Census:
    """Follows reservations through the rows: which exist, where their bases are, how far apart."""

    def __init__(self, initial: list[tuple[int, int, Kind]]) -> None:
        self.size = WIDEST
        """Bytes of one reservation, as far as the rows show: the least distance between two at one time.

        All have about the same size, 1.125 times the card's memory, and do not overlap.
        """
        self.births: dict[Kind, list[tuple[int, int]]] = {}
        """Kind -> (row, base) of the first map row of each reservation, which is at its base."""
        self.spans: list[Span] = []
        self._bases: list[int] = []
        self._kinds: dict[int, Kind] = {}
        self._mapped: dict[int, int] = {}
        self._initial: dict[int, Span] = {}
        for start, end, kind in initial:
            last = self.spans[-1] if self.spans else None
            if last is None or last.kind != kind or end > last.base + WIDEST:
                last = Span(start, kind)
                self.spans.append(last)
                self._initial[start] = last
                self._add(start, kind)
            last.mapped.append((start, end))
            self._mapped[last.base] += end - start

    def follow(self, history: History, config: AllocatorConfig, pools: PoolFinder) -> None:
        codes = np.asarray(history.action, np.uint8)
        ends = np.nonzero((codes == ALLOC) | (codes == OOM))[0]
        for row in np.nonzero((codes == SEGMENT_MAP) | (codes == SEGMENT_UNMAP))[0].tolist():
            if codes[row] == SEGMENT_MAP:
                index = int(np.searchsorted(ends, row))
                end = int(ends[index]) if index < len(ends) else None
                kind = _kind_of_map(history, row, end, config, pools)
                self._map(row, history.address[row], history.size[row], kind)
            else:
                self._unmap(history.address[row], history.size[row])

    def _add(self, base: int, kind: Kind) -> None:
        index = bisect_left(self._bases, base)
        if index > 0:
            self.size = min(self.size, base - self._bases[index - 1])
        if index < len(self._bases):
            self.size = min(self.size, self._bases[index] - base)
        self._bases.insert(index, base)
        self._kinds[base] = kind
        self._mapped[base] = 0

    def _map(self, row: int, address: int, size: int, kind: Kind) -> None:
        index = bisect_right(self._bases, address) - 1
        base = self._bases[index] if index >= 0 else None
        if base is None or self._kinds[base] != kind or address >= base + WIDEST:
            base = self._extended_down(index + 1, address, kind)
            if base is None:
                base = address
                self.births.setdefault(kind, []).append((row, base))
                self._add(base, kind)
        self._mapped[base] += size

    def _extended_down(self, index: int, address: int, kind: Kind) -> int | None:
        """A reservation from before the first row may begin lower, with a part that had no memory yet.

        Free address space in an existing reservation always comes before a new one.
        """
        if index == len(self._bases):
            return None
        base = self._bases[index]
        span = self._initial.get(base)
        if span is None or span.kind != kind or span.mapped[-1][1] > address + WIDEST:
            return None
        mapped = self._mapped[base]
        self._remove(base)
        span.base = address
        self._initial[address] = span
        self._add(address, kind)
        self._mapped[address] = mapped
        return address

    def _unmap(self, address: int, size: int) -> None:
        index = bisect_right(self._bases, address) - 1
        if index >= 0:
            base = self._bases[index]
            self._mapped[base] -= size
            if self._mapped[base] <= 0:
                self._remove(base)

    def _remove(self, base: int) -> None:
        del self._bases[bisect_left(self._bases, base)]
        del self._kinds[base]
        del self._mapped[base]
        self._initial.pop(base, None)


def _kind_of_map(
    history: History, row: int, end: int | None, config: AllocatorConfig, pools: PoolFinder
) -> Kind:
    """The kind of a mapped range, from the allocation at row `end` that it was made for."""
    small = history.size[row] < config.large_segment_size
    if end is not None:
        size = history.size[end]
        small = (size if history.action[end] == OOM else config.round_size(size)) <= SMALL_SIZE
    return Kind(history.stream[row], small, pools.of_row(row))


def _initial_ranges(
    history: History, state: InitialState, config: AllocatorConfig, pools: PoolFinder
) -> list[tuple[int, int, Kind]]:
    """The ranges mapped before the first row, with the kind that blocks and rows in them show."""
    ranges = list(zip(state.mapped.starts, state.mapped.ends, strict=True))
    if not ranges:
        return []
    starts = state.mapped.starts
    streams: dict[int, int] = {}
    found: dict[int, PoolId] = {}
    smalls: dict[int, bool] = {}
    rows = zip(history.action, history.address, history.size, history.stream, strict=True)
    for row, (action, address, size, stream) in enumerate(rows):
        index = bisect_right(starts, address) - 1
        if action == OOM or index < 0 or address >= ranges[index][1]:
            continue
        if index not in streams:
            streams[index] = stream
            if history.pool is not None:
                found[index] = history.pool[row]
        if action <= FREE_COMPLETED and index not in smalls:
            smalls[index] = config.round_size(max(size, 1)) <= SMALL_SIZE
        if len(smalls) == len(ranges):
            break
    for address, block in state.live.items():
        index = bisect_right(starts, address) - 1
        if index >= 0 and address < ranges[index][1]:
            smalls[index] = config.round_size(max(block.requested, 1)) <= SMALL_SIZE
    for final in history.segments:
        index = bisect_right(starts, final.address) - 1
        if final.expandable and index >= 0 and final.address < ranges[index][1]:
            streams.setdefault(index, final.stream)
            found.setdefault(index, final.pool)
            smalls.setdefault(index, final.small)
    return [
        (
            start,
            end,
            Kind(
                streams.get(index, 0),
                smalls.get(index, (end - start) % config.large_segment_size != 0),
                found.get(index, DEFAULT_POOL),
            ),
        )
        for index, (start, end) in enumerate(ranges)
    ]
