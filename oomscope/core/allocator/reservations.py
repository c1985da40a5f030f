"""The expandable segments of a history: which ranges belong to one reservation of address space.

A reservation leaves no row. It shows in the ranges that are mapped into it, which share the stream, the
pool and the size class. Address space is reused: what lies at an address can change during a history.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right, insort
from dataclasses import dataclass, field

from oomscope.core.allocator.history import (
    ALLOC,
    FREE_COMPLETED,
    OOM,
    SEGMENT_MAP,
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


class AddressSpace:
    """The reservations that exist at one moment. They do not overlap, so the nearest base below decides."""

    def __init__(self) -> None:
        self._bases: list[int] = []
        self._sizes: dict[int, int] = {}

    def add(self, base: int, size: int) -> None:
        insort(self._bases, base)
        self._sizes[base] = size

    def remove(self, base: int) -> None:
        del self._bases[bisect_left(self._bases, base)]
        del self._sizes[base]

    def holds(self, address: int) -> bool:
        """Whether `address` lies in a reservation."""
        index = bisect_right(self._bases, address) - 1
        return index >= 0 and address < self._bases[index] + self._sizes[self._bases[index]]

    def copy(self) -> AddressSpace:
        twin = AddressSpace()
        twin._bases, twin._sizes = self._bases[:], dict(self._sizes)
        return twin


class Reservations:
    """The reservations before the first row, and where later ones appear."""

    def __init__(
        self, history: History, state: InitialState, config: AllocatorConfig, pools: PoolFinder
    ) -> None:
        self._history = history
        self._maps = [row for row, code in enumerate(history.action) if code == SEGMENT_MAP]
        self._kinds = {row: _kind_of_map(history, row, config, pools) for row in self._maps}
        initial = _initial_ranges(history, state, config, pools)
        self._size = _address_space(history, self._kinds, initial)
        self.spans = self._join(initial)
        self.total_bytes = (self._size - 2 * config.large_segment_size) * 8 // 9

    def next_place(
        self, row: int, stream: int, small: bool, pool: PoolId, existing: AddressSpace
    ) -> int | None:
        """Where the next new reservation of this kind appears, from `row` on; None when none does."""
        wanted = Kind(stream, small, pool)
        for later in self._maps[bisect_left(self._maps, row) :]:
            address = self._history.address[later]
            if self._kinds[later] == wanted and not existing.holds(address):
                return address
        return None

    def _join(self, ranges: list[tuple[int, int, Kind]]) -> list[Span]:
        """Neighbouring ranges of one kind within the size of a reservation belong together."""
        spans: list[Span] = []
        for start, end, kind in ranges:
            last = spans[-1] if spans else None
            if last is None or last.kind != kind or end > last.base + self._size:
                last = Span(start, kind)
                spans.append(last)
            last.mapped.append((start, end))
        floor = 0
        for span in spans:
            span.base = self._lowest(span, floor)
            floor = span.mapped[-1][1]
        return spans

    def _lowest(self, span: Span, floor: int) -> int:
        """A reservation may begin lower, with a part that has no memory yet; a later map row shows it.

        Free address space in an existing reservation always comes before a new one.
        """
        end = span.mapped[-1][1]
        lower = [
            self._history.address[row]
            for row in self._maps
            if self._kinds[row] == span.kind
            and max(floor, end - self._size) <= self._history.address[row] < span.base
        ]
        return min([span.base, *lower])


def _kind_of_map(history: History, row: int, config: AllocatorConfig, pools: PoolFinder) -> Kind:
    """The kind of a mapped range, from the allocation that it was made for."""
    action = history.action
    end = row
    while end < len(action) and action[end] not in (ALLOC, OOM):
        end += 1
    small = history.size[row] < config.large_segment_size
    if end < len(action):
        size = history.size[end]
        small = (size if action[end] == OOM else config.round_size(max(size, 1))) <= SMALL_SIZE
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


def _address_space(history: History, kinds: dict[int, Kind], initial: list[tuple[int, int, Kind]]) -> int:
    """Bytes of one reservation, as far as the rows show: at most the distance to the next one of another kind.

    All reservations have about the same size, 1.125 times the card's memory.
    """
    pieces = list(initial)
    for row, kind in kinds.items():
        start = history.address[row]
        pieces.append((start, start + history.size[row], kind))
    extent, gap = 0, WIDEST
    run_start, run_kind = 0, None
    for start, end, kind in sorted(pieces, key=lambda piece: piece[:2]):
        if kind != run_kind:
            if run_kind is not None and start > run_start:
                gap = min(gap, start - run_start)
            run_start, run_kind = start, kind
        elif end - run_start <= WIDEST:
            extent = max(extent, end - run_start)
    return max(gap, extent)
