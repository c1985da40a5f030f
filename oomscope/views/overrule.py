"""Walking the flowchart again after the user has answered a question otherwise.

Nothing is measured anew: causes that the user's answers exclude drop out, and what is left of the verdicts, if
anything, comes to the front. The result says that it rests on the user's answers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from oomscope.views.diagnosis import Diagnosis, Gap, Node, Verdict

#: Questions whose causes follow from "no": "is it this process's own memory?" leads on only when it is not.
_CAUSES_BELOW_NO = frozenset({"G0"})
#: What `space` walks through on a question.
CYCLE = ("yes", "no")


def next_answer(node: Node, given: str | None) -> str | None:
    """The answer after `given` (None: as found) when the user presses the key again."""
    choices = [answer for answer in CYCLE if answer != node.answer]
    if given is None:
        return choices[0]
    at = choices.index(given) if given in choices else len(choices)
    return choices[at + 1] if at + 1 < len(choices) else None


def walk_again(found: Diagnosis, answers: Mapping[str, str]) -> Diagnosis:
    """`found` with `answers` (node name to "yes" or "no") in place of its own."""
    if not answers:
        return found
    nodes = {node.name: node for node in found.flow}
    parents = _parents(found)
    entered = {n for n, a in answers.items() if a == _leads_on(n)}
    closed = {n for n, a in answers.items() if a != _leads_on(n)}
    home = {node.verdict: node.name for node in found.flow if node.verdict}

    def stands(verdict: Verdict) -> bool:
        line = _ancestry(home.get(verdict.rule, ""), parents)
        return not closed & line and (not entered or bool(entered & line))

    verdicts = tuple(verdict for verdict in found.verdicts if stands(verdict))
    if not verdicts:
        verdicts = (_nothing_left(found, answers, nodes),)
    path = _ancestry(home.get(verdicts[0].rule, next(iter(entered), "")), parents)
    spine = _spine(found, path)
    flow = tuple(
        replace(
            node,
            answer=answers.get(node.name, node.answer),
            on_path=node.name in path or node.name in spine or node.name in answers,
        )
        for node in found.flow
    )
    return replace(found, verdicts=verdicts, flow=flow)


def _leads_on(name: str) -> str:
    return "no" if name in _CAUSES_BELOW_NO else "yes"


def _parents(found: Diagnosis) -> dict[str, str]:
    """Node to the node above it, from their order and depth."""
    parents: dict[str, str] = {}
    line: list[str] = []
    for node in found.flow:
        del line[node.depth :]
        parents[node.name] = line[-1] if line else ""
        line.append(node.name)
    return parents


def _ancestry(name: str, parents: Mapping[str, str]) -> set[str]:
    """`name` and everything above it."""
    line: set[str] = set()
    while name and name not in line:
        line.add(name)
        name = parents.get(name, "")
    return line


def _spine(found: Diagnosis, path: set[str]) -> set[str]:
    """The top-level questions that are passed on the way to `path`."""
    tops = [node.name for node in found.flow if node.depth == 0]
    last = next((n for n, name in enumerate(tops) if name in path), -1)
    return set(tops[: last + 1])


def _nothing_left(found: Diagnosis, answers: Mapping[str, str], nodes: Mapping[str, Node]) -> Verdict:
    """In place of a verdict: what would have to be known."""
    asked = [nodes[name] for name in answers if name in nodes]
    gaps: list[Gap] = [gap for node in asked for gap in node.missing]
    gaps += [
        gap for node in found.flow if node.answer == "unknown" for gap in node.missing if gap not in gaps
    ]
    return Verdict(
        rule="",
        title="No cause is left",
        confidence=None,
        explanation="Nothing that was recorded supports another cause. What would have to be known stands below.",
        evidence=(),
        missing=tuple(dict.fromkeys(gaps))[:4],
        fixes=(),
        where=None,
    )
