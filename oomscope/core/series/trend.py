"""What a per-step series does: growth with an interval, plateau, saw-tooth, or nothing.

And how many steps are left.

The value to watch is the *low* of each step (allocated bytes when a step ends): what is alive then has
outlived its step. Plain Python: a series has at most a few thousand buckets, and `explain` must not load
numpy for it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

from oomscope.units import MIB

WARM_UP_STEPS = 2
"""Optimizer state, gradients and library workspaces appear in the first two steps; they are no growth."""
MIN_STEPS = 5
"""Fewer points say nothing about a trend."""
NOISE_BYTES = MIB
NOISE_SHARE = 0.005
"""Rises below half a percent of the level over the whole series are noise."""

_RESEMBLANCE_POINTS = 8
_MOST_RESEMBLANCE = 0.8
_LEAST_FREEDOM = 3
"""Fewer points do not show how much neighbours resemble each other. More resemblance than this is a bend of the curve:
a growth that slows down is one all the same, and must not vanish in its interval."""

#: Two-sided 95 % quantiles of Student's t by degrees of freedom. Source: any table; beyond 30 the normal
#: value.
_T95 = (
    12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26, 2.23, 2.20, 2.18, 2.16, 2.14, 2.13, 2.12, 2.11, 2.10, 2.09,
    2.09, 2.08, 2.07, 2.07, 2.06, 2.06, 2.06, 2.05, 2.05, 2.05, 2.04,
)  # fmt: skip


@dataclass(frozen=True)
class Trend:
    """A judged series. Bytes and steps."""

    kind: str
    """"leak" (steady growth), "plateau" (grew, then stopped), "sawtooth" (grows and is collected), "flat", or
    "unclear" (too few steps, or no pattern)."""
    slope: float
    """Bytes per step, least squares after the warm-up."""
    low: float
    high: float
    """95 % interval of the slope."""
    r2: float
    steps: int
    """Points that were judged."""
    first: float
    last: float
    """Value at the first and the last judged step."""
    period: float | None = None
    """Steps between two collections of a saw-tooth."""

    @property
    def is_leak(self) -> bool:
        return self.kind == "leak"

    def steps_until(self, limit: float, level: float | None = None) -> float | None:
        """Steps until `level` (default: the last value) reaches `limit` at this slope.

        None without growth.
        """
        if self.kind != "leak" or self.slope <= 0:
            return None
        return max(0.0, (limit - (self.last if level is None else level)) / self.slope)

    def steps_range(self, limit: float, level: float | None = None) -> tuple[float, float] | None:
        """(fewest, most) steps until `level` reaches `limit`, over the interval of the slope. None without growth."""
        if self.kind != "leak" or self.low <= 0:
            return None
        left = max(0.0, limit - (self.last if level is None else level))
        return left / self.high, left / self.low


def _fit(xs: Sequence[float], ys: Sequence[float]) -> tuple[float, float, float]:
    """(slope, half width of its 95 % interval, R²) by least squares; xs are not all equal."""
    n = len(xs)
    mx, my = sum(xs) / n, sum(ys) / n
    sxx = sum((x - mx) ** 2 for x in xs)
    sxy = sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True))
    syy = sum((y - my) ** 2 for y in ys)
    slope = sxy / sxx
    rest = max(0.0, syy - slope * sxy)
    r2 = 1.0 - rest / syy if syy > 0 else 0.0
    if n < 3:
        return slope, math.inf, r2
    worth = _worth([y - my - slope * (x - mx) for x, y in zip(xs, ys, strict=True)])
    error = math.sqrt(rest / (n - 2) / sxx / worth)
    freedom = max(min(n - 2, _LEAST_FREEDOM), round(n * worth) - 2)
    t = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
    return slope, t * error, r2


def _worth(residuals: Sequence[float]) -> float:
    """How much a point tells where neighbours resemble each other: 1 for independent ones, less otherwise.

    Residuals with lag-1 correlation r carry the information of (1 − r) / (1 + r) as many points. After a line was
    fitted, an estimate of r from n points is too small by about (2 + 4 r) / n, and is corrected for it. Source: Santer
    et al. 2000, adjusted degrees of freedom of a trend; the correction reaches the coverage that a simulation shows.
    """
    n = len(residuals)
    power = sum(r * r for r in residuals)
    if n < _RESEMBLANCE_POINTS or power <= 0:
        return 1.0
    r = sum(a * b for a, b in pairwise(residuals)) / power
    r = min(_MOST_RESEMBLANCE, max(0.0, r + (2 + 4 * max(0.0, r)) / n)) if r > 0 else 0.0
    return (1 - r) / (1 + r)


def judge(steps: Sequence[int], values: Sequence[float | None], *, warm_up: int = WARM_UP_STEPS) -> Trend:
    """The trend of `values` over increasing `steps`; missing values (None) are skipped.

    A leak must rise in most steps with an interval above zero; a plateau rises and then stays within noise
    for at least the last third; a saw-tooth falls at least twice by most of what it had risen.
    """
    points = [(s, float(v)) for s, v in zip(steps, values, strict=True) if v is not None and s >= warm_up]
    if len(points) < MIN_STEPS:
        first, last = (points[0][1], points[-1][1]) if points else (0.0, 0.0)
        return Trend("unclear", 0.0, 0.0, 0.0, 0.0, len(points), first, last)
    xs, ys = [float(s) for s, _ in points], [v for _, v in points]
    slope, half, r2 = _fit(xs, ys)
    noise = max(NOISE_BYTES, NOISE_SHARE * max(ys))
    kind, period = _kind(xs, ys, slope, half, r2, noise)
    return Trend(kind, slope, slope - half, slope + half, r2, len(points), ys[0], ys[-1], period)


def _kind(
    xs: list[float], ys: list[float], slope: float, half: float, r2: float, noise: float
) -> tuple[str, float | None]:
    spread = max(ys) - min(ys)
    if spread <= noise:
        return "flat", None
    drops = _drops(ys, spread)
    if len(drops) >= 2:
        return "sawtooth", (xs[drops[-1]] - xs[drops[0]]) / (len(drops) - 1)
    length = max(3, len(ys) // 3)
    tail = ys[-length:]
    rose = ys[-1] - ys[0]
    stopped = max(tail) - min(tail) <= noise and _fit(xs[-length:], tail)[0] < 0.3 * slope
    if rose > noise and stopped and len(ys) >= 6:
        return "plateau", None
    rising = sum(1 for a, b in pairwise(ys) if b > a) / (len(ys) - 1)
    if slope - half > 0 and rose > noise and (r2 >= 0.9 or (rising >= 0.8 and r2 >= 0.6)):
        return "leak", None
    return "unclear", None


def _drops(ys: list[float], spread: float) -> list[int]:
    """Indices where a value falls by at least half of the whole spread after having risen by as much."""
    found = []
    low = ys[0]
    high = ys[0]
    for index, y in enumerate(ys[1:], 1):
        high = max(high, y)
        if high - y >= 0.5 * spread and high - low >= 0.5 * spread:
            found.append(index)
            low = high = y
        low = min(low, y)
    return found


def correlation(xs: Sequence[float], ys: Sequence[float]) -> float | None:
    """Pearson's correlation; None for fewer than four points or a constant side."""
    n = len(xs)
    if n < 4:
        return None
    mx, my = sum(xs) / n, sum(ys) / n
    sxx = sum((x - mx) ** 2 for x in xs)
    syy = sum((y - my) ** 2 for y in ys)
    if sxx <= 0 or syy <= 0:
        return None
    return sum((x - mx) * (y - my) for x, y in zip(xs, ys, strict=True)) / math.sqrt(sxx * syy)
