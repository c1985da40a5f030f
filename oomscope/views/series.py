"""Per-step history cut to the columns of a chart, and its trend.

One column always stands for a whole number of buckets, hence of steps: a peak is never split or smoothed
away.
"""

from __future__ import annotations

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
    low: tuple[int, ...]
    """What no moment of the steps went below."""
    peak: tuple[int, ...]
    reserved: tuple[int, ...]
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
    """A copy of `series`."""
    if series is None:
        return EMPTY
    return History(
        series.first_step,
        max(1, series.span),
        tuple(series.low),
        tuple(series.peak),
        () if series.on_host else tuple(series.reserved),
    )


@dataclass(frozen=True)
class Columns:
    """A stretch of history as chart columns, oldest first."""

    first_step: int
    steps_per_column: float
    """Below 1 when one step is drawn several columns wide."""
    last_step: int
    low: list[int]
    peak: list[int]
    reserved: list[int]

    def step_at(self, column: int) -> int:
        """The first step that `column` stands for."""
        return min(self.last_step, self.first_step + int(column * self.steps_per_column))

    def column_of(self, step: int) -> int | None:
        """The column that shows `step`; None when it is out of view."""
        if not self.peak or not self.first_step <= step <= self.last_step:
            return None
        return min(len(self.peak) - 1, int((step - self.first_step) / self.steps_per_column))


def cut(history: History, width: int, *, window: int | None = None, end: int | None = None) -> Columns:
    """The `window` (None: all) newest steps up to step `end` in at most `width` columns."""
    stop = len(history.peak) if end is None else history.bucket_of(end) + 1
    start = 0 if window is None else max(0, stop - max(1, round(window / history.span)))
    count = stop - start
    first = history.first_step + start * history.span
    if count <= 0 or width <= 0:
        return Columns(first, 1.0, first, [], [], [])
    if count <= width:
        repeat = width // count
        picked = [i for i in range(start, stop) for _ in range(repeat)]
        low = [history.low[i] for i in picked]
        peak = [history.peak[i] for i in picked]
        reserved = [history.reserved[i] for i in picked] if history.reserved else []
        per_column = history.span / repeat
    else:
        group = -(-count // width)
        bounds = range(start, stop, group)
        low = [min(history.low[i : min(stop, i + group)]) for i in bounds]
        peak = [max(history.peak[i : min(stop, i + group)]) for i in bounds]
        reserved = (
            [max(history.reserved[i : min(stop, i + group)]) for i in bounds] if history.reserved else []
        )
        per_column = float(group * history.span)
    return Columns(first, per_column, first + count * history.span - 1, low, peak, reserved)
