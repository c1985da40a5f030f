"""Segments at a moment with the sizes that blocks really had, and what stood in the way of a failed request.

A history records what was asked for; blocks are larger. Their sizes come from a replay that reproduces the
history exactly; until there is one, or when there is none, requested sizes are shown and it is said why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from oomscope.core.allocator.autopsy import Autopsy, LiveBlock, autopsy, live_block
from oomscope.core.allocator.measures import initial_stacks
from oomscope.core.allocator.model import DEFAULT_POOL
from oomscope.core.allocator.scrub import Scrubber, SegmentView
from oomscope.core.allocator.verify import Verification, verify
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.segment_map import SegmentsAt

IntArray = NDArray[np.int64]

MAX_ROWS = 3_000_000
"""Rows that are replayed at most, the last ones: some ten seconds in the background, and about 1 GB."""

UNDER_WAY = "requested sizes; the exact replay is under way"
FAILED = "requested sizes: the replay failed"


@dataclass(frozen=True, slots=True)
class Failure:
    """A request that failed, and the fewest live blocks without which it would have fitted."""

    row: int
    """The `oom` row."""
    request_bytes: int
    lacking_bytes: int | None
    """Live blocks plus request minus capacity; positive: no other placement would have helped. None: unknown."""
    found: Autopsy | None
    """None when no set of blocks is known to suffice."""

    @property
    def blocks(self) -> tuple[LiveBlock, ...]:
        return self.found.blocks if self.found is not None else ()


@dataclass(slots=True)
class SegmentPicture:
    """The segments just after some row."""

    at: SegmentsAt
    block_bytes: IntArray
    """(m,) int64, bytes that each of `at.allocation` takes: its block's when exact, else what was requested."""
    is_exact: bool
    note: str
    """Where the sizes come from, in a few words."""
    replay: ExactReplay | None
    """What was known of the replay when this was made."""
    failure: Failure | None = None
    """The request that failed at the next row, if one did and the replay is exact."""
    in_the_way: dict[int, LiveBlock] = field(default_factory=dict)
    """Allocation (row of `Lifetimes`) to the block that stood in the way of `failure`, largest first."""


class ExactReplay:
    """A replay of one device that can be moved through, or the reason why there is none.

    Making one takes seconds for a million rows; so does nothing afterwards.
    """

    def __init__(self, analysis: DeviceAnalysis) -> None:
        self._analysis = analysis
        self.start = max(0, len(analysis.device.events) - MAX_ROWS)
        checked = verify(analysis.snapshot, analysis.device, start=self.start)
        self._checked = checked
        self._scrubber: Scrubber | None = None
        if checked.replay is not None and checked.exact:
            self._scrubber = Scrubber(checked.history, checked.replay)
            self._stacks = initial_stacks(checked.history)
        self.note = _note(checked, self.start + analysis.device.skipped_events)
        self._failures: dict[int, Failure] = {}
        if analysis.ooms:
            self.failure(analysis.ooms[-1].event_index)

    @property
    def is_exact(self) -> bool:
        return self._scrubber is not None

    def covers(self, row: int) -> bool:
        """Whether the state just after `row` can be shown."""
        return self._scrubber is not None and row >= self.start - 1

    def blocks(self, row: int) -> list[SegmentView]:
        """Segments with all their blocks just after `row`, which must be covered."""
        assert self._scrubber is not None
        return self._scrubber.segments(row + 1 - self.start)

    @property
    def last_failure(self) -> Failure | None:
        """Of the last `oom` row; None without one, or when the replay cannot say."""
        return self._failures.get(self._analysis.ooms[-1].event_index) if self._analysis.ooms else None

    def failure(self, row: int) -> Failure | None:
        """What stood in the way of the request that failed at `row`; None when the replay cannot say."""
        if not self.covers(row - 1) or self._scrubber is None or self._checked.replay is None:
            return None
        if row not in self._failures:
            history, at = self._checked.history, row - self.start
            allocator = self._scrubber.at(at)
            capacity = self._checked.replay.capacity_by_row.get(at)
            size = history.size[at]
            self._failures[row] = Failure(
                row=row,
                request_bytes=size,
                lacking_bytes=None if capacity is None else allocator.active_bytes + size - capacity,
                found=autopsy(
                    allocator,
                    size,
                    stream=history.stream[at],
                    pool=history.pool[at] if history.pool is not None else DEFAULT_POOL,
                    capacity=capacity,
                    describe=lambda block: live_block(block, history, self._stacks, at),
                ),
            )
        return self._failures[row]


