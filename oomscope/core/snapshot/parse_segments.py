"""Segment and block dictionaries to the tables of each device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from oomscope.core.snapshot.columns import NO_STACK, STATE_CODES, Blocks, BlockState, Segments
from oomscope.core.snapshot.intern import Interner, brief
from oomscope.core.snapshot.notes import Notes
from oomscope.core.snapshot.parse_events import integer
from oomscope.errors import SnapshotError

MAX_DEVICES = 4096
"""Far above any host; a larger ordinal is damage, and would make empty tables for all those below it."""

_LARGE_OVER = 2 << 20
"""Segments of the small pool are exactly 2 MiB (kSmallBuffer, c10/core/AllocatorConfig.h); used when
`segment_type` is missing."""


_Rows = tuple[tuple[int, ...], Sequence[tuple[int, ...]]]
"""One row of `Segments`, in the order of its fields, and the rows of its blocks."""


def parse_segments(raw: object, interner: Interner, notes: Notes) -> dict[int, tuple[Segments, Blocks]]:
    """Tables of each device that has segments, ordered by address.

    Raises:
        SnapshotError: not a list of segments.
    """
    if not isinstance(raw, (list, tuple)):
        raise SnapshotError(f"segments is of type {type(raw).__name__}, not a list")
    devices: dict[int, list[_Rows]] = {}
    for number, segment in enumerate(raw):
        where = f"segments[{number}]"
        if type(segment) is not dict:
            raise SnapshotError(f"{where} is of type {type(segment).__name__}, not a segment")
        device = integer(segment.get("device", 0), where, "device")
        if not 0 <= device < MAX_DEVICES:
            raise SnapshotError(f"{where}: device is {device}")
        devices.setdefault(device, []).append(_segment(segment, where, interner, notes))
    return {device: _tables(rows) for device, rows in devices.items()}


def _segment(segment: dict[str, Any], where: str, interner: Interner, notes: Notes) -> _Rows:
    """One row of `Segments` (in the order of its fields) and the rows of its blocks."""
    raw_blocks = segment.get("blocks", [])
    if not isinstance(raw_blocks, (list, tuple)):
        raise SnapshotError(f"{where}: blocks is of type {type(raw_blocks).__name__}, not a list")
    address = integer(segment.get("address"), where, "address")
    blocks, position = [], address
    for number, block in enumerate(raw_blocks):
        if type(block) is not dict:
            raise SnapshotError(f"{where}: blocks[{number}] is of type {type(block).__name__}, not a block")
        row = _block(block, position, f"{where}: blocks[{number}]", interner, notes)
        if row[0] != position:
            notes.add(
                "not-contiguous", f"{where}: blocks[{number}] starts at {row[0]:#x} instead of {position:#x}"
            )
        position = row[0] + row[1]
        blocks.append(row)
    sums = _sums(blocks)
    total = _declared(segment, "total_size", sums["total_size"], where, notes)
    allocated = _declared(segment, "allocated_size", sums["allocated_size"], where, notes)
    active = _declared(segment, "active_size", sums["active_size"], where, notes)
    requested = _declared(segment, "requested_size", sums["requested_size"], where, notes)
    kind = segment.get("segment_type")
    is_large = kind == "large" if kind in ("small", "large") else total != _LARGE_OVER
    try:
        stream = interner.stream(segment.get("stream", 0))
        pool = interner.pool(segment.get("segment_pool_id", (0, 0)))
    except ValueError as error:
        raise SnapshotError(f"{where}: {error}") from error
    stack = interner.stack(segment.get("frames"))
    expandable = segment.get("is_expandable") is True
    return (address, total, allocated, active, requested, stream, is_large, pool, expandable, stack), blocks


def _block(
    block: dict[str, Any], position: int, where: str, interner: Interner, notes: Notes
) -> tuple[int, int, int, int, int]:
    """(address, size, requested_size, state, stack) of a block that should start at `position`."""
    size = integer(block.get("size", 0), where, "size")
    given = block.get("address")
    address = position if given is None else integer(given, where, "address")
    name = block.get("state")
    state = STATE_CODES.get(name) if type(name) is str else None
    if state is None:
        notes.add("unknown-state", f"{where} has the state {brief(name)}; counted as active")
        state = int(BlockState.ACTIVE)
    frames, requested = block.get("frames"), block.get("requested_size")
    history = block.get("history")  # torch 2.0 only; its first entry is the current allocation
    if isinstance(history, (list, tuple)) and history and type(history[0]) is dict:
        frames = history[0].get("frames") if frames is None else frames
        requested = history[0].get("real_size") if requested is None else requested
    if state == BlockState.INACTIVE:
        return address, size, 0, state, NO_STACK
    requested = size if requested is None else integer(requested, where, "requested_size")
    stack = interner.stack(frames)
    known = stack >= 0 and bool(
        interner.stacks[stack]
    )  # a block without frames is one whose stack nobody knows
    return address, size, requested, state, stack if known else NO_STACK


def _sums(blocks: Sequence[tuple[int, ...]]) -> dict[str, int]:
    """What the segment's own totals should be; they were, in every unedited file seen.

    Source: SnapshotInfo in c10/cuda/CUDACachingAllocator.cpp.
    """
    return {
        "total_size": sum(block[1] for block in blocks),
        "allocated_size": sum(block[1] for block in blocks if block[3] == BlockState.ACTIVE),
        "active_size": sum(block[1] for block in blocks if block[3] != BlockState.INACTIVE),
        "requested_size": sum(block[2] for block in blocks if block[3] != BlockState.INACTIVE),
    }


def _declared(segment: dict[str, Any], key: str, computed: int, where: str, notes: Notes) -> int:
    """The segment's own total, noted when the blocks say otherwise; the blocks' sum when it has none."""
    if segment.get(key) is None:
        return computed
    value = integer(segment[key], where, key)
    if value != computed:
        notes.add("segment-sum", f"{where}: {key} is {value}, but its blocks sum to {computed}")
    return value


def _tables(rows: list[_Rows]) -> tuple[Segments, Blocks]:
    rows = sorted(rows, key=lambda row: row[0][0])
    wide = np.array([row[0] for row in rows], np.int64)
    flat = np.array([block for row in rows for block in row[1]], np.int64).reshape(-1, 5)
    counts = [len(row[1]) for row in rows]
    first = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(counts, out=first[1:])
    column = wide.T.copy()
    segments = Segments(
        address=column[0], total_size=column[1], allocated_size=column[2], active_size=column[3],
        requested_size=column[4], stream=column[5].astype(np.int32), is_large=column[6].astype(np.bool_),
        pool=column[7].astype(np.int16),
        is_expandable=column[8].astype(np.bool_), stack=column[9].astype(np.int32), first_block=first,
    )  # fmt: skip
    each = flat.T.copy()
    owner = np.repeat(np.arange(len(rows), dtype=np.int32), counts)
    blocks = Blocks(owner, each[0], each[1], each[2], each[3].astype(np.uint8), each[4].astype(np.int32))
    return segments, blocks


def empty_tables() -> tuple[Segments, Blocks]:
    """Tables of a device that has no segments."""
    wide, narrow, flag = np.zeros(0, np.int64), np.zeros(0, np.int32), np.zeros(0, np.bool_)
    segments = Segments(
        wide, wide, wide, wide, wide, narrow, flag, np.zeros(0, np.int16), flag, narrow, np.zeros(1, np.int64)
    )
    return segments, Blocks(narrow, wide, wide, wide, np.zeros(0, np.uint8), narrow)
