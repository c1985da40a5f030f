"""PyTorch's CUDA caching allocator of one device as a model: same addresses, rows and numbers, no GPU.

One implementation serves the simulated device, the exact replay of recorded traces and the predictions. It
needs the standard library only and keeps to Python 3.9, because it also runs inside training jobs.

Rules and their sources: docs/allocator.md. Read from c10/cuda/CUDACachingAllocator.cpp, torch 2.0 to 2.13;
checked by replaying recorded traces (`oomscope replay`).

>>> allocator = CachingAllocator(AllocatorConfig(), VirtualDriver(1 << 30))
>>> address = allocator.malloc(3 << 20)
>>> allocator.allocated_bytes, allocator.reserved_bytes
(3145728, 20971520)
"""

from __future__ import annotations

from bisect import bisect_left
from typing import Any

from .model_blocks import ADDRESS_MASK, DEFAULT_POOL, SIZE_SHIFT, Block, FreeList, PoolId
from .model_config import (
    MIN_BLOCK_SIZE,
    SMALL_SIZE,
    UNLIMITED,
    AllocatorConfig,
)
from .model_driver import ADDRESS_MODELS, VirtualDriver
from .model_oom import AllocatorOutOfMemory, oom_message
from .model_report import Reporting
from .model_state import TraceRow

__all__ = [
    "ADDRESS_MODELS",
    "DEFAULT_POOL",
    "AllocatorConfig",
    "AllocatorOutOfMemory",
    "Block",
    "CachingAllocator",
    "TraceRow",
    "VirtualDriver",
    "oom_message",
]


