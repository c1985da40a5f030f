"""Pairs the rows of a history into allocations, each with its birth, release and death.

Rows of one address stay in order of time under a stable sort, so an allocation is a run that starts at an
`alloc` row, or at the first row of an address when the allocation is older than the history.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np

from oomscope.core.snapshot.columns import (
    NO_STACK,
    Action,
    BlockState,
    BoolArray,
    Int32Array,
    IntArray,
)
from oomscope.core.snapshot.model import DeviceSnapshot

BEFORE = -1
"""Birth of an allocation that is older than the first row."""


@dataclass(slots=True)
class Lifetimes:
    """Allocations of one device, ordered by birth; those that are older than the history come first."""

    birth: IntArray
    """(n,) int64, row of the `alloc`, or `BEFORE`."""
    release: IntArray
    """(n,) int64, row at which the program let go (`free_requested`); `n_events` when it never did."""
    death: IntArray
    """(n,) int64, row from which the memory could be reused (`free_completed`); `n_events` when alive at the
    end."""
    address: IntArray
    size: IntArray
    """(n,) int64 bytes as requested."""
    stream: Int32Array
    """(n,) int32, index into `Snapshot.streams`."""
    stack: Int32Array
    """(n,) int32, stack of the allocation; `NO_STACK` when it was not recorded."""
    block: IntArray
    """(n,) int64, row in `Blocks` of an allocation that is alive at the end, else -1."""
    n_events: int

    def __len__(self) -> int:
        return len(self.birth)

    def at(self, row: int) -> BoolArray:
        """(n,) bool: what occupies memory just after `row`; row -1 is before the first row."""
        alive: BoolArray = (self.birth <= row) & (self.death > row)
        return alive

    def take(self, which: IntArray | BoolArray) -> Lifetimes:
        """The allocations that `which` selects."""
        names = [each.name for each in fields(self) if each.name != "n_events"]
        return Lifetimes(**{name: getattr(self, name)[which] for name in names}, n_events=self.n_events)


def lifetimes(device: DeviceSnapshot) -> Lifetimes:
    """All allocations that the history or the final blocks know of. O(n log n)."""
    known = _from_events(device)
    whole = _with_old_blocks(known, device)
    order = np.argsort(whole.birth, kind="stable")
    return whole.take(order)


def _from_events(device: DeviceSnapshot) -> Lifetimes:
    events = device.events
    count = len(events)
    rows = np.flatnonzero(events.action <= Action.FREE_COMPLETED)
    rows = rows[np.argsort(events.address[rows], kind="stable")]
    address, action = events.address[rows], events.action[rows]
    is_alloc = action == Action.ALLOC
    starts = is_alloc.copy()
    if len(rows):
        starts[0] = True
        starts[1:] |= address[1:] != address[:-1]
        # After a completed free the next free of the address belongs to an allocation whose `alloc` row is
        # missing.
        starts[1:] |= (action[:-1] == Action.FREE_COMPLETED) & ~is_alloc[1:]
    begins = np.flatnonzero(starts)
    number = np.cumsum(starts) - 1
    total, first = len(begins), rows[begins]
    birth = np.where(is_alloc[begins], first, BEFORE)
    requested, completed = (
        np.flatnonzero(action == each) for each in (Action.FREE_REQUESTED, Action.FREE_COMPLETED)
    )
    release, death = np.full(total, count, np.int64), np.full(total, count, np.int64)
    release[number[requested]] = rows[requested]
    death[number[completed]] = rows[completed]
    if len(requested) and not len(completed):  # the recorder was told to skip free_completed
        death = release.copy()
    _close_overwritten(death, birth, events.address[first])
    return Lifetimes(
        birth=birth,
        release=np.minimum(release, death),
        death=death,
        address=events.address[first],
        size=events.size[first],
        stream=events.stream[first],
        stack=np.where(birth >= 0, events.stack[first], np.int32(NO_STACK)).astype(np.int32),
        block=np.full(total, -1, np.int64),
        n_events=count,
    )


def _close_overwritten(death: IntArray, birth: IntArray, address: IntArray) -> None:
    """End an allocation whose free is missing where the next one begins at its address; changes `death`."""
    if len(death) < 2:
        return
    same = (address[1:] == address[:-1]) & (birth[1:] >= 0)
    death[:-1][same] = np.minimum(death[:-1][same], birth[1:][same])


def _with_old_blocks(known: Lifetimes, device: DeviceSnapshot) -> Lifetimes:
    """`known`, tied to the final blocks, and the final blocks that no row mentions."""
    blocks = device.blocks
    live = np.flatnonzero(blocks.state != BlockState.INACTIVE)
    alive = np.flatnonzero(known.death >= known.n_events)
    order = live[np.argsort(blocks.address[live], kind="stable")]
    place = np.searchsorted(blocks.address[order], known.address[alive])
    hit = place < len(order)
    hit[hit] = blocks.address[order][place[hit]] == known.address[alive][hit]
    owners = order[place[hit]]
    known.block[alive[hit]] = owners
    pending = blocks.state[owners] == BlockState.PENDING_FREE
    known.release[alive[hit][pending & (known.release[alive[hit]] >= known.n_events)]] = known.n_events
    mentioned = np.zeros(len(blocks), np.bool_)
    mentioned[owners] = True
    old = live[~mentioned[live]]
    if not len(old):
        return known
    # A block that started before the history and outlives it: it has no row, and its stack is the block's
    # own.
    end = np.full(len(old), known.n_events, np.int64)
    stream = device.segments.stream[blocks.segment[old]]
    extra = Lifetimes(
        birth=np.full(len(old), BEFORE, np.int64),
        release=end,
        death=end,
        address=blocks.address[old],
        size=blocks.requested_size[old],
        stream=stream,
        stack=blocks.stack[old],
        block=old,
        n_events=known.n_events,
    )
    joined = {
        each.name: np.concatenate([getattr(known, each.name), getattr(extra, each.name)])
        for each in fields(known)
        if each.name != "n_events"
    }
    return Lifetimes(**joined, n_events=known.n_events)
