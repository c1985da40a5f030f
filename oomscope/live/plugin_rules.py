"""Rules that other packages bring: entry points of the group `oomscope.rules`, each a `Rule` or several of them.

A rule of a plugin that fails counts as one that cannot say; it takes nothing else down.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path

from oomscope.core.diagnosis.evidence import Evidence, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided

GROUP = "oomscope.rules"


def plugin_rules() -> tuple[Rule, ...]:
    """All usable rules of installed plugins."""
    found: list[Rule] = []
    if not is_registered():
        return ()
    from oomscope.plugins import load

    for plugin in load(GROUP):
        value = plugin.value
        candidates = value if isinstance(value, Iterable) else (value,)
        found += [replace(each, test=guarded(each)) for each in candidates if isinstance(each, Rule)]
    return tuple(found)


def is_registered(search: Iterable[str] | None = None) -> bool:
    """Whether some installed package names the group: a look at its lists costs a tenth of importing the machinery."""
    for folder in sys.path if search is None else search:
        try:
            lists = [each for each in Path(folder).glob("*-info/entry_points.txt") if each.is_file()]
            if any(GROUP.encode() in each.read_bytes() for each in lists):
                return True
        except OSError:
            continue
    return False


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