class CachingAllocator(Reporting):
    """The caching allocator of one device.

    Args:
        config: settings, as in PYTORCH_CUDA_ALLOC_CONF.
        driver: where memory comes from.
        device: ordinal, for snapshots and messages.
        tracer: called with every row of the memory history, in torch's order.
        clock: microseconds since 1970 for the rows; the wall clock when None.
        detailed_stats: keep everything `memory_stats()` reports; False keeps the totals only and is faster.

    Requests of 0 bytes never reach the allocator: callers return a null pointer for them, as torch does.
    """

    def malloc(
        self, requested: int, stream: int = 0, context: object = None, pool: PoolId = DEFAULT_POOL
    ) -> int:
        """Address of a block of at least `requested` bytes (>= 1) for work on `stream`.

        Args:
            requested: bytes.
            stream: handle of the allocation stream; a block is reused on its own stream only.
            context: kept with the block and given to the tracer; a list of frames appears in snapshots.
            pool: (0, 0), or the id of a private pool (CUDA graph or MemPool), which is created on first use.

        Raises:
            AllocatorOutOfMemory: nothing left after returning all cached memory.
        """
        return self.allocate(requested, stream, context, pool).address

    def allocate(
        self, requested: int, stream: int = 0, context: object = None, pool: PoolId = DEFAULT_POOL
    ) -> Block:
        """`malloc()` that returns the block itself, which stays valid until it is freed."""
        size = (
            (requested + MIN_BLOCK_SIZE - 1) & -MIN_BLOCK_SIZE
            if self._rounds_plainly
            else self.config.round_size(requested)
        )
        small = size <= SMALL_SIZE
        home = self.pools.get(pool) or self.pool(pool)
        owner = (home.small if small else home.large).get(stream) or home.free_list(small, stream)
        expandable = self.config.expandable_segments and (
            pool == DEFAULT_POOL or (self.config.private_pools_expandable and not home.custom_allocator)
        )
        block = self._find(owner, size, expandable)
        if block is None:
            block = self._obtain(owner, size, expandable, context)
            if block is None:
                raise self._out_of_memory(requested, size, owner, context)
            expandable = expandable and block.owner is owner
        block = self._hand_out(block, size, requested, expandable)
        block.context = context
        if self._tracer is not None:
            self._trace("alloc", block.address, requested, block.owner, context)
        return block

    def free(self, address: int, context: object = None) -> None:
        """Free a block; it can be used again at once, or after the streams of `record_stream()` have passed.

        Raises:
            ValueError: no allocated block starts at `address`.
        """
        block = self.live.get(address)
        if block is None or not block.allocated:
            raise ValueError(f"invalid device pointer: {address:#x}")
        self.free_block(block, context)

    def free_block(self, block: Block, context: object = None) -> None:
        """`free()` of a block from `allocate()`."""
        self.request_free(block, context)
        if block.stream_uses:
            block.pending = True
            if self.captures:
                self._deferred.append(block)
            else:
                self._insert_events(block)
        else:
            self.complete(block, context)

    def request_free(self, block: Block, context: object = None) -> None:
        """The first half of a free: the program gave the block up, its memory is not yet free."""
        block.allocated = False
        self.allocated_bytes -= block.size
        stats = self.stats
        if stats is not None:
            stats.given_back(block.owner.small, block.size)
            if block.size >= self.config.max_split_size:
                stats.oversize_allocations.change(-1)
        if self._tracer is not None:
            self._trace(
                "free_requested", block.address, block.requested, block.owner, context or block.context
            )

    def record_stream(self, address: int, stream: int) -> None:
        """Note that work on another stream uses the block; the allocation stream itself is ignored.

        Raises:
            ValueError: no allocated block starts at `address`.
        """
        block = self.live.get(address)
        if block is None or not block.allocated:
            raise ValueError(f"invalid device pointer: {address:#x}")
        if stream != block.owner.stream:
            if block.stream_uses is None:
                block.stream_uses = set()
            block.stream_uses.add(stream)

    def empty_cache(self, context: object = None, pool: PoolId = DEFAULT_POOL) -> None:
        """Return all free memory to the driver, as torch.cuda.empty_cache() does."""
        self.release_cached(pool, context)

    # ---- private pools

    def begin_capture(self, pool: PoolId) -> None:
        """A graph capture into `pool` starts: until its end nothing is returned, no event is asked."""
        self.pool(pool)
        self.captures.append(pool)

    def end_capture(self, pool: PoolId) -> None:
        """The capture into `pool` ended.

        Raises:
            ValueError: none was under way.
        """
        if pool not in self.captures:
            raise ValueError(f"not currently recording to pool {pool}")
        self.captures.remove(pool)

    def retain_pool(self, pool: PoolId) -> None:
        """One more graph or MemPool object uses `pool`."""
        self.pool(pool).users += 1

    def release_pool(self, pool: PoolId) -> None:
        """A graph or MemPool object is gone; after the last one the pool's free memory may be returned."""
        self.pool(pool).users -= 1

    # ---- the search

    def _find(self, owner: FreeList, size: int, expandable: bool) -> Block | None:
        """Take the smallest sufficient free block out of the list. Source: get_free_block()."""
        if self._collects and not owner.small and owner.pool.id == DEFAULT_POOL:
            self._searches += 1
        keys = owner.keys
        index = bisect_left(keys, size << SIZE_SHIFT)
        if index >= len(keys):
            return None
        block = self.free_blocks[keys[index] & ADDRESS_MASK]
        if block.reservation is not None:
            index = self._skip_growing(keys, index) if expandable else self._skip_expandable(keys, index)
            if index >= len(keys):
                return None
            block = self.free_blocks[keys[index] & ADDRESS_MASK]
        limit = self.config.max_split_size
        if limit != UNLIMITED:
            if size < limit and block.size >= limit:
                return None
            if size >= limit and block.size >= size + self.config.max_non_split_rounding:
                return None
        del keys[index]
        del self.free_blocks[block.address]
        return block

    def _skip_growing(self, keys: list[int], index: int) -> int:
        """Move on to a block that can grow less, so that the growing end of a segment is the last choice.

        A block before unmapped space counts as large as it could become.
        """
        free = self.free_blocks
        block = free[keys[index] & ADDRESS_MASK]
        if block.next is None or block.next.mapped:
            return index  # it cannot grow, and those that follow are not smaller
        room = _expandable_size(block)
        while block.reservation is not None and index + 1 < len(keys):
            following = free[keys[index + 1] & ADDRESS_MASK]
            following_room = _expandable_size(following)
            if following_room >= room:
                break
            index, block, room = index + 1, following, following_room
        return index

    def _skip_expandable(self, keys: list[int], index: int) -> int:
        """Expandable segments were switched off: the next block that is not in one."""
        while index < len(keys) and self.free_blocks[keys[index] & ADDRESS_MASK].reservation is not None:
            index += 1
        return index

    def _obtain(self, owner: FreeList, size: int, expandable: bool, context: Any) -> Block | None:
        """No free block fits: new memory, memory of other pools, returned memory. Source: malloc()."""
        block: Block | None = None
        if self._run_release_callbacks():
            block = self._find(owner, size, expandable)
            if block is not None:
                return block
        if self._collects:
            self._collect_garbage(context)
        block = self._new_memory(owner, size, expandable, context) or self._from_overflow_pools(owner, size)
        if block is None and self._release_available(owner, size, context):
            block = self._new_memory(owner, size, expandable, context)
        if block is None and not self.captures:
            self.release_cached(DEFAULT_POOL, context)
            self.num_alloc_retries += 1
            block = self._new_memory(owner, size, expandable, context)
        return block

    def _run_release_callbacks(self) -> bool:
        """Run all of them, also after one has freed something."""
        results = [callback() for callback in self.release_callbacks]
        return any(results)

    def _new_memory(self, owner: FreeList, size: int, expandable: bool, context: Any) -> Block | None:
        """A segment of its own, or growth of an expandable one. Source: alloc_block()."""
        segment_size = self.config.segment_size(size)
        if self.allowed_bytes is not None and self.reserved_bytes + segment_size > self.allowed_bytes:
            return None
        if self.config.throw_on_cudamalloc_oom and segment_size > self.driver.free_bytes:
            raise self._error(size, size, owner, preempted=True)
        if expandable:
            return self._allocate_expandable(owner, size, context)
        address = self.driver.malloc(segment_size)
        if address is None:
            return None
        block = Block(address, segment_size, owner, self._new_tie())
        block.segment_context = context
        self._reserve(owner.small, segment_size)
        if self.stats is not None:
            self.stats.segment.change(owner.small, 1)
            if segment_size >= self.config.max_split_size:
                self.stats.oversize_segments.change(1)
        self._trace("segment_alloc", address, segment_size, owner, context)
        return block

    def _from_overflow_pools(self, owner: FreeList, size: int) -> Block | None:
        """A free block of a MemPool made with use_on_oom=True (2.8). Source: try_mempool_fallback()."""
        if owner.pool.id != DEFAULT_POOL:
            return None
        for pool in self.pools.values():
            if pool.use_on_oom:
                block = self._find(pool.free_list(owner.small, owner.stream), size, False)
                if block is not None:
                    return block
        return None

    def _hand_out(self, block: Block, size: int, requested: int, expandable: bool) -> Block:
        """Split what is too large, and mark the front part as allocated. Source: alloc_found_block()."""
        owner = block.owner
        stats = self.stats
        rest_size = block.size - size
        was_split = block.prev is not None or block.next is not None
        if owner.small or expandable:
            splits = rest_size >= MIN_BLOCK_SIZE
        else:
            splits = rest_size > SMALL_SIZE and size < self.config.max_split_size
        if splits and not owner.pool.no_split:
            rest = block
            tie = self._new_tie() if self._ties_by_block else rest.tie
            block = Block(rest.address, size, owner, tie)
            block.reservation = rest.reservation
            block.segment_context, rest.segment_context = rest.segment_context, None
            before = block.prev = rest.prev
            if before is not None:
                before.next = block
            block.next = rest
            rest.prev = block
            rest.address += size
            rest.size = rest_size
            self._insert(rest)
            if stats is not None and block.reservation is None:
                if was_split:
                    stats.inactive_split_bytes.change(owner.small, -size)
                else:
                    stats.inactive_split_changed(owner.small, 1, rest_size)
        elif was_split and stats is not None and block.reservation is None:
            stats.inactive_split_changed(owner.small, -1, -block.size)
        block.allocated = True
        block.requested = requested
        size = block.size
        self.live[block.address] = block
        self.allocated_bytes += size
        self.active_bytes += size
        self.requested_bytes += requested
        if self.active_bytes > self.peak_active_bytes:
            self.peak_active_bytes = self.active_bytes
        if self.allocated_bytes > self.peak_allocated_bytes:
            self.peak_allocated_bytes = self.allocated_bytes
        if self.requested_bytes > self.peak_requested_bytes:
            self.peak_requested_bytes = self.requested_bytes
        if stats is not None:
            stats.handed_out(owner.small, size, requested)
            if size >= self.config.max_split_size:
                stats.oversize_allocations.change(1)
        return block


def _expandable_size(block: Block) -> int:
    """What a free block could become without a new reservation."""
    right = block.next
    return block.size + (right.size if right is not None and not right.mapped else 0)
