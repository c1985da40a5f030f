"""Which fixes to try, alone and together, and which plan to recommend: greedy, cheapest risk first.

The search starts nothing itself. It is a generator: it yields combinations whose outcome it wants to know
(all of one round may be predicted in parallel), receives the outcomes, and returns the plans it found.
"""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass

from oomscope.core.fixes.model import Fix, How, Risk
from oomscope.core.fixes.prediction import EFFECTIVE_SHARE, Outcome

Combination = tuple[str, ...]

#: Fixes that lower what a step holds at rest. Nothing else helps when that alone exceeds the card.
STATIC_FIXES = frozenset(
    {"fsdp2", "zero1", "optim-8bit", "optim-in-bwd", "offload-optimizer", "deepspeed-zero"}
)

#: Risk classes that a recommendation may contain.
_RECOMMENDED = (Risk.NONE, Risk.EXACT, Risk.ROUNDING)


#: Fixes that make a step slower than this are tried only when the others are not enough.
_SLOW = 1.5


@dataclass(frozen=True, slots=True)
class Found:
    """The result of a search: plans in the order of preference, the recommended one first when there is one."""

    plans: tuple[Outcome, ...]
    recommended: Outcome | None


def order(fix: Fix) -> tuple[int, float, int]:
    """Cheapest first: what may change in the results, then time, then effort."""
    return fix.risk.rank, round(fix.time_factor, 2), fix.effort_s


def cost(ids: Iterable[str], fixes: Mapping[str, Fix]) -> tuple[int, int, float, int]:
    """How a plan compares to another that fits as well."""
    chosen = [fixes[each] for each in ids]
    worst = max((fix.risk.rank for fix in chosen), default=0)
    factor = 1.0
    for fix in chosen:
        factor *= fix.time_factor
    return worst, len(chosen), round(factor, 3), sum(fix.effort_s for fix in chosen)


def compatible(ids: Sequence[str], fixes: Mapping[str, Fix]) -> str | None:
    """The first conflict inside a combination as a sentence, or None."""
    for index, first in enumerate(ids):
        for second in ids[index + 1 :]:
            if second in fixes[first].conflicts or first in fixes[second].conflicts:
                return f"{first} and {second} exclude each other"
    return None


def time_factor(ids: Iterable[str], fixes: Mapping[str, Fix]) -> float:
    """Step time of a combination over step time without it."""
    factor = 1.0
    for each in ids:
        factor *= fixes[each].time_factor
    return round(factor, 2)


def search(
    candidates: Sequence[Fix], baseline: Outcome, *, below_floor: bool = False, max_rounds: int = 6
) -> Generator[list[Combination], Mapping[Combination, Outcome], Found]:
    """Find plans that fit.

    Args:
        candidates: applicable fixes.
        baseline: the job as it is.
        below_floor: parameters, gradients and optimizer state alone exceed the card.
        max_rounds: combinations tried one after the other.

    Yields:
        Combinations to predict; first the allocator's settings, then the single fixes that cost little.
    """
    fixes = {fix.id: fix for fix in candidates}
    ranked = sorted(candidates, key=order)
    known: dict[Combination, Outcome] = {}
    # A patch that removes the cause itself comes before everything that only makes room for it.
    cures = [fix for fix in ranked if fix.how == (How.SOURCE,) and fix.risk.rank <= Risk.EXACT.rank]
    if cures:
        known.update((yield [(fix.id,) for fix in cures]))
        if baseline.fits is False and any(_is_enough(outcome) for outcome in known.values()):
            return cheapest(known, fixes)
        ranked = [fix for fix in ranked if fix not in cures]
    free = [fix for fix in ranked if not fix.runs]
    if free:
        known.update((yield [(fix.id,) for fix in free]))
    if baseline.fits is False and any(
        _is_enough(known.get((fix.id,))) for fix in free if fix.risk is Risk.NONE
    ):
        # A setting of the allocator is enough: nothing that changes the program needs to be tried.
        return cheapest(known, fixes)
    cheap = [fix for fix in ranked if fix.runs and _is_cheap(fix)]
    known.update((yield [(fix.id,) for fix in cheap]))
    dear = sorted(
        (fix for fix in ranked if fix.runs and not _is_cheap(fix)), key=lambda fix: fix.id not in STATIC_FIXES
    )
    if dear and not any(_is_enough(outcome) for outcome in known.values()):
        # Slow fixes and those that change the training are looked at only when nothing else is enough.
        known.update((yield [(fix.id,) for fix in dear]))
    effective = [fix for fix in sorted(candidates, key=order) if _helps(known.get((fix.id,)), baseline)]
    if below_floor and not any(fix.id in STATIC_FIXES for fix in effective):
        return Found((), None)
    safe = [fix for fix in effective if fix.risk in _RECOMMENDED]
    if not any(_is_enough(known.get((fix.id,))) for fix in safe):
        for queue in (safe, effective):
            yield from _accumulate(queue, fixes, known, max_rounds)
            if any(_is_enough(outcome) for outcome in known.values()):
                break
    found = cheapest({ids: plan for ids, plan in known.items() if _helps(plan, baseline)}, fixes)
    return Found(_with_best(found.plans, known), found.recommended)


