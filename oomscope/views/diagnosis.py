"""findings.json as a verdict, a walked flowchart with its evidence, and the source line to blame."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.views import wording
from oomscope.views.coerce import clean, flag, integer, mapping, objects, real, text, texts

#: A source file larger than this is not read for its context lines.
_MAX_SOURCE_BYTES = 4 << 20
#: What stays allocated after a caught failure is worth a word from here on.
_KEPT_BYTES = 16 << 20


@dataclass(frozen=True)
class Evidence:
    """One fact and where it came from."""

    text: str
    source: str


@dataclass(frozen=True)
class Gap:
    """A fact that is not known, and the cheapest way to get it."""

    what: str
    capture: str


@dataclass(frozen=True)
class Place:
    """A line of the user's source."""

    file: str
    line: int
    function: str
    source: str


@dataclass(frozen=True)
class Verdict:
    """A cause, how sure it is, and why."""

    rule: str
    title: str
    confidence: float | None
    explanation: str
    evidence: tuple[Evidence, ...]
    missing: tuple[Gap, ...]
    fixes: tuple[str, ...]
    where: Place | None

    def headline(self) -> str:
        """Rule, title and confidence on one line."""
        sure = "" if self.confidence is None else f" (confidence {self.sureness()})"
        return f"{self.rule}: {self.title}{sure}"

    def clause(self) -> str:
        """The title as it stands inside a sentence."""
        return self.title[:1].lower() + self.title[1:] if self.title[1:2].islower() else self.title

    def sureness(self) -> str:
        """The confidence as word and number: "high 0.92"."""
        if self.confidence is None:
            return "unknown"
        return f"{wording.confidence_word(self.confidence)} {self.confidence:.2f}"


@dataclass(frozen=True)
class Node:
    """One question of the flowchart with its answer."""

    name: str
    depth: int
    question: str
    answer: str
    """"yes", "no" or "unknown"."""
    on_path: bool
    verdict: str
    evidence: tuple[Evidence, ...]
    missing: tuple[Gap, ...]
    guide: str
    given: bool = False
    """The answer is the user's."""


@dataclass(frozen=True)
class Diagnosis:
    """One attempt's findings, ready to show. Sizes in bytes."""

    attempt: int
    rank: int | None
    step: int | None
    phase: str
    requested_bytes: int | None
    device_free_bytes: int | None
    capacity_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    script: str
    verdicts: tuple[Verdict, ...]
    flow: tuple[Node, ...]
    failed: bool = True
    """Memory ran out; False for a finding about a run that it did not run out in."""
    recovered: str = ""
    """What the failure cost a job that went on after it, in one sentence; empty when it did not go on."""

    @property
    def verdict(self) -> Verdict | None:
        """The most likely cause."""
        return self.verdicts[0] if self.verdicts else None

    @property
    def is_about_oom(self) -> bool:
        """Whether there is an out-of-memory event or a cause; a healthy run has findings too, with neither."""
        return bool(self.verdicts) or self.requested_bytes is not None

    def what_happened(self) -> str:
        """The failure in one clause: rank, step, phase and the two sizes that met."""
        parts = []
        if self.rank is not None:
            parts.append(f"rank {self.rank}")
        if self.step is not None:
            parts.append(f"step {self.step}")
        if self.phase:
            parts.append(self.phase)
        if self.requested_bytes is not None:
            wanted = f"tried {wording.short_size(self.requested_bytes)}"
            if self.device_free_bytes is not None:
                wanted += f", free {wording.short_size(self.device_free_bytes)}"
            parts.append(wanted)
        return " · ".join(parts)


def read(findings: Mapping[str, Any], *, attempt: int = 1) -> Diagnosis:
    """The view of one findings.json; whatever is missing or malformed is simply not shown."""
    subject = mapping(findings, "subject")
    return Diagnosis(
        attempt=integer(subject, "attempt") or attempt,
        rank=integer(subject, "rank"),
        step=integer(subject, "step"),
        phase=text(subject, "phase"),
        requested_bytes=integer(subject, "requested_bytes"),
        device_free_bytes=integer(subject, "device_free_bytes"),
        capacity_bytes=integer(subject, "capacity_bytes"),
        allocated_bytes=integer(subject, "allocated_bytes"),
        reserved_bytes=integer(subject, "reserved_bytes"),
        script=text(subject, "script"),
        verdicts=tuple(_verdict(item) for item in objects(findings, "verdicts")),
        flow=_flow(objects(findings, "flow")),
        failed=flag(findings, "failed") is not False,
        recovered=recovery_text(mapping(findings, "recovered")),
    )


