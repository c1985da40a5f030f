"""Rows of the rank table: what each rank holds, how it changes, and one word on how it is doing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from oomscope.core.series.trend import Trend
from oomscope.views import wording
from oomscope.views.coerce import clean
from oomscope.views.gpus import GpuReading
from oomscope.views.protocols import Rank
from oomscope.views.series import History

#: Growth matters when it would fill the card within this many steps.
_HORIZON = 5000
#: Share of reserved memory that even the step's peak did not use, from which we speak of fragmentation.
_FRAGMENTED = 0.30
#: Share of the usable capacity from which any noise can kill the job.
_TIGHT = 0.97


@dataclass(frozen=True)
class RankRow:
    """One rank, ready to show. Sizes in bytes."""

    rank: int
    state: str
    on_device: bool
    """False for a job without device memory: the numbers are then host memory."""
    simulated: bool
    gpu: str
    step: int | None
    phase: str
    used_bytes: int | None
    """Allocated, or resident in host memory."""
    reserved_bytes: int | None
    peak_bytes: int | None
    peak_reserved_bytes: int | None
    capacity_bytes: int | None
    other_bytes: int
    """Device memory in use that the caching allocator does not own."""
    idle_share: float | None
    """Share of reserved memory that the last step's peak left unused."""
    change: Trend | None
    """Trend of the step lows; None while there are too few steps."""
    steps_left: int | None
    """Steps until the growing peak reaches the usable capacity."""
    retries: int
    loss: float | None
    status: str
    severity: str
    node: str = ""
    """Host name."""
    gpu_reading: GpuReading | None = None
    """What the driver says of its GPU; None when nothing was heard lately."""

    @property
    def usable_bytes(self) -> int | None:
        """What the allocator can still come to hold in all."""
        return None if self.capacity_bytes is None else max(0, self.capacity_bytes - self.other_bytes)

    @property
    def headroom_bytes(self) -> int | None:
        """Usable capacity above the highest allocated peak."""
        if self.usable_bytes is None or self.peak_bytes is None:
            return None
        return self.usable_bytes - self.peak_bytes

    @property
    def is_fragmented(self) -> bool:
        """So much of the reserved memory is unused at the peak that it deserves a word."""
        return self.idle_share is not None and self.idle_share > _FRAGMENTED

    @property
    def is_growing(self) -> bool:
        """The lows rise along a line steeply enough to end in an OOM."""
        return self.steps_left is not None

    @property
    def change_per_step(self) -> float | None:
        """Bytes per step; 0 where the slope's interval includes it, None while too little is known."""
        if self.change is None:
            return None
        steady = self.change.kind in ("flat", "plateau") or self.change.low <= 0 <= self.change.high
        return 0.0 if steady else self.change.slope

    def sentence(self) -> str:
        """The row as one sentence, for plain text and screen readers."""
        if self.used_bytes is None:
            return f"rank {self.rank}: {self.state}"
        where = "" if self.on_device else " of host memory"
        limit = f" of {wording.size(self.capacity_bytes)}" if self.capacity_bytes and self.on_device else ""
        parts = [f"rank {self.rank}: {wording.size(self.used_bytes)}{limit}{where}"]
        if self.is_growing and self.change is not None:
            parts.append(f"growing {wording.per_step(self.change.slope)} GiB per step")
            parts.append(f"out of memory in about {wording.plural(self.steps_left or 0, 'step')}")
        elif self.peak_bytes is not None:
            parts.append(f"peak {wording.size(self.peak_bytes)}")
        if self.status != "ok":
            parts.append(self.status.lstrip("▲! "))
        return ", ".join(parts)


def rank_row(
    rank: Rank,
    history: History,
    *,
    host_total_bytes: int | None = None,
    is_over: bool = False,
    gpu: GpuReading | None = None,
) -> RankRow:
    """The row of `rank`.

    Args:
        rank: the live rank.
        history: its steps.
        host_total_bytes: the capacity against which host memory is shown.
        is_over: the session has ended; a rank that never said how it ended is lost.
        gpu: what the driver says of its GPU.
    """
    state = "lost" if is_over and rank.state in ("starting", "running", "silent") else rank.state
    on_device = rank.allocated_bytes is not None or rank.capacity_bytes is not None
    used = rank.allocated_bytes if on_device else rank.rss_bytes
    peak = rank.peak_allocated_bytes if on_device else rank.peak_rss_bytes
    capacity = rank.capacity_bytes if on_device else host_total_bytes
    reserved = rank.reserved_bytes if on_device else None
    other = 0
    if on_device and rank.device_used_bytes and reserved is not None:
        other = max(0, rank.device_used_bytes - reserved)
    change = history.trend if history.trend.kind != "unclear" or history.trend.steps >= 8 else None
    left = _steps_left(history, None if capacity is None else capacity - other, peak)
    idle = _idle_share(history, reserved, peak)
    status, severity = _status(rank, state, left, idle, capacity, other if on_device else 0)
    return RankRow(
        rank=rank.rank,
        state=state,
        on_device=on_device,
        simulated=bool(rank.simulated),
        gpu=clean(rank.gpu_name or "", limit=60),
        step=rank.step,
        phase=clean(rank.phase or "", limit=20),
        used_bytes=used,
        reserved_bytes=reserved,
        peak_bytes=peak,
        peak_reserved_bytes=rank.peak_reserved_bytes if on_device else None,
        capacity_bytes=capacity,
        other_bytes=other,
        idle_share=idle,
        change=change,
        steps_left=left,
        retries=rank.retries or 0,
        loss=rank.loss,
        status=status,
        severity=severity,
        node=clean(rank.host or "", limit=60),
        gpu_reading=gpu,
    )


