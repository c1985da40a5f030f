"""Step boundaries of a history, and what each step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from oomscope.core.snapshot.columns import Action, IntArray
from oomscope.core.snapshot.lifetimes import Lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.core.snapshot.stack_rules import Origin

MIN_STEPS = 3
"""Fewer steps than this show no trend."""

STEADY = 0.8
"""Part of the inner steps in which a stack must leave something, to be called a leak candidate."""


@dataclass(slots=True)
class Steps:
    """Where steps begin."""

    rows: IntArray
    """(n,) int64 ascending: first row of each step after the first; n boundaries make n + 1 steps."""
    source: str
    """How they were found: "annotations", "optimizer", "backward" or "none"."""

    def of(self, rows: IntArray) -> IntArray:
        """Step number of each row, from 0."""
        found: IntArray = np.searchsorted(self.rows, rows, side="right")
        return found

    @property
    def count(self) -> int:
        return len(self.rows) + 1


@dataclass(frozen=True, slots=True)
class Survivors:
    """Allocations of one stack that step after step leaves alive at the end."""

    stack: int
    steps: int
    """Inner steps (all but the first and last) that left something."""
    inner_steps: int
    blocks: int
    bytes: int
    bytes_per_step: int
    """Median over the steps that left something."""

    @property
    def is_steady(self) -> bool:
        return self.steps >= STEADY * self.inner_steps


def find_steps(snapshot: Snapshot, device: DeviceSnapshot, origins: IntArray) -> Steps:
    """Step boundaries: ends of the optimizer's annotated ranges, else what the allocations' stacks show.

    Args:
        snapshot: the file.
        device: the device whose rows are wanted.
        origins: (n_stacks + 1,) `Origin` of each stack, shifted by one so that `NO_STACK` is entry 0.
    """
    marked = _from_annotations(snapshot, device)
    if len(marked):
        return Steps(marked, "annotations")
    return _from_stacks(device, origins)


def _from_annotations(snapshot: Snapshot, device: DeviceSnapshot) -> IntArray:
    """First row after each annotated optimizer step."""
    notes = snapshot.annotations
    wanted = [number for number, text in enumerate(snapshot.texts) if text.startswith("Optimizer.step#")]
    if not wanted or not device.events.has_times:
        return np.zeros(0, np.int64)
    ends = ~notes.is_start & np.isin(notes.name, wanted) & np.isin(notes.device, (device.device, -1))
    rows = np.searchsorted(device.events.time_us, np.sort(notes.time_us[ends]), side="right")
    rows = np.unique(rows)
    inside: IntArray = rows[(rows > 0) & (rows < len(device.events))].astype(np.int64)
    return inside


def _from_stacks(device: DeviceSnapshot, origins: IntArray) -> Steps:
    """A step begins at the first forward allocation after an optimizer's, else after a backward's."""
    rows = np.flatnonzero(device.events.action == Action.ALLOC)
    kind = origins[device.events.stack[rows] + 1]
    told = np.isin(kind, (Origin.FORWARD, Origin.BACKWARD, Origin.OPTIMIZER))
    rows, kind = rows[told], kind[told]
    if len(rows) < 2:
        return Steps(np.zeros(0, np.int64), "none")
    forward = np.flatnonzero(kind == Origin.FORWARD)
    starts = {}
    for before, source in ((Origin.OPTIMIZER, "optimizer"), (Origin.BACKWARD, "backward")):
        place = np.searchsorted(forward, np.flatnonzero(kind == before))
        starts[source] = rows[np.unique(forward[place[place < len(forward)]])]
    # An optimizer that allocates in its first step only marks one boundary; then backwards tell more.
    first_only = len(starts["optimizer"]) < 2 < len(starts["backward"])
    source = "optimizer" if len(starts["optimizer"]) and not first_only else "backward"
    return Steps(starts[source], source if len(starts[source]) else "none")


def survivors(lives: Lifetimes, steps: Steps) -> list[Survivors]:
    """Stacks that leave something alive in at least `MIN_STEPS` steps, largest first; leaks when steady."""
    alive = (lives.death >= lives.n_events) & (lives.birth >= 0) & (lives.stack >= 0)
    if steps.count < MIN_STEPS or not alive.any():
        return []
    step, stack, size = steps.of(lives.birth[alive]), lives.stack[alive], lives.size[alive]
    distinct, index = np.unique(stack, return_inverse=True)
    cell = index * steps.count + step
    shape = (len(distinct), steps.count)
    left = np.bincount(cell, weights=size, minlength=shape[0] * shape[1]).reshape(shape)
    inner = left[:, 1:-1] if steps.count > MIN_STEPS else left
    blocks = np.bincount(index)
    found = []
    for number, one in enumerate(distinct.tolist()):
        leaving = inner[number][inner[number] > 0]
        if len(leaving) >= MIN_STEPS or (len(leaving) and len(leaving) == inner.shape[1] >= 2):
            found.append(
                Survivors(
                    stack=one,
                    steps=len(leaving),
                    inner_steps=inner.shape[1],
                    blocks=int(blocks[number]),
                    bytes=int(left[number].sum()),
                    bytes_per_step=int(np.median(leaving)),
                )
            )
    return sorted(found, key=lambda each: -each.bytes)
