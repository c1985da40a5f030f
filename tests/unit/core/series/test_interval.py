"""How often the interval of a slope holds the true slope: seeded simulations, independent and resembling noise."""

import random

import pytest

from oomscope.core.series import judge
from oomscope.units import GIB, MIB

RUNS = 300


def series(chance: random.Random, steps: int, slope: float, noise: float, resemblance: float) -> list[float]:
    """A growth by `slope` with noise of which neighbours share `resemblance`."""
    values, state = [], 0.0
    for step in range(steps):
        state = resemblance * state + chance.gauss(0, noise) * (1 - resemblance**2) ** 0.5
        values.append(8 * GIB + step * slope + state)
    return values


def coverage(steps: int, resemblance: float) -> tuple[float, float]:
    """(share of intervals that hold the slope, share of runs that are called a leak)."""
    slope, chance = 20 * MIB, random.Random(7)
    trends = [judge(range(steps), series(chance, steps, slope, 40 * MIB, resemblance)) for _ in range(RUNS)]
    leaks = [trend for trend in trends if trend.is_leak]
    return sum(trend.low <= slope <= trend.high for trend in trends) / RUNS, len(leaks) / RUNS


@pytest.mark.parametrize("steps", [20, 60, 300])
@pytest.mark.parametrize("resemblance", [0.0, 0.5, 0.8])
def test_the_interval_holds_the_slope_as_often_as_it_says(steps, resemblance):
    held, leaks = coverage(steps, resemblance)
    # 95 % are promised; with 300 runs the share itself is uncertain by 2.5 %, and few points of resembling noise cannot
    # show how much they resemble each other. Without the correction it is 0.50 to 0.75 there.
    assert held >= (0.92 if resemblance == 0 else 0.87)
    if steps >= 60:
        assert leaks >= 0.9


@pytest.mark.parametrize("resemblance", [0.0, 0.5, 0.8])
def test_noise_alone_is_rarely_called_a_leak(resemblance):
    chance = random.Random(3)
    trends = [judge(range(60), series(chance, 60, 0.0, 60 * MIB, resemblance)) for _ in range(RUNS)]
    assert sum(trend.is_leak for trend in trends) <= 0.02 * RUNS


def test_the_steps_that_are_left_have_an_interval():
    chance = random.Random(5)
    inside = 0
    for _ in range(RUNS):
        values = series(chance, 60, 20 * MIB, 40 * MIB, 0.3)
        trend = judge(range(60), values)
        between = trend.steps_range(16 * GIB, values[-1])
        assert between is not None
        assert between[0] <= (trend.steps_until(16 * GIB, values[-1]) or 0) <= between[1]
        inside += between[0] <= (16 * GIB - values[-1]) / (20 * MIB) <= between[1]
    assert inside >= 0.92 * RUNS
    assert judge(range(60), [GIB] * 60).steps_range(16 * GIB) is None


def test_a_growth_that_slows_down_is_a_growth():
    values = [40 * MIB + 10 * MIB * step**0.85 for step in range(18)]
    trend = judge(range(18), values)
    assert trend.is_leak
    assert trend.low > 0
