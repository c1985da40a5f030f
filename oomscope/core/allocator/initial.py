"""The model put into the state before the first recorded row.

Free blocks leave no trace: a gap between live blocks is free memory, and how it is divided follows from the
rules of splitting. What the rules leave open is counted, not guessed silently.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Callable

from oomscope.core.allocator.history import ALLOC, FREE_COMPLETED, History
from oomscope.core.allocator.model import AllocatorConfig, Block, CachingAllocator
from oomscope.core.allocator.model_blocks import FreeList, Reservation
from oomscope.core.allocator.model_config import SMALL_BUFFER, SMALL_SIZE
from oomscope.core.allocator.reconstruct import InitialBlock, InitialState
from oomscope.core.allocator.reservations import Reservations, Span

#: Names of what stays open; see `describe_ambiguity`.
UNKNOWN_TAIL = "unknown-tail"
OVERLAP = "overlap"
UNKNOWN_ORDER = "unknown-order"
UNKNOWN_POOL = "unknown-pool"

_WORDS = {
    UNKNOWN_TAIL: "blocks older than the history whose size is known only to within 1 MiB",
    UNKNOWN_ORDER: "free blocks older than the history, whose order of creation decides between equal sizes",
    UNKNOWN_POOL: "segments returned during the history that may have been of a private pool (before 2.12)",
    OVERLAP: "blocks older than the history that overlap",
}


def describe_ambiguity(name: str) -> str:
    """What a counted ambiguity means."""
    return _WORDS[name]


class InitialAllocator:
    """Fills a model from an `InitialState`.

    Args:
        history: the rows, which reveal boundaries of older blocks.
        state: what was there.
        config: settings in effect.
        reservations: expandable segments of the history.
        on_reserve: told the base of each reservation that exists.
    """

    def __init__(
        self,
        history: History,
        state: InitialState,
        config: AllocatorConfig,
        reservations: Reservations,
        on_reserve: Callable[[int], None],
    ) -> None:
        self.history = history
        self.state = state
        self.config = config
        self.reservations = reservations
        self.ambiguities: Counter[str] = Counter()
        self.problems: Counter[str] = Counter()
        self._on_reserve = on_reserve
        self._live = sorted(state.live)
        self._placed = 0
        self._first_alloc: dict[int, int] = {}
        self._first_free: dict[int, int] = {}
        self._alloc_addresses: list[int] | None = None

    def fill(self, allocator: CachingAllocator) -> None:
        """Create every segment, reservation and block in `allocator`."""
        for address, segment in sorted(self.state.segments.items()):
            owner = allocator.pool(segment.pool).free_list(segment.small, segment.stream)
            self._emit(allocator, owner, address, address + segment.size, None, None)
            allocator.reserved_bytes += segment.size
        for span in self.reservations.spans:
            self._fill_span(allocator, span)
        missing = len(self._live) - self._placed
        if missing:
            self.problems["live blocks lie outside all segments"] += missing
        allocator.reset_peaks()

    def _fill_span(self, allocator: CachingAllocator, span: Span) -> None:
        granule = SMALL_BUFFER if span.kind.small else self.config.large_segment_size
        total = allocator.driver.total_bytes + allocator.driver.total_bytes // 8
        size = (total + granule - 1) // granule * granule
        reservation = Reservation(span.base, size, granule)
        allocator.reservations.append(reservation)
        self._on_reserve(span.base)
        owner = allocator.pool(span.kind.pool).free_list(span.kind.small, span.kind.stream)
        last: Block | None = None
        position = span.base
        for start, end in span.mapped:
            if start > position:
                last = self._emit_unmapped(allocator, owner, position, start, reservation, last)
            last = self._emit(allocator, owner, start, end, reservation, last)
            allocator.reserved_bytes += end - start
            position = end
        if position < span.base + size:
            self._emit_unmapped(allocator, owner, position, span.base + size, reservation, last)

    def _emit_unmapped(
        self,
        allocator: CachingAllocator,
        owner: FreeList,
        start: int,
        end: int,
        reservation: Reservation,
        last: Block | None,
    ) -> Block:
        block = Block(start, end - start, owner, 0)
        block.reservation = reservation
        block.mapped = False
        _link(last, block)
        allocator._insert_unmapped(block)
        return block

    def _emit(
        self,
        allocator: CachingAllocator,
        owner: FreeList,
        start: int,
        end: int,
        reservation: Reservation | None,
        last: Block | None,
    ) -> Block | None:
        """Blocks for the memory from `start` to `end`; returns the last one."""
        for address, size, live in self._divide(owner, start, end, reservation is not None):
            block = Block(address, size, owner, 0)
            block.reservation = reservation
            _link(last, block)
            last = block
            if live is None:
                allocator._insert(block)
                if self.config.tiebreak != "address":
                    self.ambiguities[UNKNOWN_ORDER] += 1
                continue
            block.requested = live.requested
            block.pending = live.pending
            block.allocated = not live.pending
            allocator.live[address] = block
            allocator.active_bytes += size
            allocator.requested_bytes += live.requested
            allocator.allocated_bytes += size if block.allocated else 0
        return last

    def _divide(
        self, owner: FreeList, start: int, end: int, expandable: bool
    ) -> list[tuple[int, int, InitialBlock | None]]:
        """(address, size, live block or None) of all blocks from `start` to `end`."""
        parts: list[tuple[int, int, InitialBlock | None]] = []
        position = start
        index = bisect_left(self._live, start)
        while index < len(self._live) and self._live[index] < end:
            address = self._live[index]
            index += 1
            limit = min(end, self._live[index]) if index < len(self._live) else end
            self._placed += 1
            if address > position:
                parts.append((position, address - position, None))
            live = self.state.live[address]
            size = live.size or self._size_of(live, owner, start, limit, end, expandable)
            if address + size > limit:
                self.ambiguities[OVERLAP] += 1
                size = limit - address
            parts.append((address, size, live))
            position = address + size
        if position < end:
            parts.append((position, end - position, None))
        return parts

    def _size_of(
        self, live: InitialBlock, owner: FreeList, start: int, limit: int, end: int, expandable: bool
    ) -> int:
        """Bytes of a live block that was gone before the end. Source: should_split()."""
        size = self.config.round_size(max(live.requested, 1))
        gap = limit - (live.address + size)
        if gap < 0:
            return size
        if owner.small or gap == 0 or (expandable and self.config.expandable_segments):
            return size
        if not expandable and size >= self.config.max_split_size:
            return end - live.address  # never split
        if gap <= SMALL_SIZE:
            return size + gap  # too little to split off
        return size + self._tail(live.address, live.address + size, limit)

    def _tail(self, address: int, end: int, limit: int) -> int:
        """Bytes up to 1 MiB that an old block has beyond its rounded size.

        A free block after it starts where the old one ends; the first allocation in it shows where.
        """
        self._index_rows()
        assert self._alloc_addresses is not None
        freed = self._first_free.get(address, len(self.history))
        index = bisect_left(self._alloc_addresses, end)
        while index < len(self._alloc_addresses):
            candidate = self._alloc_addresses[index]
            if candidate > end + SMALL_SIZE or candidate >= limit:
                break
            if self._first_alloc[candidate] < freed:
                return candidate - end
            index += 1
        self.ambiguities[UNKNOWN_TAIL] += 1
        return 0

    def _index_rows(self) -> None:
        """First allocation and first completed free of each address; made when first needed."""
        if self._alloc_addresses is not None:
            return
        for row, (action, address) in enumerate(zip(self.history.action, self.history.address, strict=True)):
            if action == ALLOC:
                self._first_alloc.setdefault(address, row)
            elif action == FREE_COMPLETED:
                self._first_free.setdefault(address, row)
        self._alloc_addresses = sorted(self._first_alloc)


def _link(last: Block | None, block: Block) -> None:
    block.prev = last
    if last is not None:
        last.next = block
