"""Blocks, address reservations and lists of free blocks: the data that the allocator's rules work on.

Standard library only, Python 3.9: this module also runs inside training jobs.

Source: struct Block, BlockPool and ExpandableSegment in c10/cuda/CUDACachingAllocator.cpp.
"""

from __future__ import annotations

from typing import Any

PoolId = tuple[int, int]

#: Memory that belongs to no CUDA graph and no MemPool.
DEFAULT_POOL: PoolId = (0, 0)

#: A free block's key is `size << SIZE_SHIFT | tie << ADDRESS_BITS | address`: one integer compare orders
#: blocks.
ADDRESS_BITS = 48
ADDRESS_MASK = (1 << ADDRESS_BITS) - 1
SIZE_SHIFT = 96


class Block:
    """A contiguous range of one segment: handed out, waiting for an event, free, or not mapped.

    `owner` is the list that the block returns to when it is freed. `prev` and `next` are the neighbours in
    the same segment. `tie` is the creation order, already shifted for the key, and 0 when addresses decide.
    A block is *live* while `allocated` or `pending` (freed by the program, but an event on another stream
    is outstanding).
    """

    __slots__ = (
        "address",
        "allocated",
        "born",
        "context",
        "key",
        "mapped",
        "next",
        "owner",
        "pending",
        "prev",
        "requested",
        "reservation",
        "segment_context",
        "size",
        "stream_uses",
        "tie",
    )

    def __init__(self, address: int, size: int, owner: FreeList, tie: int) -> None:
        self.address = address
        self.size = size
        self.owner = owner
        self.tie = tie
        self.requested = 0
        self.prev: Block | None = None
        self.next: Block | None = None
        self.allocated = False
        self.pending = False
        self.mapped = True
        self.reservation: Reservation | None = None
        self.stream_uses: set[int] | None = None
        self.context: Any = None
        self.segment_context: Any = None
        self.born = 0
        self.key = 0

    @property
    def is_live(self) -> bool:
        return self.allocated or self.pending

    @property
    def is_split(self) -> bool:
        """Whether other blocks share the segment, so that it cannot be returned to the driver."""
        return self.prev is not None or self.next is not None

    def __repr__(self) -> str:
        state = "allocated" if self.allocated else "pending" if self.pending else "free"
        return f"<Block {self.address:#x}+{self.size} {state if self.mapped else 'unmapped'}>"


class Reservation:
    """The address range of one expandable segment; memory is mapped into it in granules."""

    __slots__ = ("base", "granule", "size")

    def __init__(self, base: int, size: int, granule: int) -> None:
        self.base = base
        self.size = size
        self.granule = granule


class FreeList:
    """Free blocks of one pool, size class and stream, in the order of the search.

    `keys` is sorted; `unmapped` holds the sorted addresses of blocks without memory.
    """

    __slots__ = ("keys", "pool", "small", "stream", "unmapped")

    def __init__(self, pool: Pool, small: bool, stream: int) -> None:
        self.pool = pool
        self.small = small
        self.stream = stream
        self.keys: list[int] = []
        self.unmapped: list[int] = []


class Pool:
    """The default pool or a private one (CUDA graph, MemPool), with a list per size class and stream.

    `users` counts the graphs and MemPool objects that use a private pool; at 0 its memory may be returned.
    """

    __slots__ = ("custom_allocator", "id", "large", "no_split", "small", "use_on_oom", "users")

    def __init__(self, pool_id: PoolId) -> None:
        self.id = pool_id
        self.small: dict[int, FreeList] = {}
        self.large: dict[int, FreeList] = {}
        self.users = 1
        self.no_split = False
        self.use_on_oom = False
        self.custom_allocator = False

    def free_list(self, small: bool, stream: int) -> FreeList:
        """The list for a size class and stream, created on first use."""
        lists = self.small if small else self.large
        found = lists.get(stream)
        if found is None:
            found = lists[stream] = FreeList(self, small, stream)
        return found

    def lists(self, small: bool) -> list[FreeList]:
        """All lists of a size class in the order of torch's set: by stream handle, unsigned."""
        lists = self.small if small else self.large
        return [lists[stream] for stream in sorted(lists)]
