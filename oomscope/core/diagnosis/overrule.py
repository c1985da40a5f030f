"""Walking the flowchart with answers of the user in place of those found.

An answer does two things. It is evidence of its own kind: who says that it happens while saving has told the rules
something, and they are asked again. And it opens or closes the part of the chart below its question: causes that it
excludes drop out, and when a question is affirmed only the causes below it stay. What comes of it rests on the
user's word, and says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from oomscope.core.diagnosis.evidence import Evidence, Fact, Signal
from oomscope.core.diagnosis.model import LIKELY, Answer, Finding, Rule, Undecided

SOURCE = "your answer"
_LEADS_ON_NO = frozenset({"G0", "V"})
"""Questions whose causes follow from "no": is it this process's own memory, did the fixes do what was predicted?"""
#: What an answer tells the rules besides.
_TELLS: dict[tuple[str, str], str] = {
    ("Q1", "yes"): "says:first",
    ("Q1", "no"): "says:not_first",
    ("Q1.1", "yes"): "phase:resume",
    ("Q1.2", "yes"): "phase:init",
    ("Q1.5", "yes"): "phase:optimizer",
    ("Q1.6", "yes"): "says:foreach",
    ("Q2", "yes"): "says:random",
    ("Q2.1", "yes"): "says:varied_inputs",
    ("Q3.1", "yes"): "phase:eval",
    ("Q3.1b", "yes"): "phase:save",
    ("Q3.2", "yes"): "says:growing",
    ("Q3.4", "yes"): "says:plateau",
    ("H", "yes"): "says:host",
    ("P.1", "yes"): "says:on_gpu0",
}

Answers = Mapping[str, str]


def leads_on(node: str) -> str:
    """The answer to `node` below which its causes lie."""
    return "no" if node in _LEADS_ON_NO else "yes"


def told(e: Evidence, answers: Answers, questions: Mapping[str, str]) -> Evidence:
    """`e` and what the answers say; `questions` maps a node to its text."""
    signals = tuple(
        Signal(name, f"you answered “{questions[node]}” with {answer}", SOURCE, 0.8)
        for node, answer in answers.items()
        if (name := _TELLS.get((node, answer))) is not None
    )
    return replace(e, signals=(*e.signals, *signals)) if signals else e


def allowed(rule: Rule, answers: Answers, parents: Mapping[str, str | None]) -> bool:
    """The answers leave this cause standing."""
    line = {rule.node, parents.get(rule.node)}
    entered = {node for node, answer in answers.items() if answer == leads_on(node)}
    closed = {node for node, answer in answers.items() if answer != leads_on(node)}
    return not closed & line and (not entered or bool(entered & line))


def apply(
    found: Mapping[Rule, Answer],
    answers: Answers,
    parents: Mapping[str, str | None],
    questions: Mapping[str, str],
) -> dict[Rule, Answer]:
    """The rules' answers after the user's.

    Causes that the user excludes cannot say any more; where a question of one cause alone is affirmed, that cause is
    named as likely, on the user's word.
    """
    result: dict[Rule, Answer] = {
        rule: answer if allowed(rule, answers, parents) or not isinstance(answer, Finding) else Undecided()
        for rule, answer in found.items()
    }
    for node, answer in answers.items():
        if answer != leads_on(node):
            continue
        fact = Fact(f"you answered “{questions[node]}” with {answer}", SOURCE)
        mine = [rule for rule in found if rule.node == node]
        chosen = _affirmed(mine, result)
        if chosen is None:
            continue
        rule, finding = chosen
        result[rule] = replace(
            finding, confidence=max(finding.confidence, LIKELY), evidence=(fact, *finding.evidence)
        )
    return result


def _affirmed(rules: Iterable[Rule], found: Mapping[Rule, Answer]) -> tuple[Rule, Finding] | None:
    """The cause that an affirmed question stands for: its best finding, or its only cause; None: it has several."""
    mine = list(rules)
    findings = [(rule, answer) for rule in mine if isinstance(answer := found[rule], Finding)]
    if findings:
        return max(findings, key=lambda pair: pair[1].confidence)
    if len(mine) != 1:
        return None
    answer = found[mine[0]]
    missing = answer.missing if isinstance(answer, Undecided) else ()
    against = () if isinstance(answer, Undecided | Finding) else answer.evidence
    text = f"Taken on your word: {mine[0].title}. Nothing that was recorded shows it."
    if against:
        text = f"Taken on your word: {mine[0].title}. What was recorded speaks against it."
    return mine[0], Finding(LIKELY, text, against, missing)


__all__ = ["SOURCE", "Answers", "allowed", "apply", "leads_on", "told"]
