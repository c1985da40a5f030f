"""Chart columns lose no peak, whatever the width."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.live.series import StepSeries
from oomscope.views.series import EMPTY, History, cut, freeze

sizes = st.lists(st.integers(0, 10**12), min_size=1, max_size=400)


def history(values: list[int], *, first: int = 0, span: int = 1) -> History:
    return History(first, span, tuple(v // 2 for v in values), tuple(values), tuple(v + 1 for v in values))


@given(sizes, st.integers(1, 300), st.integers(0, 50), st.sampled_from([1, 2, 8]))
def test_columns_keep_extremes_and_fill_the_width(
    values: list[int], width: int, first: int, span: int
) -> None:
    shown = cut(history(values, first=first, span=span), width)
    assert len(shown.peak) == len(shown.low) == len(shown.reserved) == width
    assert max(shown.peak) == max(values)
    assert min(shown.low) == min(v // 2 for v in values)
    assert shown.first_step == first
    assert shown.last_step == first + len(values) * span - 1


@given(sizes, st.integers(1, 300), st.data())
def test_step_is_found_in_the_column_that_shows_it(
    values: list[int], width: int, data: st.DataObject
) -> None:
    kept = history(values)
    shown = cut(kept, width)
    step = data.draw(st.integers(0, len(values) - 1))
    column = shown.column_of(step)
    assert column is not None
    assert shown.peak[column] >= kept.peak[step]
    assert shown.step_at(column) <= step


@given(sizes, st.integers(1, 50), st.integers(1, 100))
def test_window_shows_the_newest_steps(values: list[int], width: int, window: int) -> None:
    shown = cut(history(values), width, window=window)
    assert shown.last_step == len(values) - 1
    assert shown.buckets == min(window, len(values))


def test_no_history_has_no_columns() -> None:
    assert cut(EMPTY, 80).peak == []
    assert cut(EMPTY, 80).column_of(0) is None
    assert cut(history([1, 2]), 0).peak == []


def test_step_out_of_view_has_no_column() -> None:
    shown = cut(history(list(range(1, 101))), 20, window=10)
    assert shown.column_of(89) is None
    assert shown.column_of(100) is None
    assert shown.column_of(90) == 0


def test_frozen_copy_does_not_follow_the_live_series() -> None:
    live = StepSeries()
    live.add(0, {"peak_allocated_bytes": 5, "low_allocated_bytes": 3, "reserved_bytes": 8})
    kept = freeze(live)
    live.add(1, {"peak_allocated_bytes": 9, "low_allocated_bytes": 3, "reserved_bytes": 8})
    assert list(kept.peak) == [5]
    assert list(kept.reserved) == [8]


def test_host_memory_has_no_reserved_layer() -> None:
    live = StepSeries()
    live.add(0, {"rss_bytes": 5, "peak_rss_bytes": 6})
    assert freeze(live).reserved == ()


@pytest.mark.parametrize(("per_step", "kind"), [(10 << 20, "leak"), (0, "flat")])
def test_trend_of_the_lows(per_step: int, kind: str) -> None:
    low = tuple((8 << 30) + per_step * step for step in range(60))
    assert History(0, 1, low, low, ()).trend.kind == kind
