"""A snapshot as arrays: one array per field, frames and stacks interned.

A history of a million events is a million dictionaries in torch's own form (half a gigabyte) and 41 MB here,
and every analysis becomes
a few vectorised passes. Strings, stacks and frames are stored once and referred to by number.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

IntArray = NDArray[np.int64]
Int32Array = NDArray[np.int32]
Int16Array = NDArray[np.int16]
ByteArray = NDArray[np.uint8]
BoolArray = NDArray[np.bool_]


class Action(enum.IntEnum):
    """What a trace row records; `UNKNOWN` stands for actions that this version does not know.

    Source: TraceEntry::Action in c10/cuda/CUDACachingAllocator.h, torch 2.13.
    """

    ALLOC = 0
    FREE_REQUESTED = 1
    FREE_COMPLETED = 2
    SEGMENT_ALLOC = 3
    SEGMENT_FREE = 4
    SEGMENT_MAP = 5
    SEGMENT_UNMAP = 6
    SNAPSHOT = 7
    OOM = 8
    UNKNOWN = 255


ACTION_CODES: dict[str, int] = {each.name.lower(): int(each) for each in Action if each is not Action.UNKNOWN}
"""torch's spelling of an action -> its code."""


class BlockState(enum.IntEnum):
    """State of a block; pending means freed by the program while a stream still uses it."""

    INACTIVE = 0
    ACTIVE = 1
    PENDING_FREE = 2


STATE_CODES: dict[str, int] = {
    "inactive": int(BlockState.INACTIVE),
    "active_allocated": int(BlockState.ACTIVE),
    "active_pending_free": int(BlockState.PENDING_FREE),  # what the C++ code writes
    "active_awaiting_free": int(BlockState.PENDING_FREE),  # what the documentation says
}

NO_STACK = -1
"""Stack number of a row for which no context was taken; a context without frames is an ordinary, empty
stack."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One line of a call stack. C++ frames have line 0 and a file such as "??"."""

    file: str
    line: int
    function: str

    @property
    def is_python(self) -> bool:
        return self.file.endswith(".py") or self.file.startswith("<")

    def __str__(self) -> str:
        function = self.function if self.is_python else self.function.split("(")[0] or self.function
        return f"{self.file}:{self.line} {function}"


@dataclass(slots=True)
class StackTable:
    """All call stacks of a snapshot, each as a run of frame numbers, innermost frame first."""

    frames: list[Frame]
    offsets: IntArray
    """(n_stacks + 1,) int64: stack i is `frame_ids[offsets[i]:offsets[i + 1]]`."""
    frame_ids: Int32Array
    """(sum of depths,) int32, indices into `frames`."""

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def ids(self, stack: int) -> list[int]:
        """Frame numbers of a stack, innermost first; empty for `NO_STACK`."""
        if stack < 0:
            return []
        found: list[int] = self.frame_ids[self.offsets[stack] : self.offsets[stack + 1]].tolist()
        return found

    def __getitem__(self, stack: int) -> list[Frame]:
        """Frames of a stack, innermost first; empty for `NO_STACK`."""
        return [self.frames[number] for number in self.ids(stack)]

    def depth(self, stack: int) -> int:
        return 0 if stack < 0 else int(self.offsets[stack + 1] - self.offsets[stack])

    @classmethod
    def from_lists(cls, frames: list[Frame], stacks: list[tuple[int, ...]]) -> StackTable:
        offsets = np.zeros(len(stacks) + 1, np.int64)
        np.cumsum([len(stack) for stack in stacks], out=offsets[1:])
        flat = np.fromiter((number for stack in stacks for number in stack), np.int32, int(offsets[-1]))
        return cls(frames, offsets, flat)


