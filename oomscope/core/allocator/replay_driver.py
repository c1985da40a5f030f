"""The driver of a replay: it only knows what the recorded rows say, and objects to everything else.

The replay asks the history one question, "did cudaMalloc succeed, and where", and checks every other
decision of the model against it. The first decision that differs raises `Diverged`.
"""

from __future__ import annotations

from typing import Any

from oomscope.core.allocator.history import (
    FREE_COMPLETED,
    SEGMENT_ALLOC,
    SEGMENT_FREE,
    SEGMENT_MAP,
    SEGMENT_UNMAP,
    History,
)
from oomscope.core.allocator.model import Block, CachingAllocator, VirtualDriver
from oomscope.core.allocator.model_blocks import FreeList, Pool
from oomscope.core.allocator.model_config import AllocatorConfig
from oomscope.core.allocator.reconstruct import Intervals
from oomscope.core.allocator.reservations import Reservations

#: Where a reservation is put that no row ever shows.
_NOWHERE = 0xA00000000000


class Diverged(Exception):  # noqa: N818  # a result, not an error
    """The model did something else than the history says."""

    def __init__(self, row: int, predicted: str) -> None:
        super().__init__(predicted)
        self.row = row
        self.predicted = predicted


class RecordedDriver(VirtualDriver):
    """Answers from the rows of the operation under way."""

    def __init__(self, history: History, reservations: Reservations, memory: Intervals) -> None:
        super().__init__(None, total_bytes=reservations.total_bytes)
        self.history = history
        self.reservations = reservations
        self.expected: list[int] = []
        """Rows of the operation under way that the model must produce, in order."""
        self.position = 0
        self.row = 0
        """Row that stands for the operation in messages."""
        self.failed = False
        """The operation ended in an out-of-memory error, so memory is short."""
        self.refused_at: int | None = None
        """Least that was reserved or asked for when the driver refused: an upper bound of the capacity."""
        self.reserved_bytes = 0
        self.memory = memory
        """Ranges that hold memory now."""
        self.reserved: set[int] = set()
        """Bases of the reservations that exist."""
        self._nowhere = _NOWHERE

    def begin(self, row: int, expected: list[int], *, failed: bool = False) -> None:
        """The next requests belong to the operation at `row`, whose other rows are `expected`."""
        self.row = row
        self.expected = expected
        self.position = 0
        self.failed = failed

    def end(self) -> None:
        """The operation is over: all its rows must have been produced.

        Raises:
            Diverged: some are left.
        """
        if self.position < len(self.expected):
            raise Diverged(self.expected[self.position], "nothing")

    @property
    def _next(self) -> int | None:
        """Action of the next expected row."""
        if self.position >= len(self.expected):
            return None
        return self.history.action[self.expected[self.position]]

    def _take(self, action: int, address: int, size: int, words: str) -> None:
        """The model produced this row; it must be the next one.

        Raises:
            Diverged: it is not.
        """
        row = self.expected[self.position] if self.position < len(self.expected) else self.row
        history = self.history
        if self._next != action or history.address[row] != address or history.size[row] != size:
            raise Diverged(row, f"{words} at {address:#x}, {size} bytes")
        self.position += 1

    def _add_memory(self, row: int, address: int, size: int) -> None:
        """The driver gave memory at a place, as the row says.

        Raises:
            Diverged: there is memory already.
        """
        if self.memory.overlaps(address, address + size):
            raise Diverged(row, "memory elsewhere: that range is in use")
        self.memory.add(address, address + size)
        self.position += 1
        self.reserved_bytes += size

    def _refuse(self, size: int) -> None:
        """Note that `size` bytes more did not fit."""
        bound = self.reserved_bytes + size
        if self.refused_at is None or bound < self.refused_at:
            self.refused_at = bound

    def malloc(self, size: int) -> int | None:
        if self._next == SEGMENT_ALLOC:
            row = self.expected[self.position]
            if self.history.size[row] != size:
                raise Diverged(row, f"segment_alloc of {size} bytes")
            self._add_memory(row, self.history.address[row], size)
            return self.history.address[row]
        if self._next == SEGMENT_MAP:
            raise Diverged(self.expected[self.position], f"segment_alloc of {size} bytes")
        if self._next is None and not self.failed:
            raise Diverged(self.row, f"a new segment of {size} bytes first")
        self._refuse(size)
        return None

    def free(self, address: int, size: int) -> None:
        self._take(SEGMENT_FREE, address, size, "segment_free")
        self.reserved_bytes -= size
        self.memory.remove(address, address + size)

    def reserve(self, size: int, owner: FreeList | None = None) -> int:
        """The place of the next reservation of this kind that appears; a made-up one when none does."""
        assert owner is not None
        first = self.expected[self.position] if self.position < len(self.expected) else self.row
        place = self.reservations.next_place(first, owner.stream, owner.small, owner.pool.id, self.reserved)
        if place is None:
            self._nowhere += 2 * size
            place = self._nowhere
        self.reserved.add(place)
        return place

    def release(self, address: int, size: int) -> None:
        self.reserved.discard(address)

    def map(self, address: int, size: int) -> bool:
        if self._next == SEGMENT_MAP:
            row = self.expected[self.position]
            if self.history.address[row] != address or self.history.size[row] != size:
                raise Diverged(row, f"segment_map at {address:#x}, {size} bytes")
            self._add_memory(row, address, size)
            return True
        if self._next == SEGMENT_ALLOC:
            raise Diverged(self.expected[self.position], f"segment_map at {address:#x}, {size} bytes")
        if self._next is None and not self.failed:
            raise Diverged(self.row, f"segment_map at {address:#x}, {size} bytes first")
        self._refuse(size)
        return False

    def unmap(self, address: int, size: int) -> None:
        self._take(SEGMENT_UNMAP, address, size, "segment_unmap")
        self.reserved_bytes -= size
        self.memory.remove(address, address + size)

    def completed(self) -> int | None:
        """Address of the free that completes next, if that is the next row."""
        if self._next != FREE_COMPLETED:
            return None
        address = self.history.address[self.expected[self.position]]
        self.position += 1
        return address

    def next_freed(self, count: int) -> list[int]:
        """Addresses of the next rows, at most `count`, as far as they return segments."""
        freed: list[int] = []
        for row in self.expected[self.position : self.position + count]:
            if self.history.action[row] != SEGMENT_FREE:
                break
            freed.append(self.history.address[row])
        return freed


