"""Which pool each allocation came from: recorded since torch 2.12, derived from the segments before."""

from __future__ import annotations

import numpy as np

from oomscope.core.snapshot.columns import Action, IntArray
from oomscope.core.snapshot.lifetimes import Lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot

UNKNOWN_POOL = -1


def pool_of(device: DeviceSnapshot, lives: Lifetimes) -> IntArray:
    """(n_allocations,) int64, index into `Snapshot.pools`, or `UNKNOWN_POOL`.

    A segment keeps its pool while it exists, and only the segments of the end are known. So an allocation has the pool
    of the segment around its address if that segment was there already when it was made; where a segment was given back
    meanwhile, nothing is known, even if another one lies at its address now. An expandable segment grows in place and
    counts as one throughout.
    """
    segments = device.segments
    found = np.full(len(lives), UNKNOWN_POOL, np.int64)
    if len(segments):
        place = np.searchsorted(segments.address, lives.address, side="right") - 1
        held = np.flatnonzero(place >= 0)
        place = place[held]
        inside = lives.address[held] < segments.address[place] + segments.total_size[place]
        inside &= lives.birth[held] >= _made_at(device)[place]
        found[held[inside]] = segments.pool[place[inside]]
    recorded = device.events.pool
    if recorded is not None:
        born = np.flatnonzero(lives.birth >= 0)
        told = recorded[lives.birth[born]]
        found[born[told >= 0]] = told[told >= 0]
    return found


def _made_at(device: DeviceSnapshot) -> IntArray:
    """(n_segments,) int64, row that made each segment of the end; -1 when it is older than the history."""
    segments, events = device.segments, device.events
    rows = np.flatnonzero(events.action == Action.SEGMENT_ALLOC)
    rows = rows[np.argsort(events.address[rows], kind="stable")]  # those of one address stay in order of time
    addresses = events.address[rows]
    place = np.searchsorted(addresses, segments.address, side="right") - 1
    made = np.full(len(segments), -1, np.int64)
    known = np.flatnonzero((place >= 0) & ~segments.is_expandable)
    known = known[addresses[place[known]] == segments.address[known]]
    made[known] = rows[place[known]]
    return made