@dataclass(slots=True)
class Events:
    """The recorded history of one device, oldest row first."""

    action: ByteArray
    """(n,) uint8, `Action`."""
    address: IntArray
    """(n,) int64, address of the block or segment; on an `OOM` row the free bytes of the device, -1 when not
    recorded."""
    size: IntArray
    """(n,) int64 bytes: as requested for alloc and free rows (not the rounded block), of the segment for
    segment rows."""
    stream: Int32Array
    """(n,) int32, index into `Snapshot.streams`."""
    time_us: IntArray
    """(n,) int64, Unix microseconds; all 0 when the history has no times (torch < 2.2)."""
    stack: Int32Array
    """(n,) int32, stack number or `NO_STACK`."""
    pool: Int16Array | None = None
    """(n,) int16, index into `Snapshot.pools`, -1 unknown; None before torch 2.12."""
    compile_context: Int32Array | None = None
    """(n,) int32, index into `Snapshot.texts`, -1 none; None before torch 2.8."""
    user_metadata: Int32Array | None = None
    """(n,) int32, index into `Snapshot.texts`, -1 none; None before torch 2.10."""
    category: Int32Array | None = None
    """(n,) int32, index into `Snapshot.texts`, -1 none; only in snapshots made from a profile."""
    forward_stack: Int32Array | None = None
    """(n,) int32, stack number of the forward operation of a backward row, `NO_STACK` when none; torch
    2.12."""

    def __len__(self) -> int:
        return len(self.action)

    @property
    def has_times(self) -> bool:
        return len(self.time_us) > 0 and int(self.time_us[-1]) > 0

    @classmethod
    def empty(cls) -> Events:
        wide, narrow = np.zeros(0, np.int64), np.zeros(0, np.int32)
        return cls(np.zeros(0, np.uint8), wide, wide, narrow, wide, narrow)

    def sliced(self, start: int, stop: int) -> Events:
        """Rows `start` to `stop` as views."""
        part = slice(start, stop)
        return Events(
            self.action[part], self.address[part], self.size[part],
            self.stream[part], self.time_us[part], self.stack[part],
            None if self.pool is None else self.pool[part],
            None if self.compile_context is None else self.compile_context[part],
            None if self.user_metadata is None else self.user_metadata[part],
            None if self.category is None else self.category[part],
            None if self.forward_stack is None else self.forward_stack[part],
        )  # fmt: skip


@dataclass(slots=True)
class Segments:
    """The segments of one device at the end of its history, ordered by address."""

    address: IntArray
    total_size: IntArray
    """(n,) int64 reserved bytes; of an expandable segment the mapped run only."""
    allocated_size: IntArray
    active_size: IntArray
    requested_size: IntArray
    stream: Int32Array
    """(n,) int32, index into `Snapshot.streams`."""
    is_large: BoolArray
    """(n,) bool: the pool for requests over 1 MiB, else the small pool."""
    pool: Int16Array
    """(n,) int16, index into `Snapshot.pools`; pool (0, 0) is the default one, others are CUDA graphs' or
    MemPools'."""
    is_expandable: BoolArray
    stack: Int32Array
    """(n,) int32, stack of the cudaMalloc or `NO_STACK`; never known for expandable segments."""
    first_block: IntArray
    """(n + 1,) int64: blocks of segment i are rows `first_block[i]` to `first_block[i + 1]` of `Blocks`."""

    def __len__(self) -> int:
        return len(self.address)


@dataclass(slots=True)
class Blocks:
    """The blocks of one device at the end of its history, ordered by segment and address."""

    segment: Int32Array
    """(n,) int32, row in `Segments`."""
    address: IntArray
    size: IntArray
    """(n,) int64 bytes, rounded up by the allocator."""
    requested_size: IntArray
    """(n,) int64 bytes as asked for; 0 on inactive blocks, where torch keeps a stale value."""
    state: ByteArray
    """(n,) uint8, `BlockState`."""
    stack: Int32Array
    """(n,) int32, stack of the allocation or `NO_STACK`."""

    def __len__(self) -> int:
        return len(self.address)


@dataclass(slots=True)
class Annotations:
    """Ranges that record_function marked, as START and END rows in order of time."""

    is_start: BoolArray = field(default_factory=lambda: np.zeros(0, np.bool_))
    name: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    """(n,) int32, index into `Snapshot.texts`."""
    device: Int32Array = field(default_factory=lambda: np.zeros(0, np.int32))
    time_us: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    def __len__(self) -> int:
        return len(self.name)