def _steps_left(history: History, usable: int | None, peak: int | None) -> int | None:
    """Steps until the newest peak, growing as the lows do, reaches `usable`; None when nothing grows."""
    if usable is None or peak is None:
        return None
    left = history.trend.steps_until(usable, history.peak[-1] if history.peak else peak)
    return int(left) if left is not None and left <= _HORIZON else None


def _idle_share(history: History, reserved: int | None, peak: int | None) -> float | None:
    if reserved is None or reserved <= 0:
        return None
    top = history.peak[-1] if history.peak else peak
    if top is None:
        return None
    return max(0.0, (reserved - top) / reserved)


def _status(
    rank: Rank, state: str, left: int | None, idle: float | None, capacity: int | None, other: int
) -> tuple[str, str]:
    fixed = {
        "oom": ("▲ OOM", "error"),
        "failed": ("▲ failed", "error"),
        "lost": ("! lost", "warn"),
        "silent": ("! silent", "warn"),
        "stopped": ("stopped", "info"),
        "done": ("done", "ok"),
        "starting": ("starting", "info"),
    }
    if state in fixed:
        return fixed[state]
    if left is not None:
        return "▲ leak?", "error"
    if rank.retries:
        return "! retries", "warn"
    usable = None if capacity is None else capacity - other
    if usable and rank.peak_reserved_bytes and (rank.peak_allocated_bytes or 0) > _TIGHT * usable:
        return "! tight", "warn"
    if idle is not None and idle > _FRAGMENTED:
        return "! frag", "warn"
    return "ok", "info"


#: Orders of the rank table: name, and what it means.
ORDERS = {
    "rank": "by number",
    "headroom": "least memory left first",
    "peak": "highest allocated peak first",
    "growth": "fastest growth first",
}


@dataclass(frozen=True)
class NodeRow:
    """The ranks of one host."""

    name: str
    ranks: tuple[RankRow, ...]
    """By rank."""

    @property
    def worst(self) -> RankRow:
        """The rank to look at first: the most serious status, then the least headroom."""
        weight = {"error": 0, "warn": 1}
        return min(
            self.ranks,
            key=lambda r: (
                weight.get(r.severity, 2),
                r.headroom_bytes is None,
                r.headroom_bytes or 0,
                r.rank,
            ),
        )

    @property
    def headroom_bytes(self) -> int | None:
        """The least of its ranks."""
        known = [row.headroom_bytes for row in self.ranks if row.headroom_bytes is not None]
        return min(known, default=None)


def by_node(rows: Sequence[RankRow], order: str, *, reverse: bool = False) -> list[NodeRow]:
    """`rows` grouped by host: hosts by their first rank, or those first whose worst rank comes first in `order`."""
    groups: dict[str, list[RankRow]] = {}
    for row in ordered(rows, order, reverse=reverse):
        groups.setdefault(row.node or "this host", []).append(row)
    return [NodeRow(name, tuple(sorted(group, key=lambda r: r.rank))) for name, group in groups.items()]


def ordered(rows: Sequence[RankRow], order: str, *, reverse: bool = False) -> list[RankRow]:
    """`rows` by rank, or those first with least headroom, the highest peak, or the fastest growth."""
    found = _ordered(rows, order)
    return found[::-1] if reverse else found


def _ordered(rows: Sequence[RankRow], order: str) -> list[RankRow]:
    if order == "headroom":
        return sorted(rows, key=lambda r: (r.headroom_bytes is None, r.headroom_bytes or 0, r.rank))
    if order == "peak":
        return sorted(rows, key=lambda r: (-(r.peak_bytes or 0), r.rank))
    if order == "growth":
        return sorted(rows, key=lambda r: (-(r.change.slope if r.change else 0.0), r.rank))
    return sorted(rows, key=lambda r: r.rank)