def recovery_text(value: Mapping[str, Any]) -> str:
    """`recovered` of findings.json in one sentence; "" when there is none."""
    events = integer(value, "events")
    if events is None:
        return ""
    errors = wording.plural(events, "out-of-memory error was", "out-of-memory errors were")
    parts = [f"{errors} caught"]
    after, cost = integer(value, "steps_after"), integer(value, "cost_ns")
    parts.append(f"training went on for {wording.plural(after, 'step')}" if after else "the run ended well")
    if cost is not None:
        parts.append(
            f"the affected {'step' if events == 1 else 'steps'} took {cost / 1e9:.1f} s longer than usual"
        )
    if not integer(value, "retried_steps") and after == 0:
        parts.append("the step that failed was not made up for")
    kept = integer(value, "kept_bytes")
    if kept is not None and kept > _KEPT_BYTES:
        parts.append(f"{wording.size(kept)} stayed allocated since")
    return "; ".join(parts)


def _verdict(item: Mapping[str, Any]) -> Verdict:
    where = mapping(item, "where")
    line = integer(where, "line")
    place = None
    if where and line is not None:
        place = Place(text(where, "file"), line, text(where, "function"), clean(where.get("source") or ""))
    return Verdict(
        rule=text(item, "rule", "unknown"),
        title=_capitalised(text(item, "title") or text(item, "cause")),
        confidence=real(item, "confidence"),
        explanation=" ".join(clean(item.get("explanation") or "").split()),
        evidence=_evidence(item),
        missing=_missing(item),
        fixes=texts(item, "fixes"),
        where=place,
    )


def _capitalised(words: str) -> str:
    return words[:1].upper() + words[1:]


def _evidence(item: Mapping[str, Any]) -> tuple[Evidence, ...]:
    return tuple(Evidence(text(each, "text"), text(each, "source")) for each in objects(item, "evidence"))


def _missing(item: Mapping[str, Any]) -> tuple[Gap, ...]:
    return tuple(Gap(text(each, "what"), text(each, "capture")) for each in objects(item, "missing"))


def _flow(items: Sequence[Mapping[str, Any]]) -> tuple[Node, ...]:
    depths: dict[str, int] = {}
    nodes = []
    for item in items:
        name = text(item, "node")
        parent = text(item, "parent")
        depths[name] = depths.get(parent, -1) + 1
        answer = text(item, "answer", "unknown")
        nodes.append(
            Node(
                name=name,
                depth=min(depths[name], 4),
                question=text(item, "question"),
                answer=answer if answer in ("yes", "no") else "unknown",
                on_path=bool(flag(item, "on_path")),
                verdict=text(item, "verdict"),
                evidence=_evidence(item),
                missing=_missing(item),
                guide=" ".join(clean(item.get("guide") or "").split()),
                given=bool(flag(item, "given")),
            )
        )
    return tuple(nodes)


@dataclass(frozen=True)
class SourceLine:
    """One line of context around the place that is to blame."""

    number: int
    text: str
    is_blamed: bool


def source_lines(place: Place, *, context: int = 2) -> tuple[SourceLine, ...]:
    """The blamed line with `context` lines on each side.

    The file is the one on this machine; when it is gone, or its line no longer is the recorded one, only the
    recorded line is given: showing other code under that number would mislead.
    """
    recorded = (SourceLine(place.line, place.source, True),) if place.source else ()
    try:
        path = Path(place.file)
        if not path.is_file() or path.stat().st_size > _MAX_SOURCE_BYTES:
            return recorded
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except (OSError, ValueError):
        return recorded
    if not 1 <= place.line <= len(lines):
        return recorded
    if place.source and lines[place.line - 1].strip() != place.source.strip():
        return recorded
    first, last = max(1, place.line - context), min(len(lines), place.line + context)
    return tuple(
        SourceLine(n, clean(lines[n - 1], limit=400), n == place.line) for n in range(first, last + 1)
    )


def sentences(diagnosis: Diagnosis) -> list[str]:
    """The verdict and its evidence as plain lines, for `y` and for output without a terminal."""
    what = "recovered from out of memory" if diagnosis.recovered else "out of memory"
    if not diagnosis.failed:
        what = "did not run out of memory"
    lines = [f"{what}: {diagnosis.what_happened()}", *filter(None, [diagnosis.recovered])]
    verdict = diagnosis.verdict
    if verdict is None:
        return [*lines, "no cause found"]
    lines += ["", verdict.headline()]
    if verdict.explanation:
        lines.append(verdict.explanation)
    lines += [f"  - {e.text}" + (f"  [{e.source}]" if e.source else "") for e in verdict.evidence]
    if verdict.where is not None:
        lines.append(f"  at {verdict.where.file}:{verdict.where.line}  {verdict.where.source.strip()}")
    lines += [f"  ? unknown: {gap.what}; {gap.capture}" for gap in verdict.missing]
    answers = [node for node in diagnosis.flow if node.on_path]
    if answers:
        lines.append("")
        lines += [
            f"{'  ' * node.depth}{node.question} {node.answer}{' (your answer)' * node.given}"
            for node in answers
        ]
    return lines
