"""State of one device's caching allocator, and the primitive moves on it: find, insert, remove, merge, trace.

Standard library only, Python 3.9: this module also runs inside training jobs.
"""

from __future__ import annotations

import time
from bisect import bisect_left, insort
from typing import Any, Callable, NamedTuple

from .model_blocks import ADDRESS_BITS, DEFAULT_POOL, SIZE_SHIFT, Block, FreeList, Pool, PoolId, Reservation
from .model_config import AllocatorConfig
from .model_driver import VirtualDriver
from .model_stats import DeviceStats


class TraceRow(NamedTuple):
    """One row of the memory history, in torch's words and sizes.

    `size` is the requested size for alloc and free rows, the rounded request for `oom`, and the bytes of
    memory for segment rows. `device_free` is set for `oom` only, whose `addr` is 0.
    """

    action: str
    addr: int
    size: int
    stream: int
    time_us: int
    context: object
    device_free: int | None = None
    pool: PoolId = DEFAULT_POOL


class AllocatorState:
    """Blocks, lists and totals; the rules are in the subclasses.

    Totals (`allocated_bytes` <= `active_bytes` <= `reserved_bytes`, and `requested_bytes`) are kept for
    every user of the model; the full statistics only when asked for, because they cost more than the
    allocation itself.
    """

    def __init__(
        self,
        config: AllocatorConfig,
        driver: VirtualDriver,
        *,
        device: int = 0,
        tracer: Callable[[TraceRow], None] | None = None,
        clock: Callable[[], int] | None = None,
        detailed_stats: bool = True,
    ) -> None:
        self.driver = driver
        self.device = device
        self.stats: DeviceStats | None = DeviceStats() if detailed_stats else None
        self.pools: dict[PoolId, Pool] = {DEFAULT_POOL: Pool(DEFAULT_POOL)}
        self.live: dict[int, Block] = {}
        """Address -> block that is allocated or pending."""
        self.free_blocks: dict[int, Block] = {}
        self.unmapped_blocks: dict[int, Block] = {}
        self.reservations: list[Reservation] = []
        self.release_callbacks: list[Callable[[], bool]] = []
        """Called before new memory is asked for; True means that something was freed (CUDA IPC in torch)."""
        self.allocated_bytes = self.active_bytes = self.reserved_bytes = self.requested_bytes = 0
        self.peak_allocated_bytes = self.peak_active_bytes = 0
        self.peak_reserved_bytes = self.peak_requested_bytes = 0
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        self.allowed_bytes: int | None = None
        self._tracer = tracer
        self._clock = clock or _now_us
        self._searches = 0
        self._ties = 0
        self._apply(config)
        if config.per_process_memory_fraction < 1.0:
            self.set_memory_fraction(config.per_process_memory_fraction)

    def reconfigure(self, config: AllocatorConfig) -> None:
        """Change settings at run time, as torch.cuda.memory._set_allocator_settings() does."""
        self._apply(config)

    def set_memory_fraction(self, fraction: float) -> None:
        """Allow this process `fraction` of the card's total memory; 1.0 lifts the limit.

        Raises:
            ValueError: outside [0, 1].
        """
        if not 0.0 <= fraction <= 1.0:
            raise ValueError(f"invalid fraction: {fraction}. Please set within [0, 1].")
        self.allowed_bytes = int(fraction * self.driver.total_bytes) if fraction < 1.0 else None
        self._collects = self.allowed_bytes is not None and self.config.garbage_collection_threshold > 0.0

    def _apply(self, config: AllocatorConfig) -> None:
        self.config = config
        self._rounds_plainly = config.rounds_plainly
        self._ties_by_segment = config.tiebreak == "segment"
        self._ties_by_block = config.tiebreak == "block"
        self._collects = self.allowed_bytes is not None and config.garbage_collection_threshold > 0.0

    # ---- primitives

    def pool(self, pool_id: PoolId) -> Pool:
        """The pool of that id, created on first use."""
        found = self.pools.get(pool_id)
        if found is None:
            found = self.pools[pool_id] = Pool(pool_id)
        return found

    def _new_tie(self) -> int:
        """Creation order for a new segment or block, 0 when addresses decide."""
        if not (self._ties_by_segment or self._ties_by_block):
            return 0
        self._ties += 1
        return self._ties << ADDRESS_BITS

    def _insert(self, block: Block) -> None:
        """Put a free, mapped block into its list."""
        key = block.key = block.size << SIZE_SHIFT | block.tie | block.address
        block.born = self._searches
        insort(block.owner.keys, key)
        self.free_blocks[block.address] = block

    def _remove(self, block: Block) -> None:
        """Take a free block out of its list."""
        keys = block.owner.keys
        del keys[bisect_left(keys, block.key)]
        del self.free_blocks[block.address]

    def _insert_unmapped(self, block: Block) -> None:
        insort(block.owner.unmapped, block.address)
        self.unmapped_blocks[block.address] = block

    def _remove_unmapped(self, block: Block) -> None:
        addresses = block.owner.unmapped
        del addresses[bisect_left(addresses, block.address)]
        del self.unmapped_blocks[block.address]

    def _merge_and_insert(self, block: Block) -> None:
        """Join a newly free block with its free neighbours and put the result into the list.

        The joined block is `block` itself, as in torch, where this decides the order by creation.
        """
        keys = block.owner.keys
        left = block.prev
        if left is not None and left.mapped and not left.allocated and not left.pending:
            del keys[bisect_left(keys, left.key)]
            del self.free_blocks[left.address]
            block.address = left.address
            block.size += left.size
            block.segment_context = left.segment_context
            before = block.prev = left.prev
            if before is not None:
                before.next = block
        right = block.next
        if right is not None and right.mapped and not right.allocated and not right.pending:
            del keys[bisect_left(keys, right.key)]
            del self.free_blocks[right.address]
            block.size += right.size
            after = block.next = right.next
            if after is not None:
                after.prev = block
        key = block.key = block.size << SIZE_SHIFT | block.tie | block.address
        block.born = self._searches
        insort(keys, key)
        self.free_blocks[block.address] = block

    def _reserve(self, small: bool, size: int) -> None:
        """Count `size` bytes more from the driver."""
        self.num_device_alloc += 1
        self.reserved_bytes += size
        if self.reserved_bytes > self.peak_reserved_bytes:
            self.peak_reserved_bytes = self.reserved_bytes
        if self.stats is not None:
            self.stats.reserved_bytes.change(small, size)

    def _unreserve(self, small: bool, size: int) -> None:
        """Count `size` bytes returned to the driver."""
        self.num_device_free += 1
        self.reserved_bytes -= size
        if self.stats is not None:
            self.stats.reserved_bytes.change(small, -size)

    def _trace(self, action: str, address: int, size: int, owner: FreeList, context: Any) -> None:
        if self._tracer is not None:
            row = TraceRow(action, address, size, owner.stream, self._clock(), context, None, owner.pool.id)
            self._tracer(row)


def _now_us() -> int:
    """Microseconds since 1970, the unit of `time_us` in torch's traces."""
    return time.time_ns() // 1000
