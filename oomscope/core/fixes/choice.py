"""Which predicted plan may be taken without asking, and what to say when there is none."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from oomscope.core.fixes.model import Risk


@dataclass(frozen=True, slots=True)
class Choice:
    """Ids of fixes to apply together; when empty, `why_none` says why."""

    fixes: tuple[str, ...] = ()
    why_none: str = ""


def choose(
    predictions: Mapping[str, Any],
    allowed: Risk,
    active: Collection[str] = (),
    failed: Collection[frozenset[str]] = (),
) -> Choice:
    """The recommended plan, or else the cheapest that fits and is of the risk `allowed` at most.

    Args:
        predictions: an object `oomscope.fixes/1`.
        allowed: the highest risk class that needs no question.
        active: the fixes of the attempt that failed.
        failed: plans that were tried and failed their proof.
    """
    risks = {fix["id"]: Risk(fix["risk"]) for fix in predictions["fixes"]}
    plans = [plan for plan in _that_fit(predictions) if frozenset(plan) not in failed]
    if not plans:
        return Choice(why_none="no fix is predicted to make the job fit")
    permitted = [plan for plan in plans if all(risks[each].rank <= allowed.rank for each in plan)]
    if not permitted:
        risky = [each for each in plans[0] if risks[each].rank > allowed.rank]
        risk = max((risks[each] for each in risky), key=lambda each: each.rank).value
        return Choice(
            why_none=f"{', '.join(risky)} would help, but the risk is {risk}: allow it with --risk {risk}"
        )
    if set(permitted[0]) <= set(active):
        return Choice(
            why_none="the recommended fixes are active already: the prediction was wrong, nothing is repeated"
        )
    return Choice(permitted[0])


def _that_fit(predictions: Mapping[str, Any]) -> list[tuple[str, ...]]:
    """Plans in the order in which they are preferred, those that are tight last."""
    recommended = tuple(predictions.get("recommended") or ())
    fitting = sorted(
        (plan for plan in predictions.get("plans") or () if plan.get("fits")),
        key=lambda plan: bool((plan.get("predicted") or {}).get("tight")),
    )
    others = [tuple(plan["fixes"]) for plan in fitting]
    first = [recommended] if recommended else []
    return first + [plan for plan in others if plan != recommended]
