"""A request trace run by the model's public calls: slow, and what the fast loop must equal."""

from __future__ import annotations

from oomscope.core.allocator.model import (
    AllocatorConfig,
    AllocatorOutOfMemory,
    CachingAllocator,
    VirtualDriver,
)
from oomscope.core.allocator.requests import ASK, CLEAR, DONE, GIVE, GIVE_LATER, TRY, RequestTrace
from oomscope.core.allocator.simulate import Outcome


def run_by_model(
    trace: RequestTrace,
    config: AllocatorConfig,
    capacity: int | None,
    addresses: str,
    total_bytes: int | None,
) -> Outcome:
    driver = VirtualDriver(capacity, addresses=addresses, total_bytes=total_bytes)
    allocator = CachingAllocator(config, driver)
    live: dict[int, int] = {}
    ooms: list[int] = []
    rows = zip(trace.kind, trace.slot, trace.size, trace.stream, trace.pool, trace.row, strict=True)
    for kind, slot, size, stream, pool, row in rows:
        if kind in (ASK, TRY):
            try:
                address = allocator.malloc(size, stream, None, pool)
            except AllocatorOutOfMemory:
                ooms.append(row)
                continue
            if kind == TRY:
                allocator.free(address)
            else:
                live[slot] = address
        elif kind == GIVE and slot in live:
            allocator.free(live.pop(slot))
        elif kind == GIVE_LATER and slot in live:
            allocator.record_stream(live[slot], 1_000_000 + slot)
            allocator.free(live[slot])
        elif kind == DONE and slot in live:
            _complete(allocator, live.pop(slot), 1_000_000 + slot)
        elif kind == CLEAR:
            allocator.empty_cache()
    return Outcome(
        peak_reserved_bytes=allocator.peak_reserved_bytes,
        retries=allocator.num_alloc_retries,
        ooms=len(ooms),
        first_oom_row=ooms[0] if ooms else None,
        device_allocs=allocator.num_device_alloc,
        device_frees=allocator.num_device_free,
    )


def _complete(allocator: CachingAllocator, address: int, stream: int) -> None:
    """Let the event of one pending free pass; nothing if a synchronisation has done so."""
    queue = allocator._events.pop(stream, None)
    if queue is not None:
        block = allocator.live[address]
        assert queue[0] is block
        allocator.complete(block)
