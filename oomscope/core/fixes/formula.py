"""The lowest rung of the ladder: bands from recorded facts, where the script cannot be simulated.

Bands do not add up, so only single fixes are judged. And what comes after the failure was not recorded: in the first
step neither the backward pass nor the optimizer's state may have been there yet, so then nothing is said to fit.
"""

from __future__ import annotations

from collections.abc import Mapping

from oomscope.core.fixes.model import Band, Fix, JobFacts
from oomscope.core.fixes.prediction import RECORDED, Outcome
from oomscope.core.fixes.search import Combination, Found, cheapest


def by_formula(
    facts: JobFacts, fixes: Mapping[str, Fix], capacity_bytes: int | None
) -> tuple[Outcome, dict[Combination, Outcome], Found]:
    """The job as it is, each fix that has a band, and the single fixes that fit.

    The job as it is needs at least what was reserved when it failed and what was asked for then.
    """
    reserved = facts.peak_reserved_bytes or facts.oom_reserved_bytes
    if reserved is None:
        return Outcome((), peak_phase=facts.peak_phase, basis=RECORDED), {}, Found((), None)
    needed = reserved + (facts.requested_bytes or 0)
    fits = None if capacity_bytes is None else needed <= capacity_bytes
    baseline = Outcome((), peak_reserved_bytes=needed, peak_phase=facts.peak_phase, fits=fits, basis=RECORDED)
    outcomes: dict[Combination, Outcome] = {}
    for fix in fixes.values():
        band = fix.band(facts) if fix.applicable(facts).ok else None
        if band is not None:
            outcomes[(fix.id,)] = _banded(fix, band, needed, facts, capacity_bytes)
    saving = {ids: each for ids, each in outcomes.items() if (each.peak_reserved_bytes or 0) < needed}
    return baseline, outcomes, cheapest(saving, fixes)


def _banded(fix: Fix, band: Band, needed: int, facts: JobFacts, capacity_bytes: int | None) -> Outcome:
    low, high = needed - band.high, needed - band.low
    fits = None
    if capacity_bytes is not None and low > capacity_bytes:
        fits = False
    elif capacity_bytes is not None and high <= capacity_bytes and facts.oom_step:
        fits = True
    return Outcome(
        (fix.id,),
        peak_reserved_bytes=(low + high) // 2,
        low_bytes=low,
        high_bytes=high,
        fits=fits,
        time_factor=fix.time_factor,
        basis=f"{RECORDED}: {band.basis}",
    )
