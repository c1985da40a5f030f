"""Giving memory back to the driver: garbage collection, oversize blocks, and everything that is free.

Standard library only, Python 3.9: this module also runs inside training jobs.

Source: garbage_collect_cached_blocks(), release_available_cached_blocks(), release_cached_blocks() and
synchronize_and_free_events() in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterator
from typing import Any

from .model_blocks import ADDRESS_MASK, DEFAULT_POOL, SIZE_SHIFT, Block, FreeList, Pool, PoolId
from .model_config import UNLIMITED
from .model_expandable import ExpandableSegments


class Releasing(ExpandableSegments):
    """The rules by which free memory is returned, and freed blocks become free."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.captures: list[PoolId] = []
        """Pools with a graph capture under way: events are not queried, memory is not returned."""
        self._events: dict[int, deque[Block]] = {}
        self._waiting: dict[Block, int] = {}
        self._deferred: list[Block] = []

    # ---- blocks that other streams may still use

    def process_events(self, context: object = None) -> int:
        """Complete every pending free, as if all work queued so far were done. Returns how many became free.

        torch asks each event at every allocation; a simulated device, or a replay, says here when they are
        done.
        """
        if self.captures:
            return 0
        self._insert_deferred_events()
        return self._drain_events(None, context)

    def _insert_events(self, block: Block) -> None:
        """One event per stream that used the block; it stays pending until all have passed."""
        streams = sorted(block.stream_uses or ())
        block.stream_uses = None
        self._waiting[block] = len(streams)
        for stream in streams:
            self._events.setdefault(stream, deque()).append(block)

    def _insert_deferred_events(self) -> None:
        """Frees during a capture wait for its end."""
        deferred, self._deferred = self._deferred, []
        for block in deferred:
            self._insert_events(block)

    def _drain_events(self, pool: Pool | None, context: Any) -> int:
        done = 0
        for stream in list(self._events):
            queue = self._events[stream]
            kept: deque[Block] = deque()
            for block in queue:
                if pool is not None and block.owner.pool is not pool:
                    kept.append(block)
                    continue
                self._waiting[block] -= 1
                if self._waiting[block] == 0:
                    self.complete(block, context)
                    done += 1
            if kept:
                self._events[stream] = kept
            else:
                del self._events[stream]
        return done

    def complete(self, block: Block, context: object = None) -> None:
        """A freed block becomes free memory: row, totals, merge. Source: free_block()."""
        self._waiting.pop(block, None)
        block.pending = False
        owner = block.owner
        size, requested = block.size, block.requested
        del self.live[block.address]
        if self._tracer is not None:
            self._trace("free_completed", block.address, requested, owner, context or block.context)
        block.context = None
        self.active_bytes -= size
        self.requested_bytes -= requested
        stats = self.stats
        if stats is None or block.reservation is not None:
            self._merge_and_insert(block)
        else:
            joined = _free_neighbours(block)
            self._merge_and_insert(block)
            gained = block.is_split
            stats.inactive_split_changed(
                owner.small, int(gained) - joined, (block.size if gained else 0) - (block.size - size)
            )
        if stats is not None:
            stats.became_free(owner.small, size, requested)

    # ---- returning memory

    def release_cached(self, pool_id: PoolId = DEFAULT_POOL, context: object = None) -> None:
        """Return all free memory: pending frees first, then large before small, then unused private pools."""
        if pool_id == DEFAULT_POOL and not self.captures:
            self.num_sync_all_streams += 1
            self._insert_deferred_events()
            self._drain_events(None, context)
            default = self.pools[DEFAULT_POOL]
            self._release_lists(default.lists(False), context)
            self._release_lists(default.lists(True), context)
        for pool in list(self.pools.values()):
            if pool.id == DEFAULT_POOL or pool.users > 0:
                continue
            if pool_id != DEFAULT_POOL:
                if pool.id != pool_id:
                    continue
                self.num_sync_all_streams += 1
                self._drain_events(pool, context)
            self._release_lists(pool.lists(True), context)
            self._release_lists(pool.lists(False), context)

    def _release_lists(self, lists: list[FreeList], context: Any) -> None:
        """Free every unsplit block in order, then unmap what expandable blocks can give."""
        expandable: list[Block] = []
        for free_list in lists:
            for key in list(free_list.keys):
                block = self.free_blocks[key & ADDRESS_MASK]
                if block.reservation is not None:
                    expandable.append(block)
                elif block.prev is None and block.next is None:
                    self._release_block(block, context)
        for block in expandable:
            self._unmap_block(block, context)

    def _release_block(self, block: Block, context: Any) -> None:
        """Return a whole, free segment."""
        self._remove(block)
        owner = block.owner
        self._trace("segment_free", block.address, block.size, owner, context or block.segment_context)
        self._unreserve(owner.small, block.size)
        if self.stats is not None:
            self.stats.segment.change(owner.small, -1)
            if block.size >= self.config.max_split_size:
                self.stats.oversize_segments.change(-1)
        self.driver.free(block.address, block.size)

    def _release_available(self, owner: FreeList, size: int, context: Any) -> bool:
        """With max_split_size: return one sufficient oversize block, else the largest until the sum does."""
        limit = self.config.max_split_size
        if limit == UNLIMITED:
            return False
        wanted = max(size, limit)
        keys = owner.keys
        index = bisect_left(keys, wanted << SIZE_SHIFT)
        if index < len(keys):
            block = self.free_blocks[keys[index] & ADDRESS_MASK]
            if block.reservation is None and not block.is_split:
                self._release_block(block, context)
                return True
        released = 0
        for key in reversed(keys[:index]):
            if released >= wanted or key >> SIZE_SHIFT < limit:
                break
            block = self.free_blocks[key & ADDRESS_MASK]
            if block.reservation is None and not block.is_split:
                released += block.size
                self._release_block(block, context)
        return released >= wanted

    def _collect_garbage(self, context: Any) -> None:
        """Return the blocks that lie idle longest while above the threshold; default large pool only."""
        assert self.allowed_bytes is not None
        threshold = int(self.config.garbage_collection_threshold * self.allowed_bytes)
        target = self.reserved_bytes - threshold
        reclaimed = 0
        for blocks in self._garbage_passes() if target > 0 else ():
            for block in blocks:
                reclaimed += block.size
                self._release_block(block, context)
            if reclaimed >= target:
                break

    def _garbage_passes(self) -> Iterator[list[Block]]:
        """The blocks to return, pass by pass: those at least as old as the mean of the remaining ones.

        The age is the number of searches since a block became free.
        """
        blocks = [
            block
            for free_list in self.pools[DEFAULT_POOL].lists(False)
            for block in (self.free_blocks[key & ADDRESS_MASK] for key in free_list.keys)
            if block.reservation is None and not block.is_split
        ]
        while blocks:
            mean_age = sum(self._searches - block.born for block in blocks) / len(blocks)
            chosen = [block for block in blocks if self._searches - block.born >= mean_age]
            yield chosen
            blocks = [block for block in blocks if block not in chosen]


def _free_neighbours(block: Block) -> int:
    """How many free blocks a newly free one will be joined with."""
    return sum(
        1
        for other in (block.prev, block.next)
        if other is not None and other.mapped and not other.allocated and not other.pending
    )