def _accumulate(
    queue: Sequence[Fix], fixes: Mapping[str, Fix], known: dict[Combination, Outcome], rounds: int
) -> Generator[list[Combination], Mapping[Combination, Outcome], None]:
    """Add one fix after the other to a plan, keeping those that lower the peak, until it fits."""
    plan: Combination = ()
    peak: int | None = None
    tried = 0
    for fix in queue:
        trial = (*plan, fix.id)
        if compatible(trial, fixes):
            continue
        if trial not in known:
            if tried >= rounds:
                break
            tried += 1
            known.update((yield [trial]))
        outcome = known.get(trial)
        if outcome is None or not outcome.known:
            continue
        after = outcome.peak_reserved_bytes or 0
        if peak is not None and after > (1 - EFFECTIVE_SHARE) * peak:
            continue
        plan, peak = trial, after
        if _is_enough(outcome):
            break


def cheapest(known: Mapping[Combination, Outcome], fixes: Mapping[str, Fix]) -> Found:
    """The plans that fit among `known`; the cheapest of those that may be recommended is."""
    fitting = sorted(
        (plan for plan in known.values() if _fits(plan)), key=lambda plan: cost(plan.fixes, fixes)
    )
    allowed = [plan for plan in fitting if all(fixes[each].risk in _RECOMMENDED for each in plan.fixes)]
    return Found(tuple(fitting), min(allowed, key=lambda plan: plan.tight, default=None))


def _is_cheap(fix: Fix) -> bool:
    return fix.risk in _RECOMMENDED and fix.time_factor <= _SLOW


def _with_best(fitting: tuple[Outcome, ...], known: Mapping[Combination, Outcome]) -> tuple[Outcome, ...]:
    """The plans that fit; when none does, the one with the lowest peak: the best is named all the same."""
    if fitting:
        return fitting
    reached = [outcome for outcome in known.values() if outcome.known]
    return tuple(sorted(reached, key=lambda outcome: outcome.peak_reserved_bytes or 0)[:1])


def _helps(outcome: Outcome | None, baseline: Outcome) -> bool:
    if outcome is None or not outcome.known:
        return False
    before = baseline.peak_reserved_bytes
    after = outcome.peak_reserved_bytes or 0
    if before is None or before - after >= EFFECTIVE_SHARE * before:
        return True
    return bool(outcome.fits) and baseline.fits is False


def _fits(outcome: Outcome | None) -> bool:
    return outcome is not None and outcome.known and bool(outcome.fits)


def _is_enough(outcome: Outcome | None) -> bool:
    """Whether the search may stop: it fits, and still does at the upper end of the interval."""
    return outcome is not None and _fits(outcome) and not outcome.tight
