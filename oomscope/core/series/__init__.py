"""Per-step series: trends, leak tests, steps until the limit."""

from oomscope.core.series.trend import Trend, correlation, judge

__all__ = ["Trend", "correlation", "judge"]
