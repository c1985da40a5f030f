"""Numbers about this process: device memory as torch's allocator counts it, host memory as the kernel does.

The sampling thread only calls what touches no CUDA API: a call from another thread can break a CUDA graph
capture. Free bytes of the device need the driver, so the training thread asks, twice a second at most and
never during a capture.
"""

from __future__ import annotations

import os
import time
from typing import Any, Callable

#: A statistic of the allocator: current, peak, allocated, freed.
_Stats = dict[str, Any]

#: How often the driver is asked for the device's free bytes.
_DRIVER_PERIOD_S = 0.5

_EMPTY_DEVICE: dict[str, int | None] = {
    "allocated_bytes": None,
    "reserved_bytes": None,
    "peak_allocated_bytes": None,
    "peak_reserved_bytes": None,
    "retries": None,
    "ooms": None,
}


class HostMemory:
    """Resident bytes of this process, read through files that stay open (1.5 µs a reading)."""

    def __init__(self) -> None:
        self._page = os.sysconf("SC_PAGE_SIZE")
        self._statm = self._open("/proc/self/statm")
        self._peak = 0

    def rss_bytes(self) -> int:
        """Resident bytes now; 0 where there is no /proc."""
        if self._statm < 0:
            return 0
        rss = int(os.pread(self._statm, 128, 0).split()[1]) * self._page
        if rss > self._peak:
            self._peak = rss
        return rss

    @property
    def peak_rss_bytes(self) -> int:
        """Most resident bytes known.

        The largest reading, and the kernel's own mark as of `read_high_water`.
        """
        return self._peak

    def read_high_water(self) -> int:
        """The kernel's mark VmHWM (15 µs).

        Not ru_maxrss: that one survives an exec and shows the parent's size.
        """
        try:
            with open("/proc/self/status", "rb") as stream:
                for line in stream:
                    if line.startswith(b"VmHWM:"):
                        self._peak = max(self._peak, int(line.split()[1]) * 1024)
                        break
        except (OSError, ValueError, IndexError):
            return self._peak
        return self._peak

    def close(self) -> None:
        if self._statm >= 0:
            os.close(self._statm)
            self._statm = -1

    @staticmethod
    def _open(path: str) -> int:
        try:
            return os.open(path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
        except OSError:
            return -1


class DevicePeaks:
    """Peaks per step without taking the user's own peaks away.

    torch keeps one peak per statistic, and a script that prints `torch.cuda.max_memory_allocated()` must see
    the value it would see without us. So the counters below torch.cuda are wrapped: what our resets hide is
    folded back into every answer, until the script itself resets.
    """

    def __init__(self, backend: Any) -> None:
        """`backend` is `torch._C`; nothing happens where it has no CUDA counters."""
        self._backend = backend
        self._hidden: dict[int, dict[str, int]] = {}
        self._interval: dict[int, dict[str, int]] = {}
        self._stats: Callable[[int], _Stats] | None = None
        self._reset: Callable[[int], None] | None = None

    def install(self) -> bool:
        """Wrap the counters; False when there are none or another agent has them."""
        stats = getattr(self._backend, "_cuda_memoryStats", None)
        reset = getattr(self._backend, "_cuda_resetPeakMemoryStats", None)
        if stats is None or reset is None:
            return False
        self._stats, self._reset = stats, reset

        self._backend._cuda_memoryStats = self._folding(stats)
        self._backend._cuda_resetPeakMemoryStats = self._resetting(reset, stats)
        self._wrap_accelerator(stats)
        return True

    def _folding(self, stats: Callable[[int], _Stats]) -> Callable[[int], _Stats]:
        """`stats` with the peaks that our own resets hid."""

        def folded(device: int) -> _Stats:
            answer: _Stats = stats(device)
            hidden = self._hidden.get(device)
            if hidden:
                _fold(answer, hidden, "")
            return answer

        return folded

    def _resetting(
        self, reset: Callable[[int], None], cuda_stats: Callable[[int], _Stats]
    ) -> Callable[[int], None]:
        """`reset` as the script calls it: our interval keeps its peak, and nothing stays hidden."""

        def reset_peak(device: int) -> None:
            self._keep(self._interval, device, cuda_stats(device))
            reset(device)
            self._hidden.pop(device, None)

        return reset_peak

    def _wrap_accelerator(self, cuda_stats: Callable[[int], _Stats]) -> None:
        """The same for torch.accelerator, whose counters are the same ones by another name."""
        stats = getattr(self._backend, "_accelerator_getDeviceStats", None)
        reset = getattr(self._backend, "_accelerator_resetPeakStats", None)
        if stats is None or reset is None:
            return

        self._backend._accelerator_getDeviceStats = self._folding(stats)
        self._backend._accelerator_resetPeakStats = self._resetting(reset, cuda_stats)

    def now(self, device: int) -> _Stats:
        """The allocator's own counters; their peaks count from the last `interval`."""
        if self._stats is None:
            raise RuntimeError("no CUDA counters")
        return self._stats(device)

    def interval(self, device: int) -> dict[str, int]:
        """Peaks since the last call: flat name -> bytes. Starts the next interval."""
        if self._stats is None or self._reset is None:
            raise RuntimeError("no CUDA counters")
        stats = self._stats(device)
        self._keep(self._hidden, device, stats)
        self._keep(self._interval, device, stats)
        self._reset(device)
        return self._interval.pop(device)

    def split(self, device: int) -> int:
        """Peak of allocated bytes since the last `split` or `interval`; the interval goes on."""
        if self._stats is None or self._reset is None:
            raise RuntimeError("no CUDA counters")
        stats = self._stats(device)
        self._keep(self._hidden, device, stats)
        self._keep(self._interval, device, stats)
        self._reset(device)
        return int(stats["allocated_bytes"]["all"]["peak"])

    def peek(self, device: int, stats: _Stats) -> dict[str, int]:
        """Peaks of the running interval, given the counters of `now`."""
        peaks = dict(self._interval.get(device, {}))
        _collect(stats, peaks, "")
        return peaks

    def overall(self, device: int, peaks: dict[str, int], name: str) -> int:
        """The peak of statistic `name` as the script would see it."""
        return max(peaks[name], self._hidden.get(device, {}).get(name, 0))

    def _keep(self, where: dict[int, dict[str, int]], device: int, stats: _Stats) -> None:
        _collect(stats, where.setdefault(device, {}), "")


def _collect(stats: _Stats, peaks: dict[str, int], prefix: str) -> None:
    """Raise each entry of `peaks` to the peak in `stats` (torch's nested dictionary)."""
    for key, value in stats.items():
        if isinstance(value, dict):
            _collect(value, peaks, f"{prefix}{key}.")
        elif key == "peak":
            name = prefix[:-1]
            if value > peaks.get(name, -1):
                peaks[name] = value


def _fold(stats: _Stats, peaks: dict[str, int], prefix: str) -> None:
    """Raise the peaks in `stats` to those in `peaks`."""
    for key, value in stats.items():
        if isinstance(value, dict):
            _fold(value, peaks, f"{prefix}{key}.")
        elif key == "peak":
            stats[key] = max(value, peaks.get(prefix[:-1], 0))


class DeviceMemory:
    """Allocator readings of the device this process uses; all None as long as it uses none."""

    def __init__(self, torch: Any) -> None:
        self._torch = torch
        self.peaks = DevicePeaks(torch._C)
        self._has_counters = self.peaks.install()
        self._free: tuple[int | None, int | None] = (None, None)
        self._asked = 0.0
        self._device: int | None = None

    @property
    def is_used(self) -> bool:
        return self._has_counters and bool(self._torch.cuda.is_initialized())

    def device(self) -> int | None:
        """CUDA ordinal, as of the last time the training thread asked; None without a device."""
        return self._device

    def step(self) -> dict[str, int | None]:
        """At the end of a step, in the training thread: current bytes and the peaks of this step."""
        if not self.is_used:
            return dict(_EMPTY_DEVICE)
        self._device = device = self._torch.cuda.current_device()
        peaks = self.peaks.interval(device)
        reading = _flat(self.peaks.now(device))
        reading["peak_allocated_bytes"] = peaks.get("allocated_bytes.all", reading["allocated_bytes"])
        reading["peak_reserved_bytes"] = peaks.get("reserved_bytes.all", reading["reserved_bytes"])
        self._ask_driver(device)
        return reading

    def now(self) -> dict[str, int | None]:
        """From any thread: current bytes, and the peaks of the step that runs."""
        device = self._device
        if not self.is_used or device is None:
            return dict(_EMPTY_DEVICE)
        stats = self.peaks.now(device)
        peaks = self.peaks.peek(device, stats)
        reading = _flat(stats)
        reading["peak_allocated_bytes"] = peaks.get("allocated_bytes.all", 0)
        reading["peak_reserved_bytes"] = peaks.get("reserved_bytes.all", 0)
        return reading

    def split(self) -> int | None:
        """Peak of allocated bytes since the last `split` or `step`.

        Starts the next stretch of the same step.
        """
        device = self._device
        if not self.is_used or device is None:
            return None
        return self.peaks.split(device)

    def allocated_bytes(self) -> int | None:
        """Bytes in live tensors now."""
        device = self._device
        if not self.is_used or device is None:
            return None
        return int(self.peaks.now(device)["allocated_bytes"]["all"]["current"])

    def driver(self) -> tuple[int | None, int | None]:
        """(free, total) bytes of the device as of the last time the driver was asked."""
        return self._free

    def notice(self) -> None:
        """In the training thread, once it has set its device: remember which one it uses.

        The current device belongs to a thread, so the agent's own thread cannot ask. Nothing here creates a
        CUDA context: on a rank that has not chosen its device yet, that would be one on device 0, of every
        rank.
        """
        if self.is_used:
            self._device = device = self._torch.cuda.current_device()
            self._ask_driver(device)

    def _ask_driver(self, device: int) -> None:
        now = time.monotonic()
        if now - self._asked < _DRIVER_PERIOD_S:
            return
        if not self.peaks.now(device)["reserved_bytes"]["all"]["current"]:
            return  # nothing allocated yet: there may be no context
        capturing = getattr(self._torch._C, "_cuda_isCurrentStreamCapturing", None)
        if capturing is not None and capturing():
            return
        self._asked = now
        free, total = self._torch.cuda.mem_get_info(device)
        self._free = (int(free), int(total))


def _flat(stats: _Stats) -> dict[str, int | None]:
    return {
        "allocated_bytes": stats["allocated_bytes"]["all"]["current"],
        "reserved_bytes": stats["reserved_bytes"]["all"]["current"],
        "peak_allocated_bytes": None,
        "peak_reserved_bytes": None,
        "retries": stats.get("num_alloc_retries"),
        "ooms": stats.get("num_ooms"),
    }
