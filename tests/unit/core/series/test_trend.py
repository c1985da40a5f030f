import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.core.series import correlation, judge
from oomscope.units import GIB, MIB


def noisy(values, noise=0.0, seed=1):
    chance = random.Random(seed)
    return [v + chance.uniform(-noise, noise) for v in values]


def test_steady_growth_is_a_leak():
    trend = judge(range(40), noisy([GIB + n * 100 * MIB for n in range(40)], 5 * MIB))
    assert trend.kind == "leak"
    assert trend.slope == pytest.approx(100 * MIB, rel=0.02)
    assert trend.low <= 100 * MIB <= trend.high
    assert trend.r2 > 0.99


def test_slow_growth_in_a_large_level_is_a_leak():
    assert judge(range(300), [20 * GIB + n * MIB for n in range(300)]).kind == "leak"


def test_growth_hidden_by_varying_batches_is_a_leak():
    trend = judge(range(60), noisy([GIB + n * 20 * MIB for n in range(60)], 120 * MIB))
    assert trend.kind == "leak"


def test_the_first_two_steps_are_no_growth():
    trend = judge(range(20), [GIB, 3 * GIB, *[4 * GIB] * 18])
    assert trend.kind == "flat"


def test_a_rise_that_stops_is_a_plateau():
    values = [GIB, GIB, GIB, 2 * GIB, 3 * GIB, 3.4 * GIB, 3.5 * GIB, *[3.5 * GIB] * 10]
    assert judge(range(len(values)), values).kind == "plateau"


def test_a_saw_tooth_has_a_period():
    trend = judge(range(60), [GIB + (n % 10) * 100 * MIB for n in range(60)])
    assert trend.kind == "sawtooth"
    assert trend.period == pytest.approx(10)


def test_noise_is_flat():
    assert judge(range(50), noisy([10 * GIB] * 50, 20 * MIB)).kind == "flat"


def test_a_few_steps_say_nothing():
    trend = judge(range(6), [GIB * n for n in range(6)])
    assert trend.kind == "unclear"
    assert trend.steps == 4


def test_random_levels_say_nothing():
    assert judge(range(30), [GIB * random.Random(n).uniform(1, 5) for n in range(30)]).kind in (
        "unclear",
        "sawtooth",
    )


def test_missing_values_are_skipped():
    values = [None if n % 3 == 0 else GIB + n * 50 * MIB for n in range(40)]
    assert judge(range(40), values).kind == "leak"


def test_steps_until_the_card_is_full():
    trend = judge(range(20), [GIB + n * 100 * MIB for n in range(20)])
    assert trend.steps_until(trend.last + GIB) == pytest.approx(1024 / 100, rel=0.01)
    assert trend.steps_until(0) == 0
    assert trend.steps_until(10 * GIB, level=9 * GIB) == pytest.approx(10.24, rel=0.01)
    assert judge(range(20), [GIB] * 20).steps_until(2 * GIB) is None


@given(st.lists(st.integers(0, 1 << 40), max_size=60))
def test_any_series_is_judged(values):
    trend = judge(range(len(values)), values)
    assert trend.kind in ("leak", "plateau", "sawtooth", "flat", "unclear")
    assert trend.low <= trend.slope <= trend.high


@given(st.floats(0, 1 << 30), st.integers(1 << 25, 1 << 30))
def test_a_pure_line_is_always_a_leak(level, slope):
    assert judge(range(12), [level + slope * n for n in range(12)]).is_leak


def test_correlation():
    assert correlation([1, 2, 3, 4], [2, 4, 6, 8]) == pytest.approx(1)
    assert correlation([1, 2, 3, 4], [8, 6, 4, 2]) == pytest.approx(-1)
    assert correlation([1, 1, 1, 1], [1, 2, 3, 4]) is None
    assert correlation([1, 2], [1, 2]) is None


def test_two_points_have_an_infinite_interval():
    from oomscope.core.series.trend import _fit

    assert _fit([0.0, 1.0], [0.0, 2.0])[:2] == (2.0, float("inf"))
