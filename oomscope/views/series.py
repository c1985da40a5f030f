"""Per-step history cut to the columns of a chart, and its trend.

One column always stands for a whole number of buckets, hence of steps: a peak is never split or smoothed
away.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from oomscope.core.series.trend import Trend, judge
from oomscope.views.protocols import Series

#: Newest buckets through which the trend is drawn: an old plateau must not hide a leak that began an hour
#: ago.
_TREND_BUCKETS = 128


@dataclass(frozen=True)
class History:
    """A copy of one rank's series that later updates do not change; bytes, one element per bucket."""

    first_step: int
    span: int
    """Steps per bucket."""
    low: Sequence[int]
    """What no moment of the steps went below."""
    peak: Sequence[int]
    reserved: Sequence[int]
    """Empty for host memory."""

    @property
    def last_step(self) -> int:
        """The newest step of the last bucket; `first_step` − 1 when there is none."""
        return self.first_step + len(self.peak) * self.span - 1

    @cached_property
    def trend(self) -> Trend:
        """What the lows of the newest buckets do; growth there is what outlives its step."""
        low = self.low[-_TREND_BUCKETS:]
        start = self.first_step + (len(self.low) - len(low)) * self.span
        return judge(range(start, start + len(low) * self.span, self.span), low)

    def bucket_of(self, step: int) -> int:
        """Index of the bucket that holds `step`, clamped to the ends."""
        return max(0, min(len(self.peak) - 1, (step - self.first_step) // self.span))


EMPTY = History(0, 1, (), (), ())


def freeze(series: Series | None) -> History:
    """A copy of `series`; slices of its arrays, which copy without making a Python number of every element."""
    if series is None:
        return EMPTY
    reserved = () if series.on_host else series.reserved[:]
    return History(series.first_step, max(1, series.span), series.low[:], series.peak[:], reserved)


@dataclass(frozen=True)
class Columns:
    """A stretch of history as chart columns, oldest first; every bucket is in exactly one column, or fills several."""

    first_step: int
    span: int
    """Steps per bucket."""
    buckets: int
    low: list[int]
    peak: list[int]
    reserved: list[int]

    @property
    def last_step(self) -> int:
        """The newest step in view; `first_step` − 1 when there is none."""
        return self.first_step + self.buckets * self.span - 1

    @property
    def steps_per_column(self) -> float:
        """Below 1 when one step is drawn several columns wide."""
        return self.buckets * self.span / max(1, len(self.peak))

    def step_at(self, column: int) -> int:
        """The first step that `column` stands for."""
        return self.first_step + column * self.buckets // max(1, len(self.peak)) * self.span

    def column_of(self, step: int) -> int | None:
        """The (first) column that shows `step`; None when it is out of view."""
        width = len(self.peak)
        if not width or not self.first_step <= step <= self.last_step:
            return None
        bucket = (step - self.first_step) // self.span
        if self.buckets <= width:
            return -(-bucket * width // self.buckets)
        return ((bucket + 1) * width - 1) // self.buckets


def cut(history: History, width: int, *, window: int | None = None, end: int | None = None) -> Columns:
    """The `window` (None: all) newest steps up to step `end` in exactly `width` columns; none without history."""
    stop = len(history.peak) if end is None else history.bucket_of(end) + 1
    start = 0 if window is None else max(0, stop - max(1, round(window / history.span)))
    count = stop - start
    first = history.first_step + start * history.span
    if count <= 0 or width <= 0:
        return Columns(first, history.span, 0, [], [], [])
    edges = [start + x * count // width for x in range(width + 1)]
    if count <= width:
        picked = edges[:-1]
        return Columns(
            first,
            history.span,
            count,
            [history.low[i] for i in picked],
            [history.peak[i] for i in picked],
            [history.reserved[i] for i in picked] if history.reserved else [],
        )
    pairs = list(itertools.pairwise(edges))
    return Columns(
        first,
        history.span,
        count,
        [min(history.low[a:b]) for a, b in pairs],
        [max(history.peak[a:b]) for a, b in pairs],
        [max(history.reserved[a:b]) for a, b in pairs] if history.reserved else [],
    )
