"""The diagnosis as every part of the product makes it: with the rules of plugins, and with answers of the user."""

from __future__ import annotations

from collections.abc import Mapping

from oomscope.core.diagnosis import Diagnosis, Evidence, diagnose
from oomscope.live.plugin_rules import plugin_rules


def judge(evidence: Evidence, answers: Mapping[str, str] | None = None) -> Diagnosis:
    """The diagnosis of `evidence` by the built-in rules and those of installed plugins.

    Args:
        evidence: what is known.
        answers: question of the flowchart to "yes" or "no", in place of what was found there.

    Raises:
        ValueError: an answer to a question that does not exist, or other than "yes" and "no".
    """
    return diagnose(evidence, answers=answers, extra_rules=plugin_rules())
