"""Ask every rule, rank the answers, choose the fixes that can help here, and walk the flowchart."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from oomscope.core.diagnosis import overrule
from oomscope.core.diagnosis.advice import choose_fixes, sentences
from oomscope.core.diagnosis.arithmetic import MEANING
from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing
from oomscope.core.diagnosis.flow import PARENTS, TEXTS, walk
from oomscope.core.diagnosis.model import LIKELY, Answer, Diagnosis, Finding, Rule, Undecided, Verdict
from oomscope.core.diagnosis.rules import BUILT_IN
from oomscope.core.diagnosis.rules.tools import (
    HOLDER,
    HOST,
    NATIVE,
    NUMBERS,
    RUN,
    facts,
    group_fact,
    host_growth,
    is_host_only,
    shortfall_fact,
    trend_fact,
)

LISTED = 0.3
"""Findings below are not worth a line."""

WORDS_ONLY = 0.72
"""A description in words, without any message, record or source, never makes a cause certain."""

UNKNOWN = Rule(
    "oom.unknown", "unknown", "the evidence does not decide", "Q1", "more evidence", lambda _: Undecided()
)  # fmt: skip


def diagnose(
    evidence: Evidence, *, answers: Mapping[str, str] | None = None, extra_rules: Iterable[Rule] = ()
) -> Diagnosis:
    """The diagnosis of `evidence`: verdicts best first, none when nothing failed and nothing is wrong.

    With `answers` (question to "yes" or "no") the flowchart is walked with them in place of what was found there.

    A failure that no rule explains with at least `LIKELY` gives the verdict `oom.unknown` in front, with what
    is missing.

    Raises:
        ValueError: an answer to a question that does not exist, or other than "yes" and "no".
    """
    given = _checked(answers or {})
    evidence = overrule.told(evidence, given, TEXTS)
    rules = (*BUILT_IN, *extra_rules)
    tested: dict[Rule, Answer] = {rule: rule.test(evidence) for rule in rules}
    if given:
        tested = overrule.apply(tested, given, PARENTS, TEXTS)
    found = [(rule, answer) for rule, answer in tested.items() if isinstance(answer, Finding)]
    if not _is_measured(evidence):
        found = [
            (rule, replace(finding, confidence=min(finding.confidence, WORDS_ONLY)))
            for rule, finding in found
        ]
    found.sort(key=lambda pair: -pair[1].confidence)
    verdicts = [
        Verdict(rule, finding, choose_fixes(evidence, rule, finding))
        for rule, finding in found
        if finding.confidence >= LISTED
        and (rule.is_problem or evidence.signal("says:growing", "says:plateau"))
    ]
    if not evidence.failed and not given and not _complains(evidence):
        verdicts = [v for v in verdicts if v.finding.confidence >= LIKELY]
    elif not verdicts or verdicts[0].finding.confidence < LIKELY:
        verdicts.insert(0, _unknown(evidence, tested, verdicts, bool(given)))
    best = verdicts[0] if verdicts else None
    flow = walk(evidence, tested, best, given)
    return Diagnosis(evidence, tuple(verdicts), flow, sentences(evidence, best), tuple(given.items()))


def _checked(answers: Mapping[str, str]) -> dict[str, str]:
    for node, answer in answers.items():
        if node not in TEXTS:
            listed = "; ".join(f"{name} {text}" for name, text in TEXTS.items())
            raise ValueError(f"there is no question {node}. The questions are: {listed}")
        if answer not in ("yes", "no"):
            raise ValueError(f"{node}: the answer is yes or no, not {answer}")
    return dict(answers)


def _is_measured(e: Evidence) -> bool:
    """Something beside words was seen."""
    records = (e.message, e.oom, e.exception, e.trend, e.rss_trend, e.allocator, e.host)
    return any(record is not None for record in records) or bool(e.lint or e.outcomes or e.processes)


def _complains(evidence: Evidence) -> bool:
    """Somebody describes a memory problem in words."""
    grows = (evidence.trend is not None and evidence.trend.is_leak) or host_growth(evidence) is not None
    said = (s for s in evidence.signals if s.source not in ("traceback", "source code", "snapshot"))
    return grows or any(signal.name.startswith(("says:", "phase:")) for signal in said)


def _is_cut(e: Evidence) -> bool:
    """An allocator's message that ends before its numbers do: the rest of the line is the cheapest capture of all."""
    m = e.message
    return e.oom is None and m is not None and m.tried_bytes is not None and m.allocated_bytes is None


def _unknown(evidence: Evidence, answers: dict[Rule, Answer], weak: list[Verdict], given: bool) -> Verdict:
    """The honest verdict: what is known, and the cheapest capture that would decide."""
    gaps: dict[Missing, int] = {}
    for answer in answers.values():
        if isinstance(answer, Undecided):
            for gap in answer.missing:
                gaps[gap] = gaps.get(gap, 0) + 1
    for verdict in weak:
        for gap in verdict.finding.missing:
            gaps[gap] = gaps.get(gap, 0) + 3
    ranked = sorted(gaps, key=lambda gap: -gaps[gap])[:3]
    if not ranked:
        ranked = [NUMBERS, Missing("a run that is watched", RUN)]
    known: list[Fact] = []
    if evidence.arithmetic is not None:
        known = [Fact(MEANING[tag], "message") for tag in evidence.arithmetic.tags]
    grows = host_growth(evidence) if not evidence.failed else None
    if grows is not None:
        ranked = [HOLDER, NATIVE]
    elif _is_cut(evidence):
        ranked = list(dict.fromkeys((NUMBERS, *ranked)))[:3]
    known += facts(
        evidence.host_kill,
        grows,
        shortfall_fact(evidence),
        trend_fact(evidence),
        *map(group_fact, evidence.live[:2]),
    )
    names = " or ".join(v.rule.cause for v in weak[:2])
    explanation = "What is known does not single out one cause."
    if grows is not None:
        explanation = (
            "Host memory grows from step to step. No variable of the script was seen to hold what grows."
        )
    if given:
        explanation = "With your answers nothing that was recorded singles out a cause."
    if evidence.host_kill is not None or is_host_only(evidence):
        ranked = list(dict.fromkeys((HOST, *ranked)))[:3]
        explanation = "Host memory ran out, not the device's. What filled it is not known."
    explanation += f" Possible: {names}." if names else ""
    return Verdict(UNKNOWN, Finding(0.0, explanation, tuple(known), tuple(ranked)), ())
