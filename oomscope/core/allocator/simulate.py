"""Run a request trace through the allocator: peak, retries and the first request that does not fit.

The loop works on the model's own blocks and lists and calls the model for everything that is not the
ordinary case (a free block fits; a block is freed and joined). A property test holds it equal to the model.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass
from typing import Any

from oomscope.core.allocator.model import (
    DEFAULT_POOL,
    AllocatorConfig,
    AllocatorOutOfMemory,
    Block,
    CachingAllocator,
    VirtualDriver,
)
from oomscope.core.allocator.model_blocks import ADDRESS_MASK, SIZE_SHIFT, FreeList, Pool
from oomscope.core.allocator.model_config import MIN_BLOCK_SIZE, SMALL_SIZE, UNLIMITED
from oomscope.core.allocator.requests import ASK, CLEAR, DONE, GIVE, GIVE_LATER, RequestTrace


@dataclass(frozen=True, slots=True)
class Outcome:
    """What one run came to; sizes in bytes."""

    peak_reserved_bytes: int
    retries: int
    """Times that all cached memory had to be returned to the driver."""
    ooms: int
    """Requests that did not fit."""
    first_oom_row: int | None
    """Row of the first of them; None when all fitted."""
    device_allocs: int
    """Calls of the driver for memory; each takes time and waits for the device."""
    device_frees: int

    @property
    def fits(self) -> bool:
        return self.ooms == 0


class _Allocator(CachingAllocator):
    """The model, with pending frees as the trace says them."""

    def __init__(self, config: AllocatorConfig, driver: VirtualDriver) -> None:
        super().__init__(config, driver, detailed_stats=False)
        self.waiting: dict[int, Block] = {}
        """Slot -> block that was freed but is not yet free."""

    def _drain_events(self, pool: Pool | None, context: Any) -> int:
        """A synchronisation completes all of them."""
        waiting, self.waiting = self.waiting, {}
        for block in waiting.values():
            block.pending = False
            self._merge_and_insert(block)
        return len(waiting)

    def _obtain(self, owner: FreeList, size: int, expandable: bool, context: Any) -> Block | None:
        """None also where `throw_on_cudamalloc_oom` raises at once."""
        try:
            return super()._obtain(owner, size, expandable, context)
        except AllocatorOutOfMemory:
            return None


class Prepared:
    """What a trace comes to under one way of rounding; computed once for many runs."""

    def __init__(self, trace: RequestTrace, config: AllocatorConfig) -> None:
        self.divisions = config.roundup_power2_divisions
        if config.rounds_plainly:
            self.sizes = [(size + MIN_BLOCK_SIZE - 1) & -MIN_BLOCK_SIZE for size in trace.size]
        else:
            cache: dict[int, int] = {}
            for size in set(trace.size):
                cache[size] = config.round_size(max(size, 1))
            self.sizes = [cache[size] for size in trace.size]
        numbers: dict[tuple[tuple[int, int], bool, int], int] = {}
        self.owners = [
            numbers.setdefault((pool, size <= SMALL_SIZE, stream), len(numbers))
            for pool, size, stream in zip(trace.pool, self.sizes, trace.stream, strict=True)
        ]
        self.kinds = list(numbers)


def run(
    trace: RequestTrace,
    config: AllocatorConfig,
    *,
    capacity: int | None = None,
    addresses: str = "holes",
    total_bytes: int | None = None,
    prepared: Prepared | None = None,
    stop_at_oom: bool = False,
) -> Outcome:
    """Run `trace` from an empty allocator.

    Args:
        trace: the requests.
        config: settings.
        capacity: bytes the driver can hand out; None for no limit.
        addresses: address model of the driver.
        total_bytes: the card's total memory, for memory fractions and address ranges.
        prepared: `Prepared(trace, config)`, to share it between runs with the same rounding.
        stop_at_oom: stop at the first request that does not fit.
    """
    if prepared is None or prepared.divisions != config.roundup_power2_divisions:
        prepared = Prepared(trace, config)
    driver = VirtualDriver(capacity, total_bytes=total_bytes, addresses=addresses)
    allocator = _Allocator(config, driver)
    lists = [allocator.pool(pool).free_list(small, stream) for pool, small, stream in prepared.kinds]
    ooms = _loop(trace, prepared, allocator, lists, stop_at_oom)
    return Outcome(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.num_alloc_retries,
        ooms=len(ooms),
        first_oom_row=ooms[0] if ooms else None,
        device_allocs=allocator.num_device_alloc,
        device_frees=allocator.num_device_free,
    )


def _loop(
    trace: RequestTrace,
    prepared: Prepared,
    allocator: _Allocator,
    lists: list[FreeList],
    stop_at_oom: bool,
) -> list[int]:
    """All requests; returns the rows of those that did not fit."""
    config = allocator.config
    free = allocator.free_blocks
    blocks: list[Block | None] = [None] * trace.n_slots
    grows = [_may_expand(allocator, owner) for owner in lists]
    collects = allocator._collects
    max_split, rounding = config.max_split_size, config.max_non_split_rounding
    limited = max_split != UNLIMITED
    by_block = config.tiebreak == "block"
    ooms: list[int] = []
    index = -1
    for kind, slot, size, number in zip(trace.kind, trace.slot, prepared.sizes, prepared.owners, strict=True):
        index += 1
        if kind == GIVE:
            block = blocks[slot]
            if block is None:
                continue
            blocks[slot] = None
            block.allocated = False
        elif kind == ASK or kind > CLEAR:
            owner = lists[number]
            keys = owner.keys
            place = bisect_left(keys, size << SIZE_SHIFT)
            expandable = grows[number]
            found: Block | None = None
            if place < len(keys):
                found = free[keys[place] & ADDRESS_MASK]
                right = found.next
                if collects or (
                    found.reservation is not None
                    and not (expandable and (right is None or right.mapped or place + 1 == len(keys)))
                ):
                    found = allocator._find(owner, size, expandable)
                elif limited and (
                    found.size >= max_split if size < max_split else found.size >= size + rounding
                ):
                    found = None
                else:
                    del keys[place]
                    del free[found.address]
            elif collects:
                found = allocator._find(owner, size, expandable)
            if found is None:
                found = allocator._obtain(owner, size, expandable, None)
                if found is None:
                    ooms.append(trace.row[index])
                    if stop_at_oom:
                        break
                    continue
            rest = found.size - size
            if (
                rest >= MIN_BLOCK_SIZE
                if owner.small or expandable
                else rest > SMALL_SIZE and size < max_split
            ):
                front = Block(found.address, size, owner, allocator._new_tie() if by_block else found.tie)
                front.reservation = found.reservation
                before = front.prev = found.prev
                if before is not None:
                    before.next = front
                front.next = found
                found.prev = front
                found.address += size
                found.size = rest
                key = found.key = rest << SIZE_SHIFT | found.tie | found.address
                found.born = allocator._searches
                insort(keys, key)
                free[found.address] = found
                found = front
            if kind == ASK:
                found.allocated = True
                blocks[slot] = found
                continue
            block = found  # an attempt: given back at once
        elif kind == DONE:
            waiting = allocator.waiting.pop(slot, None)
            if waiting is None:
                continue
            block = waiting
            block.pending = False
        elif kind == GIVE_LATER:
            block = blocks[slot]
            if block is not None:
                blocks[slot] = None
                block.allocated = False
                block.pending = True
                allocator.waiting[slot] = block
            continue
        else:
            allocator.release_cached()
            continue
        keys = block.owner.keys
        left = block.prev
        if left is not None and left.mapped and not left.allocated and not left.pending:
            del keys[bisect_left(keys, left.key)]
            del free[left.address]
            block.address = left.address
            block.size += left.size
            before = block.prev = left.prev
            if before is not None:
                before.next = block
        right = block.next
        if right is not None and right.mapped and not right.allocated and not right.pending:
            del keys[bisect_left(keys, right.key)]
            del free[right.address]
            block.size += right.size
            after = block.next = right.next
            if after is not None:
                after.prev = block
        key = block.key = block.size << SIZE_SHIFT | block.tie | block.address
        block.born = allocator._searches
        insort(keys, key)
        free[block.address] = block
    return ooms


def _may_expand(allocator: CachingAllocator, owner: FreeList) -> bool:
    """Whether requests of this list use expandable segments."""
    config = allocator.config
    return config.expandable_segments and (owner.pool.id == DEFAULT_POOL or config.private_pools_expandable)
