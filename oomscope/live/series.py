"""Per-step history of a rank in a bounded number of buckets, however long the run is."""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from typing import Any

#: Buckets before two neighbours become one. A screen is at most a few hundred columns wide.
MAX_BUCKETS = 1024


class StepSeries:
    """Low, peak and reserved bytes per step; `span` steps share a bucket.

    A bucket keeps the lowest low and the highest peak of its steps, so that no spike is lost by halving. A
    job without a device is drawn by its host memory: low is the resident bytes at the end of the step, peak
    their high-water mark. Steps that are missing (lost records) repeat the bucket before them.
    """

    def __init__(self, max_buckets: int = MAX_BUCKETS) -> None:
        self.first_step = 0
        self.span = 1
        self.low = array("q")
        self.peak = array("q")
        self.reserved = array("q")
        self.on_host = False
        """The bytes are host memory."""
        self._max = max(2, max_buckets - max_buckets % 2)

    def __len__(self) -> int:
        return len(self.peak)

    @property
    def last_step(self) -> int:
        """The last step of the last bucket (which may be partly filled); -1 when there is none."""
        return self.first_step + len(self.peak) * self.span - 1 if self.peak else -1

    def add(self, step: int, record: Mapping[str, Any]) -> None:
        """Add a `step` record; earlier steps than the first are dropped."""
        peak, low, reserved = (
            record.get(name) for name in ("peak_allocated_bytes", "low_allocated_bytes", "reserved_bytes")
        )
        if not isinstance(peak, int):
            self.on_host = True
            low = record.get("rss_bytes")
            peak = record.get("peak_rss_bytes")
            reserved = peak
        if not (isinstance(peak, int) and isinstance(low, int)):
            return
        self._put(step, low, peak, reserved if isinstance(reserved, int) else peak)

    def _put(self, step: int, low: int, peak: int, reserved: int) -> None:
        if not self.peak:
            self.first_step = step
        index = (step - self.first_step) // self.span
        if index < 0:
            return
        while index >= self._max:
            self._halve()
            index = (step - self.first_step) // self.span
        while len(self.peak) < index:
            self.low.append(self.low[-1])
            self.peak.append(self.peak[-1])
            self.reserved.append(self.reserved[-1])
        if index == len(self.peak):
            self.low.append(low)
            self.peak.append(peak)
            self.reserved.append(reserved)
        else:
            self.low[index] = min(self.low[index], low)
            self.peak[index] = max(self.peak[index], peak)
            self.reserved[index] = max(self.reserved[index], reserved)

    def _halve(self) -> None:
        self.low = _pairs(self.low, min)
        self.peak = _pairs(self.peak, max)
        self.reserved = _pairs(self.reserved, max)
        self.span *= 2


def _pairs(values: array[int], choose: Any) -> array[int]:
    return array("q", (choose(values[at : at + 2]) for at in range(0, len(values), 2)))
