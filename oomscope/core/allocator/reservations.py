"""Which address ranges of a history belong to one expandable segment.

A reservation of address space leaves no row. It shows in the ranges that are mapped and unmapped in it,
which share the stream, the pool and the size class.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from dataclasses import dataclass

from oomscope.core.allocator.history import (
    ALLOC,
    OOM,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
    PoolId,
)
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig
from oomscope.core.allocator.model_config import SMALL_SIZE
from oomscope.core.allocator.model_driver import UNLIMITED_TOTAL
from oomscope.core.allocator.reconstruct import Intervals


@dataclass(slots=True)
class _Piece:
    """A range that was mapped at some time, and what is known of it."""

    start: int
    end: int
    stream: int
    small: bool | None
    pool: PoolId | None
    unit: int
    """Size of the row; a multiple of the granule."""


@dataclass(slots=True)
class Span:
    """The part of one reservation that ever had memory."""

    start: int
    end: int
    stream: int
    small: bool
    pool: PoolId


class Reservations:
    """All reservations of a history, by address."""

    def __init__(self, history: History, config: AllocatorConfig) -> None:
        self._history = history
        self._maps = [row for row, code in enumerate(history.action) if code == SEGMENT_MAP]
        widest = UNLIMITED_TOTAL + UNLIMITED_TOTAL // 8
        self.spans = _join(_islands(_pieces(history, config, self._maps)), config, widest)
        self._starts = [span.start for span in self.spans]
        gaps = [right - left for left, right in zip(self._starts, self._starts[1:], strict=False)]
        # All reservations have about the same size, 1.125 times the card's memory, and do not overlap.
        self.total_bytes = (min([widest, *gaps]) - 2 * config.large_segment_size) * 8 // 9

    def span_at(self, address: int) -> Span | None:
        """The reservation that `address` lies in, if it ever had memory there."""
        index = bisect_right(self._starts, address) - 1
        if index < 0 or address >= self.spans[index].end:
            return None
        return self.spans[index]

    def next_place(self, row: int, stream: int, small: bool, reserved: Intervals) -> int | None:
        """Where the next reservation of this kind appears, from `row` on; None when none does."""
        for later in self._maps[bisect_left(self._maps, row) :]:
            address = self._history.address[later]
            if not reserved.holds(address):
                span = self.span_at(address)
                if span is not None and (span.stream, span.small) == (stream, small):
                    return address
        return None


def _pieces(history: History, config: AllocatorConfig, maps: list[int]) -> list[_Piece]:
    pieces = [
        _Piece(each.address, each.address + each.size, each.stream, each.small, each.pool, each.size)
        for each in history.segments
        if each.expandable
    ]
    sizes = _size_classes(history, config, maps)
    for row, code in enumerate(history.action):
        if code in (SEGMENT_MAP, SEGMENT_UNMAP):
            start, size = history.address[row], history.size[row]
            pool = history.pool[row] if history.pool is not None else None
            pieces.append(_Piece(start, start + size, history.stream[row], sizes.get(row), pool, size))
    return pieces


def _size_classes(history: History, config: AllocatorConfig, maps: list[int]) -> dict[int, bool]:
    """Map row -> small pool or not, from the allocation that it was made for."""
    action = history.action
    classes: dict[int, bool] = {}
    for row in maps:
        end = row
        while end < len(action) and action[end] not in (ALLOC, OOM):
            end += 1
        if end < len(action):
            size = history.size[end]
            rounded = size if action[end] == OOM else config.round_size(max(size, 1))
            classes[row] = rounded <= SMALL_SIZE
    return classes


def _islands(pieces: list[_Piece]) -> list[list[_Piece]]:
    """Pieces that overlap or touch, of one stream and not of contradicting kinds."""
    islands: list[list[_Piece]] = []
    end = -1
    for piece in sorted(pieces, key=lambda piece: (piece.start, piece.end)):
        if islands and piece.start <= end and _fits(islands[-1], piece):
            islands[-1].append(piece)
            end = max(end, piece.end)
        else:
            islands.append([piece])
            end = piece.end
    return islands


def _fits(pieces: list[_Piece], piece: _Piece) -> bool:
    return piece.stream == pieces[0].stream and all(
        (piece.small is None or other.small is None or piece.small == other.small)
        and (piece.pool is None or other.pool is None or piece.pool == other.pool)
        for other in pieces
    )


def _join(islands: list[list[_Piece]], config: AllocatorConfig, window: int) -> list[Span]:
    """Neighbouring islands of one kind within `window` bytes are one reservation."""
    spans: list[Span] = []
    for island in islands:
        known = [piece.small for piece in island if piece.small is not None]
        small = known[0] if known else any(piece.unit % config.large_segment_size for piece in island)
        pools = [piece.pool for piece in island if piece.pool is not None]
        pool = pools[0] if pools else DEFAULT_POOL
        start, end = island[0].start, max(piece.end for piece in island)
        last = spans[-1] if spans else None
        if (
            last is not None
            and (last.stream, last.small, last.pool) == (island[0].stream, small, pool)
            and end <= last.start + window
        ):
            last.end = end
        else:
            spans.append(Span(start, end, island[0].stream, small, pool))
    return spans
