"""The rules, one group of related causes per module.

Each rule is one `Rule` with a test and a page of docs.
"""

from __future__ import annotations

from oomscope.core.diagnosis.model import Rule
from oomscope.core.diagnosis.rules import (
    capacity,
    growth,
    host,
    ineffective,
    lasting,
    outside,
    packing,
    phases,
    ranks,
    transient,
)

#: Of two findings with the same confidence the earlier rule stands first: gate, phases, peaks, packing,
#: capacity, growth, host.
BUILT_IN: tuple[Rule, ...] = (
    *outside.RULES,
    *transient.RULES,
    *phases.RULES,
    *ranks.RULES,
    *packing.RULES,
    *capacity.RULES,
    *growth.RULES,
    *lasting.RULES,
    *ineffective.RULES,
    *host.RULES,
)


def by_id(rule_id: str) -> Rule | None:
    """The built-in rule of that id or cause."""
    return next((rule for rule in BUILT_IN if rule_id in (rule.id, rule.cause)), None)
