"""The result: verdicts, the walked flowchart, and the JSON that other tools read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.diagnosis.evidence import Evidence, Fact, Missing, Where

SCHEMA = "oomscope.diagnosis/1"
CONFIDENT = 0.75
"""From here on a verdict is stated without reserve."""
LIKELY = 0.5
"""From here on a cause is named; below it is only listed as possible."""


@dataclass(frozen=True)
class Finding:
    """A rule's answer "yes, this": how sure, why, and what would help."""

    confidence: float
    explanation: str
    evidence: tuple[Fact, ...] = ()
    missing: tuple[Missing, ...] = ()
    fixes: tuple[str, ...] | None = None
    """Overrides the rule's fixes where the case decides them."""
    where: Where | None = None


@dataclass(frozen=True)
class Excluded:
    """A rule's answer "no", with the fact that speaks against it."""

    evidence: tuple[Fact, ...] = ()


@dataclass(frozen=True)
class Undecided:
    """A rule's answer "cannot say": what it would need."""

    missing: tuple[Missing, ...] = ()


Answer = Finding | Excluded | Undecided


@dataclass(frozen=True)
class Rule:
    """One cause: how to recognise it and what helps. `test` must not raise on any evidence."""

    id: str
    """`oom.` or `host.` and the class; the page of docs has the same name."""
    cause: str
    title: str
    node: str
    """The question of the flowchart under which it stands."""
    needs: str
    """The evidence it works on, in words."""
    test: Callable[[Evidence], Answer]
    fixes: tuple[str, ...] = ()
    """Ids of the fix catalogue, best first."""
    is_problem: bool = True
    """False for what only looks like a problem ("not a leak")."""


@dataclass(frozen=True)
class Verdict:
    """A rule and its finding."""

    rule: Rule
    finding: Finding
    fixes: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        return {
            "rule": self.rule.id,
            "cause": self.rule.cause,
            "title": self.rule.title,
            "confidence": round(self.finding.confidence, 3),
            "explanation": self.finding.explanation,
            "evidence": [fact.to_json() for fact in self.finding.evidence],
            "missing": [gap.to_json() for gap in self.finding.missing],
            "fixes": list(self.fixes),
            "where": self.finding.where.to_json() if self.finding.where else None,
        }


@dataclass(frozen=True)
class FlowNode:
    """One question of the flowchart with its answer."""

    node: str
    parent: str | None
    question: str
    answer: str
    """"yes", "no" or "unknown"."""
    on_path: bool = False
    verdict: str | None = None
    evidence: tuple[Fact, ...] = ()
    missing: tuple[Missing, ...] = ()
    guide: str | None = None
    given: bool = False
    """The answer is the user's."""

    def to_json(self) -> dict[str, Any]:
        return {
            "node": self.node,
            "parent": self.parent,
            "question": self.question,
            "answer": self.answer,
            "on_path": self.on_path,
            "verdict": self.verdict,
            "evidence": [fact.to_json() for fact in self.evidence],
            "missing": [gap.to_json() for gap in self.missing],
            "guide": self.guide,
            "given": self.given,
        }


@dataclass(frozen=True)
class Diagnosis:
    """Verdicts best first (none for a healthy run), and the flowchart as it was walked."""

    evidence: Evidence
    verdicts: tuple[Verdict, ...]
    flow: tuple[FlowNode, ...]
    advice: tuple[str, ...] = field(default=())
    """Sentences that hold whatever the cause: a hint of torch's own text that cannot help here, for instance.
    """
    answers: tuple[tuple[str, str], ...] = ()
    """The user's answers that this rests on: (question, "yes" or "no")."""

    @property
    def verdict(self) -> Verdict | None:
        return self.verdicts[0] if self.verdicts else None

    def to_json(self) -> dict[str, Any]:
        """The public object, schema `oomscope.diagnosis/1`."""
        known = self.evidence
        oom = known.oom
        subject = {
            "attempt": known.attempt,
            "rank": known.rank.rank if known.rank else known.first_rank,
            "step": known.step,
            "phase": known.phase,
            "requested_bytes": known.requested,
            "device_free_bytes": known.free,
            "capacity_bytes": known.capacity,
            "allocated_bytes": known.allocated,
            "reserved_bytes": oom.reserved_bytes if oom else (known.message and known.message.reserved_bytes),
            "script": known.script,
            "line": known.message.line if known.message is not None else None,
            "simulated": bool(oom and oom.simulated),
        }
        return {
            "schema": SCHEMA,
            "failed": known.failed,
            "recovered": known.recovered.to_json() if known.recovered else None,
            "subject": subject,
            "sources": list(known.sources),
            "messages": [message.to_json() for message in known.messages],
            "first_rank": known.first_rank,
            "first_rank_reason": known.first_rank_reason or None,
            "verdicts": [verdict.to_json() for verdict in self.verdicts],
            "flow": [node.to_json() for node in self.flow],
            "advice": list(self.advice),
            "answers": dict(self.answers),
            "notes": list(known.notes),
        }
