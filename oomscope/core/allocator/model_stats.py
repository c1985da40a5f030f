"""The counters behind `torch.cuda.memory_stats()`.

Standard library only, Python 3.9: this module also runs inside training jobs.

Source: DeviceStats in c10/core/CachingDeviceAllocator.h; key names in torch/csrc/cuda/Module.cpp.
"""

from __future__ import annotations

from typing import Any

_StatDict = dict[str, int]


class Stat:
    """One quantity over time: now, highest, and the sums of all increases and decreases."""

    __slots__ = ("allocated", "current", "freed", "peak")

    def __init__(self) -> None:
        self.current = self.peak = self.allocated = self.freed = 0

    def change(self, amount: int) -> None:
        """Add `amount`, which may be negative."""
        if amount > 0:
            self.allocated += amount
            self.current += amount
            if self.current > self.peak:
                self.peak = self.current
        else:
            self.freed -= amount
            self.current += amount

    def to_dict(self) -> _StatDict:
        return {
            "current": self.current,
            "peak": self.peak,
            "allocated": self.allocated,
            "freed": self.freed,
        }


class StatArray:
    """The same quantity for the whole device, the small pool and the large pool."""

    __slots__ = ("all", "large_pool", "small_pool")

    def __init__(self) -> None:
        self.all = Stat()
        self.small_pool = Stat()
        self.large_pool = Stat()

    def change(self, small: bool, amount: int) -> None:
        """Add `amount`, which may be negative, to the device and to one pool."""
        if amount:
            self.all.change(amount)
            (self.small_pool if small else self.large_pool).change(amount)

    def to_dict(self) -> dict[str, _StatDict]:
        return {
            "all": self.all.to_dict(),
            "small_pool": self.small_pool.to_dict(),
            "large_pool": self.large_pool.to_dict(),
        }

    def each(self) -> tuple[Stat, Stat, Stat]:
        return (self.all, self.small_pool, self.large_pool)


class _Live:
    """What is handed out, of one pool or of the device. Plain attributes: these change at every allocation.

    A block counts as active until its memory is free, as allocated until the program frees it. Both begin
    together, so one running sum serves both; what was freed follows from the sums.
    """

    __slots__ = (
        "active",
        "active_bytes",
        "active_bytes_peak",
        "active_peak",
        "base",
        "blocks",
        "blocks_peak",
        "bytes",
        "bytes_peak",
        "requested",
        "requested_peak",
        "sum_blocks",
        "sum_bytes",
        "sum_requested",
    )

    def __init__(self) -> None:
        self.blocks = self.bytes = self.active = self.active_bytes = self.requested = 0
        self.blocks_peak = self.bytes_peak = self.active_peak = 0
        self.active_bytes_peak = self.requested_peak = 0
        self.reset_accumulated()

    def reset_accumulated(self) -> None:
        self.sum_blocks = self.sum_bytes = self.sum_requested = 0
        self.base = (self.blocks, self.bytes, self.active, self.active_bytes, self.requested)

    def reset_peaks(self) -> None:
        self.blocks_peak, self.bytes_peak = self.blocks, self.bytes
        self.active_peak, self.active_bytes_peak = self.active, self.active_bytes
        self.requested_peak = self.requested

    def to_dicts(self) -> dict[str, _StatDict]:
        """The five quantities by torch's names."""
        rows = (
            ("allocation", self.blocks, self.blocks_peak, self.sum_blocks),
            ("allocated_bytes", self.bytes, self.bytes_peak, self.sum_bytes),
            ("active", self.active, self.active_peak, self.sum_blocks),
            ("active_bytes", self.active_bytes, self.active_bytes_peak, self.sum_bytes),
            ("requested_bytes", self.requested, self.requested_peak, self.sum_requested),
        )
        return {
            name: {"current": current, "peak": peak, "allocated": total, "freed": base + total - current}
            for (name, current, peak, total), base in zip(rows, self.base)
        }


class DeviceStats:
    """All counters of one device, updated by the allocator. Sizes are of blocks, except `requested`."""

    def __init__(self) -> None:
        self.segment = StatArray()
        self.inactive_split = StatArray()
        self.reserved_bytes = StatArray()
        self.inactive_split_bytes = StatArray()
        self.oversize_allocations = Stat()
        self.oversize_segments = Stat()
        self._all, self._small, self._large = _Live(), _Live(), _Live()

    def handed_out(self, small: bool, size: int, requested: int) -> None:
        """A block of `size` bytes now serves a request."""
        for live in (self._all, self._small if small else self._large):
            live.sum_blocks += 1
            live.sum_bytes += size
            live.sum_requested += requested
            live.blocks += 1
            if live.blocks > live.blocks_peak:
                live.blocks_peak = live.blocks
            live.active += 1
            if live.active > live.active_peak:
                live.active_peak = live.active
            live.bytes += size
            if live.bytes > live.bytes_peak:
                live.bytes_peak = live.bytes
            live.active_bytes += size
            if live.active_bytes > live.active_bytes_peak:
                live.active_bytes_peak = live.active_bytes
            live.requested += requested
            if live.requested > live.requested_peak:
                live.requested_peak = live.requested

    def given_back(self, small: bool, size: int) -> None:
        """The program freed a block; its memory may still be in use by another stream."""
        for live in (self._all, self._small if small else self._large):
            live.blocks -= 1
            live.bytes -= size

    def became_free(self, small: bool, size: int, requested: int) -> None:
        """A freed block can be used again."""
        for live in (self._all, self._small if small else self._large):
            live.active -= 1
            live.active_bytes -= size
            live.requested -= requested

    def inactive_split_changed(self, small: bool, blocks: int, size: int) -> None:
        """Free pieces of split segments changed by this many blocks and bytes (negative: less)."""
        self.inactive_split.change(small, blocks)
        self.inactive_split_bytes.change(small, size)

    def to_dict(self) -> dict[str, Any]:
        """The arrays in torch's nested form; the plain counters belong to the allocator."""
        live = {
            "all": self._all.to_dicts(),
            "small_pool": self._small.to_dicts(),
            "large_pool": self._large.to_dicts(),
        }
        stats: dict[str, Any] = {name: {pool: live[pool][name] for pool in live} for name in live["all"]}
        stats["segment"] = self.segment.to_dict()
        stats["inactive_split"] = self.inactive_split.to_dict()
        stats["reserved_bytes"] = self.reserved_bytes.to_dict()
        stats["inactive_split_bytes"] = self.inactive_split_bytes.to_dict()
        stats["oversize_allocations"] = self.oversize_allocations.to_dict()
        stats["oversize_segments"] = self.oversize_segments.to_dict()
        return stats

    def reset_peaks(self) -> None:
        for stat in self._stats():
            stat.peak = stat.current
        for live in (self._all, self._small, self._large):
            live.reset_peaks()

    def reset_accumulated(self) -> None:
        for stat in self._stats():
            stat.allocated = stat.freed = 0
        for live in (self._all, self._small, self._large):
            live.reset_accumulated()

    def _stats(self) -> list[Stat]:
        arrays = (self.segment, self.inactive_split, self.reserved_bytes, self.inactive_split_bytes)
        stats = [stat for array in arrays for stat in array.each()]
        return [*stats, self.oversize_allocations, self.oversize_segments]
