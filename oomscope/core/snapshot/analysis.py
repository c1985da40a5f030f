"""Everything oomscope can say about one device of a snapshot, computed when first asked for.

The moment that matters is the `focus`: just before the last out-of-memory row when there is one (a snapshot
is usually taken after the exception has unwound, so the end of the file shows an almost empty device), else
the peak, else the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from oomscope.core.snapshot.categories import Category, Share, categories, composition
from oomscope.core.snapshot.columns import Action, BlockState, BoolArray, IntArray
from oomscope.core.snapshot.curves import (
    SMALL_REQUEST,
    Curve,
    curve_of,
    curves_by,
    live_curve,
    reserved_curve,
)
from oomscope.core.snapshot.groups import by_stack
from oomscope.core.snapshot.history import History, coverage
from oomscope.core.snapshot.lifetimes import Lifetimes, lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.core.snapshot.pools import pool_of
from oomscope.core.snapshot.segment_map import (
    Pin,
    PoolUse,
    SegmentsAt,
    free_by_segment,
    pins,
    pool_use,
    segments_at,
)
from oomscope.core.snapshot.stack_rules import StackFacts, stack_facts
from oomscope.core.snapshot.steps import Steps, Survivors, find_steps, survivors


@dataclass(frozen=True, slots=True)
class OomEvent:
    """A request that the allocator could not serve."""

    event_index: int
    requested_bytes: int
    """As torch records it: rounded to a whole segment."""
    device_free_bytes: int | None
    """What the driver had free then."""
    live_bytes: int
    """Requested bytes alive just before."""
    reserved_bytes: int
    stack: int


@dataclass(frozen=True, slots=True)
class Focus:
    """A moment: just after `row`, or before the first row when it is -1."""

    row: int
    reason: str
    """"oom", "peak" or "end"."""


@dataclass(frozen=True, slots=True)
class Totals:
    """State at the end of the file, in bytes unless the name says otherwise."""

    reserved: int
    allocated: int
    active: int
    requested: int
    inactive: int
    largest_inactive: int
    pending_free: int
    segments: int
    blocks: int
    whole_free: int
    whole_free_segments: int


class DeviceAnalysis:
    """Analyses of one device; each is computed once, on first use."""

    def __init__(
        self, snapshot: Snapshot, device: DeviceSnapshot, *, facts: StackFacts | None = None
    ) -> None:
        self.snapshot = snapshot
        self.device = device
        self._facts = facts

    @cached_property
    def lives(self) -> Lifetimes:
        return lifetimes(self.device)

    @cached_property
    def live(self) -> Curve:
        return live_curve(self.device)

    @cached_property
    def reserved(self) -> Curve:
        return reserved_curve(self.device)

    @cached_property
    def facts(self) -> StackFacts:
        return self._facts if self._facts is not None else stack_facts(self.snapshot.stacks)

    @cached_property
    def steps(self) -> Steps:
        return find_steps(self.snapshot, self.device, self.facts.origin)

    @cached_property
    def category(self) -> IntArray:
        """(n_allocations,) int64, `Category` of each."""
        return categories(self.snapshot, self.device, self.lives, self.facts, self.steps)

    @cached_property
    def history(self) -> History:
        return coverage(self.device, self.live, self.reserved, self.lives)

    @cached_property
    def peak(self) -> tuple[int, int]:
        """(bytes, row) of the most live requested bytes; row -1 is before the first row."""
        return self.live.peak(self.device.n_analysed)

    @cached_property
    def totals(self) -> Totals:
        segments, blocks = self.device.segments, self.device.blocks
        free = blocks.size[blocks.state == BlockState.INACTIVE]
        inactive, whole, _ = free_by_segment(self.device)
        whole = whole & ~segments.is_expandable
        return Totals(
            reserved=int(segments.total_size.sum()),
            allocated=int(segments.allocated_size.sum()),
            active=int(segments.active_size.sum()),
            requested=int(segments.requested_size.sum()),
            inactive=int(free.sum()),
            largest_inactive=int(free.max()) if len(free) else 0,
            pending_free=int(blocks.size[blocks.state == BlockState.PENDING_FREE].sum()),
            segments=len(segments),
            blocks=len(blocks),
            whole_free=int(inactive[whole].sum()),
            whole_free_segments=int(whole.sum()),
        )

    @cached_property
    def ooms(self) -> list[OomEvent]:
        events = self.device.events
        rows = np.flatnonzero(events.action[: self.device.n_analysed] == Action.OOM).tolist()
        return [
            OomEvent(
                event_index=row,
                requested_bytes=int(events.size[row]),
                device_free_bytes=None if events.address[row] < 0 else int(events.address[row]),
                live_bytes=self.live.at(row - 1),
                reserved_bytes=self.reserved.at(row - 1),
                stack=int(events.stack[row]),
            )
            for row in rows
        ]

    @cached_property
    def focus(self) -> Focus:
        if self.ooms:
            return Focus(self.ooms[-1].event_index - 1, "oom")
        if self.history.is_usable:
            return Focus(self.peak[1], "peak")
        return Focus(self.device.n_analysed - 1, "end")

    def alive(self, row: int) -> BoolArray:
        """(n_allocations,) bool: alive just after `row`.

        At the end of a cut history only the final blocks count: its rows say nothing that could be trusted.
        """
        alive = self.lives.at(row)
        if self.history is History.CUT and row >= self.lives.n_events - 1:
            alive &= self.lives.block >= 0
        return alive

    def composition(self, row: int) -> list[Share]:
        """Bytes per category just after `row`."""
        return composition(self.lives, self.category, self.alive(row), self.facts)

    def top(self, row: int) -> list[tuple[int, int, int]]:
        """(stack, bytes, blocks) alive just after `row`, largest first."""
        return by_stack(self.lives, self.alive(row))

    def category_curves(self, rows: IntArray, which: BoolArray | None = None) -> IntArray:
        """(n_categories, len(rows)) int64: live bytes of each category just after each of `rows`.

        `which` selects allocations, all by default.
        """
        if which is None:
            return curves_by(self.lives, self.category, len(Category), rows)
        return curves_by(self.lives.take(which), self.category[which], len(Category), rows)

    @cached_property
    def pool(self) -> IntArray:
        """(n_allocations,) int64, index into `Snapshot.pools`; -1 where it is not known (see `pool_of`)."""
        return pool_of(self.device, self.lives)

    def part(
        self, *, stream: int | None = None, is_large: bool | None = None, pool: int | None = None
    ) -> BoolArray:
        """(n_allocations,) bool: those of one stream, one pool (indices into the snapshot's tables), one size class."""
        which = np.ones(len(self.lives), np.bool_)
        if stream is not None:
            which &= self.lives.stream == stream
        if is_large is not None:
            which &= (self.lives.size > SMALL_REQUEST) == is_large
        if pool is not None:
            which &= self.pool == pool
        return which

    def curve(
        self, *, stream: int | None = None, is_large: bool | None = None, pool: int | None = None
    ) -> Curve:
        """Live bytes of a `part`."""
        return curve_of(self.lives, self.part(stream=stream, is_large=is_large, pool=pool))

    @cached_property
    def survivors(self) -> list[Survivors]:
        return survivors(self.lives, self.steps)

    @cached_property
    def pools(self) -> list[PoolUse]:
        return pool_use(self.snapshot, self.device)

    @cached_property
    def pins(self) -> list[Pin]:
        return pins(self.device)

    def segments_at(self, row: int) -> SegmentsAt:
        return segments_at(self.device, self.lives, row)


def analyse(snapshot: Snapshot) -> list[DeviceAnalysis]:
    """One analysis per device; what is said about stacks is shared."""
    facts = stack_facts(snapshot.stacks)
    return [DeviceAnalysis(snapshot, device, facts=facts) for device in snapshot.devices]
