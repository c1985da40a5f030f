"""Whether a rerun proves its fixes: it survived, stayed where it was predicted, and trained the same.

"Proof" needs real numbers. A simulated device computes sizes only, so there the losses are not comparable,
and the result says so.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.fixes.model import Fix

EQUAL = "equal"
WITHIN = "within"
DIFFERS = "differs"
NOT_COMPARABLE = "not comparable"

#: Steps at the start of an attempt whose duration says little: caches warm up, kernels are chosen.
_WARM_UP_STEPS = 2


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """What one optimizer step left behind; sums in float64."""

    learning_rates: tuple[float, ...] = ()
    buffers: float | None = None
    """Sum over all buffers of the model (running statistics of BatchNorm)."""
    parameters: float | None = None


@dataclass(frozen=True, slots=True)
class AttemptNumbers:
    """What is compared of one attempt; lists are in step order from step 0."""

    losses: Sequence[float] = ()
    durations_ns: Sequence[int] = ()
    fingerprints: Mapping[int, Fingerprint] = field(default_factory=dict)
    """Step -> fingerprint."""
    steps: int = 0
    exit_code: int | None = None
    oom: bool = False
    peak_reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    simulated: bool = False
    fixes: Mapping[str, str] = field(default_factory=dict)
    """Fix id -> the state that the job reported last."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """One quantity in two attempts."""

    result: str
    detail: str


def prove(
    before: AttemptNumbers,
    after: AttemptNumbers,
    fixes: Iterable[Fix],
    predicted: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The object `proof` of an attempt: what was compared, and whether the fixes are accepted.

    Args:
        before: the attempt without these fixes.
        after: the rerun.
        fixes: the fixes of the rerun.
        predicted: the prediction that was stored before it started.
    """
    chosen = list(fixes)
    tolerance = _tolerance(chosen)
    loss = compare_losses(before, after, tolerance)
    buffers = compare_fingerprints(before, after, "buffers", tolerance)
    rates = compare_fingerprints(before, after, "learning_rates", 0.0)
    reasons = _objections(before, after, {"loss": loss, "buffers": buffers, "learning rate": rates})
    return {
        "peak": _peak(after, predicted),
        "loss": loss.result,
        "loss_detail": loss.detail,
        "buffers": buffers.result,
        "buffers_detail": buffers.detail,
        "learning_rate": rates.result,
        "steps": {"before": before.steps, "after": after.steps},
        "throughput_ratio": throughput_ratio(before, after),
        "fixes": dict(after.fixes),
        "accepted": not reasons,
        "why_not_accepted": "; ".join(reasons) or None,
    }


def _tolerance(fixes: Sequence[Fix]) -> float | None:
    """The largest relative difference that the risk classes of `fixes` allow together; None: not comparable."""
    allowed = [fix.tolerance for fix in fixes]
    if any(each is None for each in allowed):
        return None
    return max((each for each in allowed if each is not None), default=0.0)


def compare_losses(before: AttemptNumbers, after: AttemptNumbers, tolerance: float | None) -> Comparison:
    """The losses of the steps that both attempts took."""
    if before.simulated or after.simulated:
        return Comparison(NOT_COMPARABLE, "a simulated device computes sizes, not values")
    if tolerance is None:
        return Comparison(NOT_COMPARABLE, "the fixes change the training on purpose")
    count = min(len(before.losses), len(after.losses))
    if not count:
        return Comparison(NOT_COMPARABLE, "no loss was recorded in both attempts")
    return _compare(before.losses[:count], after.losses[:count], tolerance, f"over {_steps(count)}")


def compare_fingerprints(
    before: AttemptNumbers, after: AttemptNumbers, what: str, tolerance: float | None
) -> Comparison:
    """Buffers, parameters or learning rates at the steps where both attempts recorded them."""
    if before.simulated or after.simulated:
        return Comparison(NOT_COMPARABLE, "a simulated device computes sizes, not values")
    if tolerance is None:
        return Comparison(NOT_COMPARABLE, "the fixes change the training on purpose")
    pairs: list[tuple[float, float]] = []
    for step in sorted(set(before.fingerprints) & set(after.fingerprints)):
        first, second = (getattr(each.fingerprints[step], what) for each in (before, after))
        if isinstance(first, tuple) and isinstance(second, tuple):
            if len(first) != len(second):
                return Comparison(DIFFERS, f"{len(first)} parameter groups against {len(second)}")
            pairs += zip(first, second, strict=True)
        elif first is not None and second is not None:
            pairs.append((first, second))
    if not pairs:
        return Comparison(NOT_COMPARABLE, "not recorded in both attempts (run with --detail)")
    firsts, seconds = zip(*pairs, strict=True)
    return _compare(firsts, seconds, tolerance, f"at {len(pairs)} points")


def _compare(before: Sequence[float], after: Sequence[float], tolerance: float, where: str) -> Comparison:
    if list(before) == list(after):
        return Comparison(EQUAL, f"bit for bit {where}")
    if not all(math.isfinite(value) for value in (*before, *after)):
        return Comparison(DIFFERS, f"a value is not finite {where}")
    worst = max(abs(a - b) / max(abs(a), 1e-12) for a, b in zip(before, after, strict=True))
    result = WITHIN if worst <= tolerance else DIFFERS
    return Comparison(result, f"by up to {worst:.1e} of the value {where}, {tolerance:.0e} allowed")


def _steps(count: int) -> str:
    return f"{count} step" if count == 1 else f"{count} steps"


def throughput_ratio(before: AttemptNumbers, after: AttemptNumbers) -> float | None:
    """Steps per second of the rerun over those before, from median step times; None on a simulated device."""
    if before.simulated or after.simulated:
        return None
    times = [list(each.durations_ns)[_WARM_UP_STEPS:] for each in (before, after)]
    if not all(times):
        return None
    first, second = (statistics.median(each) for each in times)
    return round(first / second, 3) if second else None


def _peak(after: AttemptNumbers, predicted: Mapping[str, Any] | None) -> dict[str, Any]:
    known = predicted or {}
    low, high, reached = known.get("low_bytes"), known.get("high_bytes"), after.peak_reserved_bytes
    inside = None
    if low is not None and high is not None and reached is not None:
        inside = low <= reached <= high
    return {
        "predicted_bytes": known.get("peak_reserved_bytes"),
        "low_bytes": low,
        "high_bytes": high,
        "reached_bytes": reached,
        "reached_by": "simulated" if after.simulated else "measured",
        "inside": inside,
    }


def _objections(
    before: AttemptNumbers, after: AttemptNumbers, compared: Mapping[str, Comparison]
) -> list[str]:
    """Why the fixes are not accepted; empty when they are."""
    found = []
    if after.oom:
        found.append("it ran out of memory again")
    elif after.exit_code not in (0, None):
        found.append(f"it ended with exit code {after.exit_code}")
    if after.steps < before.steps and not after.oom:
        found.append(f"it took {_steps(after.steps)}, the run before took {before.steps}")
    found += [f"{name} differs {each.detail}" for name, each in compared.items() if each.result == DIFFERS]
    found += [f"{fix} was refused by the job" for fix, state in after.fixes.items() if state == "refused"]
    return found
