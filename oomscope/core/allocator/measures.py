"""What stands between a failed request and the memory it needs: the evidence behind a verdict.

The state that counts is the one just before the `oom` row, not the end of the file: a snapshot is usually
taken after the exception has freed almost everything.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields

from oomscope.core.allocator.autopsy import (
    Autopsy,
    LiveBlock,
    autopsy,
    live_block,
    segment_blocks,
    segment_heads,
)
from oomscope.core.allocator.history import OOM, History
from oomscope.core.allocator.model import DEFAULT_POOL, Block, CachingAllocator
from oomscope.core.allocator.model_config import SMALL_SIZE
from oomscope.core.allocator.replay import Replayer
from oomscope.core.allocator.verify import Verification, verify
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot

PoolId = tuple[int, int]

#: Pins that are reported.
MAX_PINS = 20


@dataclass(frozen=True, slots=True)
class Pin:
    """A segment with more free than live memory, and a live block that keeps it from being returned."""

    address: int
    """Of the segment, or of the mapped range."""
    free_bytes: int
    live_bytes: int
    live_blocks: int
    holder: LiveBlock
    """The largest live block in it."""


@dataclass(slots=True)
class StateMeasures:
    """How the memory of one moment is divided; sizes in bytes."""

    reserved_bytes: int
    allocated_bytes: int
    active_bytes: int
    requested_bytes: int
    pending_free_bytes: int
    """Freed by the program, but another stream may still use it (record_stream)."""
    rounding_bytes: int
    """Inside live blocks, beyond what was asked for: rounding, and tails too small to split off."""
    free_bytes: int
    """Free blocks, of any kind."""
    free_whole_segments_bytes: int
    """Whole segments without a live block: returned to the driver at a shortage."""
    free_unmappable_bytes: int
    """Whole granules of expandable segments without a live block: unmapped at a shortage."""
    stranded_bytes: int
    """Free, but beside live blocks: cannot be returned, only reused piece by piece (torch: inactive split)."""
    largest_free_bytes: int
    pins: list[Pin] = field(default_factory=list)


@dataclass(slots=True)
class OomMeasures(StateMeasures):
    """The moment before a failed request."""

    row: int = -1
    """The `oom` row."""
    request_bytes: int = 0
    """The block that was needed: rounded."""
    stream: int = 0
    pool: PoolId = DEFAULT_POOL
    device_free_bytes: int | None = None
    """Free memory of the card at the failure, after everything had been returned."""
    capacity_bytes: int | None = None
    """What this process could have reserved in all at that moment."""
    shortfall0_bytes: int | None = None
    """Live blocks plus the request minus the capacity. Positive: no allocator setting can help."""
    usable_free_bytes: int = 0
    """Free blocks of the same pool, size class and stream."""
    largest_usable_bytes: int = 0
    other_free_bytes: int = 0
    """Free blocks that belong to other streams, pools or the other size class."""
    autopsy: Autopsy | None = None
    """The fewest live blocks without which the request would have fitted."""

    @property
    def enough_but_split(self) -> bool:
        """Fragmentation proper: enough free bytes in the right place, no piece large enough."""
        return self.usable_free_bytes >= self.request_bytes > self.largest_usable_bytes


def measure(
    allocator: CachingAllocator, history: History | None = None, stacks: dict[int, int] | None = None
) -> StateMeasures:
    """How the memory of `allocator` is divided now.

    Args:
        allocator: any state of the model; of a replay, blocks can be traced to their rows.
        history: rows of the replay, for the stacks of pins.
        stacks: address -> stack of blocks older than the history.
    """
    measures = _totals(allocator)
    measures.pins = _pins(allocator, history, stacks or {})
    return measures


def at_oom(
    snapshot: Snapshot,
    device: DeviceSnapshot,
    *,
    row: int | None = None,
    capacity: int | None = None,
    verification: Verification | None = None,
) -> OomMeasures | None:
    """The state just before an `oom` row; None when there is no such row or the replay is not exact.

    Args:
        snapshot: the file.
        device: one device of it.
        row: which `oom` row; default the last one.
        capacity: bytes that the device has for this process; default what the row itself shows.
        verification: result of `verify(snapshot, device)`, if at hand.
    """
    checked = verification or verify(snapshot, device)
    history = checked.history
    ooms = [number for number, action in enumerate(history.action) if action == OOM]
    if checked.replay is None or not ooms or (row is not None and row not in ooms):
        return None
    if not checked.exact and (checked.replay.problems or checked.replay.matched <= ooms[-1]):
        return None
    row = ooms[-1] if row is None else row
    before = Replayer(history, checked.config, stop=row).run()
    allocator = before.allocator
    pool = history.pool[row] if history.pool is not None else DEFAULT_POOL
    totals = _totals(allocator)
    measures = OomMeasures(
        **{each.name: getattr(totals, each.name) for each in fields(totals)},
        row=row,
        request_bytes=history.size[row],
        stream=history.stream[row],
        pool=pool,
    )
    stacks = initial_stacks(history)
    measures.pins = _pins(allocator, history, stacks)
    _add_usable(measures, allocator)
    _add_capacity(measures, checked, capacity)
    measures.autopsy = autopsy(
        allocator,
        measures.request_bytes,
        stream=measures.stream,
        pool=pool,
        capacity=measures.capacity_bytes,
        describe=lambda block: live_block(block, history, stacks, row),
    )
    return measures


def initial_stacks(history: History) -> dict[int, int]:
    """Address -> stack of the blocks that no row allocates but that are there at the end."""
    return {
        block.address: block.stack for segment in history.segments for block in segment.blocks if block.live
    }


def _totals(allocator: CachingAllocator) -> StateMeasures:
    free = list(allocator.free_blocks.values())
    free_bytes = sum(block.size for block in free)
    whole = sum(block.size for block in free if block.reservation is None and not block.is_split)
    unmappable = sum(unmappable_bytes(block) for block in free)
    return StateMeasures(
        reserved_bytes=allocator.reserved_bytes,
        allocated_bytes=allocator.allocated_bytes,
        active_bytes=allocator.active_bytes,
        requested_bytes=allocator.requested_bytes,
        pending_free_bytes=allocator.active_bytes - allocator.allocated_bytes,
        rounding_bytes=allocator.active_bytes - allocator.requested_bytes,
        free_bytes=free_bytes,
        free_whole_segments_bytes=whole,
        free_unmappable_bytes=unmappable,
        stranded_bytes=free_bytes - whole - unmappable,
        largest_free_bytes=max((block.size for block in free), default=0),
    )


def unmappable_bytes(block: Block) -> int:
    """Whole granules inside a free block of an expandable segment; 0 for other blocks."""
    if block.reservation is None:
        return 0
    granule, base = block.reservation.granule, block.reservation.base
    first = (block.address - base + granule - 1) // granule
    last = (block.address + block.size - base) // granule
    return max(0, last - first) * granule


def _add_usable(measures: OomMeasures, allocator: CachingAllocator) -> None:
    small = measures.request_bytes <= SMALL_SIZE
    usable = [
        block.size
        for block in allocator.free_blocks.values()
        if block.owner.small == small
        and block.owner.stream == measures.stream
        and block.owner.pool.id == measures.pool
    ]
    measures.usable_free_bytes = sum(usable)
    measures.largest_usable_bytes = max(usable, default=0)
    measures.other_free_bytes = measures.free_bytes - measures.usable_free_bytes


def _add_capacity(measures: OomMeasures, checked: Verification, capacity: int | None) -> None:
    history = checked.history
    free = history.address[measures.row]
    measures.device_free_bytes = free if free >= 0 else None
    if capacity is None and checked.replay is not None:
        capacity = checked.replay.capacity_by_row.get(measures.row)
    if capacity is not None:
        measures.capacity_bytes = capacity
        measures.shortfall0_bytes = measures.active_bytes + measures.request_bytes - capacity


def _pins(allocator: CachingAllocator, history: History | None, stacks: dict[int, int]) -> list[Pin]:
    """Segments with more free than live memory, the most free memory first."""
    pins = []
    for head in segment_heads(allocator):
        blocks = segment_blocks(head)
        live = [block for block in blocks if block.is_live]
        free_bytes = sum(block.size for block in blocks if not block.is_live)
        live_bytes = sum(block.size for block in live)
        if live and free_bytes > live_bytes:
            holder = max(live, key=lambda block: block.size)
            described = live_block(holder, history, stacks, len(history) if history else 0)
            pins.append(Pin(head.address, free_bytes, live_bytes, len(live), described))
    pins.sort(key=lambda pin: -pin.free_bytes)
    return pins[:MAX_PINS]
