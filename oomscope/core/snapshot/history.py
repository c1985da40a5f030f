"""What the history covers, said plainly: a chart of half a history misleads more than none."""

from __future__ import annotations

import enum

from oomscope.core.snapshot.curves import Curve
from oomscope.core.snapshot.lifetimes import BEFORE, Lifetimes
from oomscope.core.snapshot.model import DeviceSnapshot

RING_ROWS = 2
"""`_record_memory_history(True)` and enabled="state" keep one row (max_entries=1): no more history than none
at all."""


class History(str, enum.Enum):
    """How much of the past a device's rows tell."""

    FULL = "full"
    BEGAN_LATE = "began_late"
    RING = "ring"
    NONE = "none"
    CUT = "cut"

    @property
    def is_usable(self) -> bool:
        """Whether a timeline can be drawn."""
        return self in (History.FULL, History.BEGAN_LATE)


_SENTENCES = {
    History.FULL: "The history covers every allocation.",
    History.BEGAN_LATE: "The history began after some allocations were made; those count as before-history.",
    History.RING: "There is no history: recording was on, but kept one row only (max_entries=1).",
    History.NONE: "There is no history: memory recording was off. Only the state at the end is known.",
    History.CUT: "The history was cut or edited: it frees more than was there; no timeline can be drawn.",
}


def coverage(device: DeviceSnapshot, live: Curve, reserved: Curve, lives: Lifetimes) -> History:
    """What the rows of `device` cover."""
    count = len(device.events) + device.skipped_events
    if count == 0:
        return History.NONE
    if count <= RING_ROWS:
        return History.RING
    if live.before < 0 or reserved.before < 0:
        return History.CUT
    began_late = live.before > 0 or bool((lives.birth == BEFORE).any())
    return History.BEGAN_LATE if began_late else History.FULL


def sentence(history: History) -> str:
    """One sentence for people."""
    return _SENTENCES[history]
