"""Rules that other packages bring: entry points of the group `oomscope.rules`, each a `Rule` or several of them.

A rule of a plugin that fails counts as one that cannot say; it takes nothing else down.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from oomscope.core.diagnosis.evidence import Evidence, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.plugins import load

GROUP = "oomscope.rules"


def plugin_rules() -> tuple[Rule, ...]:
    """All usable rules of installed plugins."""
    found: list[Rule] = []
    for plugin in load(GROUP):
        value = plugin.value
        candidates = value if isinstance(value, Iterable) else (value,)
        found += [replace(each, test=guarded(each)) for each in candidates if isinstance(each, Rule)]
    return tuple(found)


def guarded(rule: Rule) -> Callable[[Evidence], Answer]:
    """`rule.test`, with a fault of its own, or an answer of another type, turned into "cannot say"."""

    def test(evidence: Evidence) -> Answer:
        try:
            answer: object = rule.test(evidence)
        except Exception as failure:  # noqa: BLE001  # the plugin boundary: their fault must stay theirs
            why = f"the rule {rule.id} of a plugin failed: {type(failure).__name__}: {failure}"
            return Undecided((Missing(why, "report it to the plugin's authors"),))
        if isinstance(answer, (Finding, Excluded, Undecided)):
            return answer
        return Undecided((Missing(f"the rule {rule.id} of a plugin gave no answer", "report it"),))

    return test
