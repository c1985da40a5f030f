"""The recorded history of one device, as plain lists that a row-by-row replay reads fast.

Numbers that columns refer to by index (streams, pools) are resolved here, so that nothing below needs the
snapshot.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oomscope.core.allocator.model import DEFAULT_POOL
from oomscope.core.snapshot.columns import NO_STACK, Action, BlockState
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot

PoolId = tuple[int, int]

ALLOC = int(Action.ALLOC)
FREE_REQUESTED = int(Action.FREE_REQUESTED)
FREE_COMPLETED = int(Action.FREE_COMPLETED)
SEGMENT_ALLOC = int(Action.SEGMENT_ALLOC)
SEGMENT_FREE = int(Action.SEGMENT_FREE)
SEGMENT_MAP = int(Action.SEGMENT_MAP)
SEGMENT_UNMAP = int(Action.SEGMENT_UNMAP)
OOM = int(Action.OOM)
SNAPSHOT = int(Action.SNAPSHOT)

SEGMENT_ACTIONS = frozenset((SEGMENT_ALLOC, SEGMENT_FREE, SEGMENT_MAP, SEGMENT_UNMAP))
RELEASE_ACTIONS = frozenset((SEGMENT_FREE, SEGMENT_UNMAP))

#: Device addresses have 47 bits.
_ADDRESS_END = 1 << 48

_NAMES = {int(each): each.name.lower() for each in Action}

#: `_record_memory_history(True)` in its old form, and enabled="state", keep a ring of one row: not a history.
MIN_ROWS = 3


def action_name(code: int) -> str:
    """The word for an action code in torch."""
    return _NAMES.get(code, "unknown")


@dataclass(slots=True)
class FinalBlock:
    """A block at the end of the history."""

    address: int
    size: int
    requested: int
    live: bool
    pending: bool
    stack: int


@dataclass(slots=True)
class FinalSegment:
    """A segment, or a contiguous mapped range of an expandable one, at the end of the history."""

    address: int
    size: int
    stream: int
    small: bool
    pool: PoolId
    expandable: bool
    blocks: list[FinalBlock]


@dataclass(slots=True)
class History:
    """All rows of one device and the state after the last one. Lists have one entry per row."""

    device: int
    action: list[int]
    address: list[int]
    size: list[int]
    stream: list[int]
    stack: list[int]
    pool: list[PoolId] | None
    """Pool of each row; None when the rows do not say (before 2.12)."""
    segments: list[FinalSegment]
    emptied: frozenset[int]
    """Stacks that contain a call of empty_cache."""

    def __len__(self) -> int:
        return len(self.action)

    @property
    def has_rows(self) -> bool:
        """Whether this is a history at all."""
        return len(self.action) >= MIN_ROWS

    def first_impossible(self) -> int | None:
        """First row with an address or size that no device has; the number of rows if a final block has one."""
        address, size = np.asarray(self.address, np.int64), np.asarray(self.size, np.int64)
        code = np.asarray(self.action, np.uint8)
        wrong = (address < 0) | (address >= _ADDRESS_END) | (size <= 0) | (size >= _ADDRESS_END)
        wrong &= code <= SEGMENT_UNMAP
        wrong |= (code == OOM) & ((size <= 0) | (size >= _ADDRESS_END))
        if wrong.any():
            return int(np.argmax(wrong))
        if not all(_is_possible(segment) for segment in self.segments):
            return len(self)
        return None

    def describe(self, row: int) -> str:
        """A row in words, for messages."""
        if row >= len(self.action):
            return "end of the history"
        name = action_name(self.action[row])
        where = "" if self.action[row] == OOM else f" at {self.address[row]:#x}"
        return f"{name}{where}, {self.size[row]} bytes, stream {self.stream[row]}"


def _is_possible(segment: FinalSegment) -> bool:
    """Whether blocks lie side by side in a segment that a device can have."""
    position = segment.address
    for block in segment.blocks:
        if (
            block.address != position
            or block.size <= 0
            or (block.live and not 0 < block.requested <= block.size)
        ):
            return False
        position += block.size
    return 0 <= segment.address < position <= _ADDRESS_END and position == segment.address + segment.size


def read_history(snapshot: Snapshot, device: DeviceSnapshot, *, start: int = 0) -> History:
    """Rows of `device` from `start` on, and its final segments."""
    events = device.events
    streams = np.asarray(snapshot.streams or [0], dtype=object)
    pools = snapshot.pools
    rows = slice(start, None)
    pool: list[PoolId] | None = None
    if events.pool is not None:
        pool = [pools[index] if index >= 0 else DEFAULT_POOL for index in events.pool[rows].tolist()]
    return History(
        device=device.device,
        action=events.action[rows].tolist(),
        address=events.address[rows].tolist(),
        size=events.size[rows].tolist(),
        stream=streams[events.stream[rows]].tolist(),
        stack=events.stack[rows].tolist(),
        pool=pool,
        segments=_final_segments(snapshot, device),
        emptied=_emptying_stacks(snapshot),
    )


def _final_segments(snapshot: Snapshot, device: DeviceSnapshot) -> list[FinalSegment]:
    table, blocks = device.segments, device.blocks
    columns = zip(
        blocks.address.tolist(),
        blocks.size.tolist(),
        blocks.requested_size.tolist(),
        blocks.state.tolist(),
        blocks.stack.tolist(),
        strict=True,
    )
    rows = [
        FinalBlock(
            address,
            size,
            requested,
            state != BlockState.INACTIVE,
            state == BlockState.PENDING_FREE,
            stack,
        )
        for address, size, requested, state, stack in columns
    ]
    first = table.first_block.tolist()
    return [
        FinalSegment(
            address=int(table.address[index]),
            size=int(table.total_size[index]),
            stream=snapshot.streams[int(table.stream[index])],
            small=not bool(table.is_large[index]),
            pool=snapshot.pools[int(table.pool[index])],
            expandable=bool(table.is_expandable[index]),
            blocks=rows[first[index] : first[index + 1]],
        )
        for index in range(len(table))
    ]


def _emptying_stacks(snapshot: Snapshot) -> frozenset[int]:
    """Numbers of the stacks whose innermost frames include empty_cache (Python) or emptyCache (C++)."""
    names = {
        number
        for number, frame in enumerate(snapshot.stacks.frames)
        if frame.function == "empty_cache" or "emptyCache" in frame.function
    }
    if not names:
        return frozenset()
    stacks = snapshot.stacks
    hits = np.isin(stacks.frame_ids, list(names))
    owner = np.repeat(np.arange(len(stacks)), np.diff(stacks.offsets))
    return frozenset(int(stack) for stack in np.unique(owner[hits]) if stack != NO_STACK)