class ReplayedAllocator(CachingAllocator):
    """The model, told by the history when events passed and when garbage was collected."""

    driver: RecordedDriver

    def __init__(self, config: AllocatorConfig, driver: RecordedDriver) -> None:
        super().__init__(config, driver, detailed_stats=False)
        # The limit that collecting needs is not recorded, so every allocation may have collected.
        self._collects = config.garbage_collection_threshold > 0.0

    def free_at_once(self, block: Block) -> None:
        """`free_block()` of a block that no other stream uses, without the rows and statistics kept nowhere here."""
        size = block.size
        block.allocated = False
        block.context = None
        del self.live[block.address]
        self.allocated_bytes -= size
        self.active_bytes -= size
        self.requested_bytes -= block.requested
        self._merge_and_insert(block)

    def set_memory_fraction(self, fraction: float) -> None:
        """The limit shows in the rows; the model must not apply one of its own."""

    def _drain_events(self, pool: Pool | None, context: Any) -> int:
        """A synchronisation: complete what the rows say that it completed."""
        done = 0
        while (address := self.driver.completed()) is not None:
            block = self.live.get(address)
            if block is None or block.allocated:
                raise Diverged(self.driver.row, f"no pending free at {address:#x}")
            self.complete(block, context)
            done += 1
        return done

    def _collect_garbage(self, context: Any) -> None:
        """Collect pass by pass as long as the next rows are exactly those of a pass.

        The target is unknown, because the limit is not recorded: what is checked is which blocks a pass
        returns.
        """
        for blocks in self._garbage_passes():
            if self.driver.next_freed(len(blocks)) != [block.address for block in blocks]:
                return
            for block in blocks:
                self._release_block(block, context)
