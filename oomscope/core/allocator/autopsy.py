"""Why a request did not fit: the fewest live blocks whose absence would have let it fit.

There are two ways to make room: a contiguous stretch in a segment that the request could use, or whole
segments that would have gone back to the driver for a new one. Frees that wait for another stream are not
in the way: at a shortage the allocator waits for them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from oomscope.core.allocator.history import History
from oomscope.core.allocator.model import DEFAULT_POOL, Block, CachingAllocator
from oomscope.core.allocator.model_config import SMALL_SIZE
from oomscope.core.snapshot.columns import NO_STACK

PoolId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class LiveBlock:
    """A block that stands in the way."""

    address: int
    size: int
    requested: int
    pending: bool
    """Already freed by the program; it waits for another stream. Never so in an autopsy."""
    row: int | None
    """Row that allocated it; None when it is older than the history."""
    stack: int
    """Stack of the allocation in the snapshot's table, or `NO_STACK`."""
    age_rows: int | None
    """Rows since it was allocated."""


@dataclass(frozen=True, slots=True)
class Autopsy:
    """The blocks, and how their absence would have helped."""

    way: str
    """"stretch": the request fits where they are; "segments": their segments go back to the driver."""
    blocks: tuple[LiveBlock, ...]

    @property
    def live_bytes(self) -> int:
        return sum(block.size for block in self.blocks)


def live_block(block: Block, history: History | None, stacks: dict[int, int], now: int) -> LiveBlock:
    """A block of a replay with its row, stack and age at row `now`."""
    row = block.context if isinstance(block.context, int) else None
    stack = stacks.get(block.address, NO_STACK)
    if row is not None and history is not None:
        stack = history.stack[row]
    return LiveBlock(
        address=block.address,
        size=block.size,
        requested=block.requested,
        pending=block.pending,
        row=row,
        stack=stack,
        age_rows=None if row is None else now - row,
    )


def autopsy(
    allocator: CachingAllocator,
    size: int,
    *,
    stream: int = 0,
    pool: PoolId = DEFAULT_POOL,
    capacity: int | None = None,
    describe: Callable[[Block], LiveBlock] | None = None,
) -> Autopsy | None:
    """The fewest live blocks without which `size` bytes would have fitted; None when no set of them suffices.

    Exact for one stretch; for segments the fewest are found one by one, which can be more than the least
    possible when segments differ much in size.

    Args:
        allocator: the state before the request.
        size: rounded request.
        stream: stream of the request.
        pool: pool of the request.
        capacity: bytes of the device; without it only stretches are considered.
        describe: makes the description of a block.
    """
    found = [_best_stretch(allocator, size, stream, pool)]
    if capacity is not None:
        found.append(_best_segments(allocator, size, capacity))
    named = [(way, blocks) for way, blocks in zip(("stretch", "segments"), found, strict=False) if blocks]
    if not named:
        return None
    way, blocks = min(named, key=lambda each: (len(each[1]), sum(block.size for block in each[1])))
    make = describe or (lambda block: live_block(block, None, {}, 0))
    return Autopsy(way, tuple(make(block) for block in blocks))


def _best_stretch(allocator: CachingAllocator, size: int, stream: int, pool: PoolId) -> list[Block] | None:
    """In segments of the right pool, class and stream: the stretch of `size` bytes with the fewest live blocks."""
    best: list[Block] | None = None
    for head in segment_heads(allocator):
        owner = head.owner
        if owner.stream != stream or owner.pool.id != pool or owner.small != (size <= SMALL_SIZE):
            continue
        blocks = segment_blocks(head)
        first = room = 0
        for last, block in enumerate(blocks):
            room += block.size
            while room - blocks[first].size >= size:
                room -= blocks[first].size
                first += 1
            if room < size:
                continue
            live = [each for each in blocks[first : last + 1] if each.allocated]
            if best is None or (len(live), _bytes(live)) < (len(best), _bytes(best)):
                best = live
    return best


def _best_segments(allocator: CachingAllocator, size: int, capacity: int) -> list[Block] | None:
    """Segments whose return would make room for a new one, with the fewest live blocks."""
    segments = []
    returnable = 0
    for head in segment_heads(allocator):
        blocks = segment_blocks(head)
        live = [block for block in blocks if block.allocated]
        if live:
            segments.append((len(live), _bytes(blocks), live))
        else:
            returnable += _bytes(blocks)
    need = allocator.config.segment_size(size) - (capacity - allocator.reserved_bytes + returnable)
    single = [entry for entry in segments if entry[1] >= need]
    chosen: list[Block] = []
    gained = 0
    for _, room, live in sorted(segments, key=lambda entry: (entry[0] / entry[1], -entry[1])):
        if gained >= need:
            break
        gained += room
        chosen.extend(live)
    if gained < need:
        return None
    if single:
        one = min(single, key=lambda entry: (entry[0], _bytes(entry[2])))
        if one[0] <= len(chosen):
            return one[2]
    return chosen or None


def _bytes(blocks: list[Block]) -> int:
    return sum(block.size for block in blocks)


def segment_heads(allocator: CachingAllocator) -> list[Block]:
    """First block of each segment and of each contiguous mapped range."""
    return [
        block
        for block in (*allocator.free_blocks.values(), *allocator.live.values())
        if block.prev is None or not block.prev.mapped
    ]


def segment_blocks(head: Block) -> list[Block]:
    """The mapped blocks of a segment from its first one on."""
    blocks = []
    block: Block | None = head
    while block is not None and block.mapped:
        blocks.append(block)
        block = block.next
    return blocks
