"""The catalogue of fixes: does it apply, what would it do, how to read its prediction."""

from __future__ import annotations

from oomscope.core.fixes.catalogue import (
    allocator,
    attention,
    batch,
    gradients,
    leaks,
    loss,
    optimizer,
    precision,
    recompute,
    sharding,
)
from oomscope.core.fixes.model import Applicable, Band, Fix, How, JobFacts, Plan, Risk
from oomscope.errors import FixError

#: Built-in fixes in the order in which they are tried when nothing else decides.
CATALOGUE: tuple[Fix, ...] = (
    *leaks.FIXES,
    *allocator.FIXES,
    *gradients.FIXES,
    *optimizer.FIXES,
    *loss.FIXES,
    *attention.FIXES,
    *recompute.FIXES,
    *batch.FIXES,
    *precision.FIXES,
    *sharding.FIXES,
)

__all__ = ["CATALOGUE", "Applicable", "Band", "Fix", "How", "JobFacts", "Plan", "Risk", "get", "known_ids"]


def known_ids() -> list[str]:
    return [fix.id for fix in CATALOGUE]


def get(fix_id: str) -> Fix:
    """The fix named `fix_id`.

    Raises:
        FixError: there is none; the nearest id is named.
    """
    for fix in CATALOGUE:
        if fix.id == fix_id:
            return fix
    from difflib import get_close_matches

    near = get_close_matches(fix_id, known_ids(), n=1)
    hint = f"did you mean {near[0]}?" if near else f"fixes: {', '.join(known_ids())}"
    raise FixError(f"no fix is called {fix_id!r}", hint=hint)
