"""Expandable segments: address ranges into which memory is mapped and unmapped in granules.

Standard library only, Python 3.9: this module also runs inside training jobs.

Source: find_expandable_block(), map_block(), try_allocate_expandable_block() and unmap_block() in
c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import Any

from .model_blocks import Block, FreeList, Reservation
from .model_config import SMALL_BUFFER
from .model_state import AllocatorState


class ExpandableSegments(AllocatorState):
    """The rules of expandable segments."""

    def _allocate_expandable(self, owner: FreeList, size: int, context: Any) -> Block | None:
        """A free block of at least `size` bytes, grown by mapping; None when memory is short.

        What was mapped before the shortage stays mapped, as in torch.
        """
        candidate = self._find_expandable(owner, size)
        if not candidate.mapped and not self._map_block(candidate, min(candidate.size, size), context):
            return None
        while candidate.size < size:
            # Right of a free block that is too small lies an unmapped one: _find_expandable() saw to that.
            unmapped = candidate.next
            assert unmapped is not None
            if not self._map_block(unmapped, min(size - candidate.size, unmapped.size), context):
                return None
            candidate = unmapped
        self._remove(candidate)
        return candidate

    def _find_expandable(self, owner: FreeList, size: int) -> Block:
        """The lowest run of free and unmapped blocks with room for `size`; else a new reservation."""
        for address in owner.unmapped:
            candidate = self.unmapped_blocks[address]
            left = candidate.prev
            if left is not None and not left.allocated and not left.pending:
                candidate = left
            room = 0
            block: Block | None = candidate
            while room < size and block is not None and not block.allocated and not block.pending:
                room += block.size
                block = block.next
            if room >= size:
                return candidate
        return self._new_reservation(owner)

    def _new_reservation(self, owner: FreeList) -> Block:
        """Address space for 1.125 times the card's memory. Source: ExpandableSegment::ExpandableSegment()."""
        granule = SMALL_BUFFER if owner.small else self.config.large_segment_size
        total = self.driver.total_bytes + self.driver.total_bytes // 8
        size = (total + granule - 1) // granule * granule
        reservation = Reservation(self.driver.reserve(size, owner), size, granule)
        self.reservations.append(reservation)
        block = Block(reservation.base, size, owner, self._new_tie())
        block.reservation = reservation
        block.mapped = False
        self._insert_unmapped(block)
        return block

    def _map_block(self, block: Block, size: int, context: Any) -> bool:
        """Map at least `size` bytes (whole granules) at the start of an unmapped block, as free memory."""
        reservation = block.reservation
        assert reservation is not None
        size = (size + reservation.granule - 1) // reservation.granule * reservation.granule
        address, owner = block.address, block.owner
        if not self.driver.map(address, size):
            return False
        self._remove_unmapped(block)
        block.mapped = True
        if size < block.size:
            rest = Block(address + size, block.size - size, owner, self._rest_tie(block))
            rest.reservation = reservation
            rest.mapped = False
            rest.prev, rest.next = block, block.next
            if block.next is not None:
                block.next.prev = rest
            block.next = rest
            block.size = size
            self._insert_unmapped(rest)
        self._merge_and_insert(block)
        self._reserve(owner.small, size)
        if block.prev is None and block.segment_context is None:
            block.segment_context = context
        self._trace("segment_map", address, size, owner, context)
        return True

    def _unmap_block(self, block: Block, context: Any) -> None:
        """Return the whole granules inside a free block; what is left at either end stays free."""
        reservation = block.reservation
        assert reservation is not None
        granule = reservation.granule
        first = (block.address - reservation.base + granule - 1) // granule
        last = (block.address + block.size - reservation.base) // granule
        if first < last:
            start, size = reservation.base + first * granule, (last - first) * granule
            self._remove(block)
            self._keep_ends(block, start, size)
            block.address, block.size, block.mapped = start, size, False
            self._merge_unmapped(block)
            self.driver.unmap(start, size)
            self._unreserve(block.owner.small, size)
            self._trace("segment_unmap", start, size, block.owner, context or block.segment_context)
        if block.prev is None and block.next is None and not block.mapped:
            self._remove_unmapped(block)
            self.reservations.remove(reservation)
            self.driver.release(reservation.base, reservation.size)

    def _keep_ends(self, block: Block, start: int, size: int) -> None:
        """Split off what `block` has before and after the range to unmap; both parts stay mapped and free."""
        before = start - block.address
        after = block.address + block.size - (start + size)
        if before > 0:
            part = Block(block.address, before, block.owner, self._rest_tie(block))
            part.reservation = block.reservation
            part.segment_context = block.segment_context
            part.prev, part.next = block.prev, block
            if block.prev is not None:
                block.prev.next = part
            block.prev = part
            self._insert(part)
        if after > 0:
            part = Block(start + size, after, block.owner, self._rest_tie(block))
            part.reservation = block.reservation
            part.prev, part.next = block, block.next
            if block.next is not None:
                block.next.prev = part
            block.next = part
            self._insert(part)

    def _merge_unmapped(self, block: Block) -> None:
        left = block.prev
        if left is not None and not left.mapped:
            self._remove_unmapped(left)
            block.address = left.address
            block.size += left.size
            block.prev = left.prev
            if block.prev is not None:
                block.prev.next = block
        right = block.next
        if right is not None and not right.mapped:
            self._remove_unmapped(right)
            block.size += right.size
            block.next = right.next
            if block.next is not None:
                block.next.prev = block
        self._insert_unmapped(block)

    def _rest_tie(self, block: Block) -> int:
        """A new block of an existing segment: its own number by creation order, else that of the segment."""
        return self._new_tie() if self._ties_by_block else block.tie