def _note(checked: Verification, first: int) -> str:
    if checked.replay is None:
        return "requested sizes: there is no history to replay"
    divergence = checked.replay.divergence
    if checked.exact:
        return f"exact replay of {len(checked.history):,} events"
    if divergence is None or divergence.row >= len(checked.history):
        return "requested sizes: the replay does not end in the recorded blocks"
    return f"requested sizes: the replay is not exact from event {divergence.row + first:,} on"


def picture_of(
    analysis: DeviceAnalysis, row: int, exact: ExactReplay | None, otherwise: str = UNDER_WAY
) -> SegmentPicture:
    """The segments of a device just after `row`, as exactly as they are known.

    Args:
        analysis: the device.
        row: the moment; -1 is before the first row.
        exact: its replay; None while there is none.
        otherwise: why there is none.
    """
    if exact is None or not exact.covers(row):
        at = analysis.segments_at(row)
        note = otherwise if exact is None else exact.note
        if exact is not None and exact.is_exact:
            note = f"requested sizes: only the last {MAX_ROWS:,} events are replayed"
        return SegmentPicture(at, analysis.lives.size[at.allocation], False, note, exact)
    at, sizes = _aligned(analysis, row, exact.blocks(row))
    found = SegmentPicture(at, sizes, True, exact.note, exact)
    if any(oom.event_index == row + 1 for oom in analysis.ooms):
        found.failure = exact.failure(row + 1)
    if found.failure is not None:
        found.in_the_way = _allocations_of(analysis, at, found.failure.blocks)
    return found


def _aligned(
    analysis: DeviceAnalysis, row: int, segments: Sequence[SegmentView]
) -> tuple[SegmentsAt, IntArray]:
    """Segments of a replay in the form of the snapshot's own, and the block size of every live allocation.

    The replay does the two rows of a free together, and those of a segment and its first block: between them a freed
    allocation is in no segment any more, and a new segment is not there yet.
    """
    lives = analysis.lives
    alive = np.flatnonzero(analysis.alive(row))
    alive = alive[np.argsort(lives.address[alive], kind="stable")]
    live = [
        (block.address, block.size, number)
        for number, segment in enumerate(segments)
        for block in segment.blocks
        if block.state != "inactive"
    ]
    table = np.array(live, np.int64).reshape(-1, 3)
    place = np.searchsorted(lives.address[alive], table[:, 0])
    hit = place < len(alive)
    hit[hit] = lives.address[alive][place[hit]] == table[hit, 0]
    sizes = lives.size[alive].astype(np.int64)
    owner = np.full(len(alive), -1, np.int64)
    sizes[place[hit]] = table[hit, 1]
    owner[place[hit]] = table[hit, 2]
    address = np.array([segment.address for segment in segments], np.int64)
    size = np.array([segment.size for segment in segments], np.int64)
    return SegmentsAt(address, size, alive, owner), sizes


def _allocations_of(
    analysis: DeviceAnalysis, at: SegmentsAt, blocks: Sequence[LiveBlock]
) -> dict[int, LiveBlock]:
    address = analysis.lives.address[at.allocation]
    found: dict[int, LiveBlock] = {}
    for block in sorted(blocks, key=lambda each: -each.size):
        place = int(np.searchsorted(address, block.address))
        if place < len(address) and address[place] == block.address:
            found[int(at.allocation[place])] = block
    return found
