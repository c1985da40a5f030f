"""The flowchart: Gate 0, the three questions of the guide, ranks, host, and what came of earlier fixes.

A node that stands for causes takes its answer from their rules; the questions on top answer themselves from
the evidence.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TypeVar

from oomscope.core.diagnosis import guide
from oomscope.core.diagnosis.arithmetic import MEANING
from oomscope.core.diagnosis.evidence import KILLED_CODES, Evidence, Fact, Missing
from oomscope.core.diagnosis.model import (
    LIKELY,
    Answer,
    Excluded,
    Finding,
    FlowNode,
    Rule,
    Undecided,
    Verdict,
)
from oomscope.core.diagnosis.rules import tools

Reply = tuple[str, tuple[Fact, ...], tuple[Missing, ...]]
PHASE_BOUNDARIES = ("eval", "save", "resume")


@dataclass(frozen=True)
class Question:
    """One node: its question, and how it answers when no rule does."""

    node: str
    parent: str | None
    text: str
    guide: str | None = None
    ask: Callable[[Evidence], Reply] | None = None


def _first_iteration(e: Evidence) -> Reply:
    if e.oom is not None and e.oom.step is not None:
        step = e.oom.step
        text = f"it failed in step {step}" + (f", phase {e.phase}" if e.phase else "")
        return ("yes" if step == 0 else "no"), (Fact(text, "steps", step),), ()
    said = e.signal("says:first", "says:first_step")
    if said is not None or e.phase in ("load", "init", "resume"):
        return "yes", (tools.heard(said),) if said else (Fact(f"phase {e.phase}", "phase"),), ()
    late = e.signal("says:late", "says:growing", "says:not_first") or (
        e.signal("phase:save", "phase:eval") if e.phase in ("save", "eval") else None
    )
    if late is not None:
        return "no", (tools.heard(late),), ()
    return "unknown", (), (Missing("the step in which it failed", tools.RUN),)


def _random_iteration(e: Evidence) -> Reply:
    if not e.failed:
        return "no", (), ()
    if e.oom is not None and e.oom.step == 0:
        return "no", (Fact("it failed in the first step", "steps", 0),), ()
    if e.trend is not None and e.trend.is_leak:
        return "no", tools.facts(tools.trend_fact(e)), ()
    varied = _varied_inputs(e)
    if varied is not None:
        return "yes", (varied,), ()
    said = e.signal("says:random", "says:varied_inputs")
    if said is not None:
        return "yes", (tools.heard(said),), ()
    return (
        "unknown",
        (),
        (Missing("whether a second run fails in the same step", "run it again with oomscope run"),),
    )


def _varied_inputs(e: Evidence) -> Fact | None:
    sizes = [row.input_numel for row in e.rank.steps if row.input_numel] if e.rank else []
    if len(sizes) >= 4 and max(sizes) >= 1.15 * min(sizes):
        text = f"inputs differ from step to step: {min(sizes):,} to {max(sizes):,} elements"
        return Fact(text, "steps", max(sizes))
    return None


def _same_iteration(e: Evidence) -> Reply:
    trend, host = e.trend, tools.host_growth(e)
    if host is not None and (trend is None or not trend.is_leak):
        return "yes", (host,), ()
    if trend is not None and trend.kind != "unclear":
        answer = "yes" if trend.is_leak else "no"
        return answer, tools.facts(tools.trend_fact(e)), ()
    if e.phase in PHASE_BOUNDARIES:
        return "yes", (Fact(f"phase {e.phase}: a boundary comes at the same step each time", "phase"),), ()
    said = e.signal("says:growing")
    if said is not None:
        return "yes", (tools.heard(said),), ()
    if e.oom is not None and e.oom.step == 0:
        return "no", (), ()
    return "unknown", (), (tools.SERIES,)


def _gate(e: Evidence) -> Reply:
    """Yes when nothing speaks for memory outside torch's allocator."""
    if not e.failed:
        return "unknown", (), ()
    if tools.is_host_only(e):
        return "no", (e.host_kill or Fact("host memory ran out", "message"),), ()
    if tools.is_library(e):
        return "no", (Fact("a library beside torch found no memory", "message"),), ()
    for tag in ("absurd_size", "impossible_request", "free_but_refused", "foreign_memory"):
        if e.tag(tag):
            return "no", (Fact(MEANING[tag], "message"),), ()
    used = e.oom.usable_bytes if e.oom is not None else None
    if used is not None and e.capacity:
        text = f"torch could use {tools.size(used)} of {tools.size(e.capacity)}"
        return "yes", (Fact(text, "allocator", used),), ()
    if e.arithmetic is not None and e.arithmetic.tags:
        return "yes", (Fact("the numbers of the message leave nothing unexplained", "message"),), ()
    return "unknown", (), (tools.NUMBERS,)


def _ranks(e: Evidence) -> Reply:
    peaks = [r.peak_reserved_bytes for r in e.ranks if r.peak_reserved_bytes is not None]
    if len(peaks) < 2:
        return "unknown", (), ()
    text = f"peaks of {len(peaks)} ranks: {tools.size(min(peaks))} to {tools.size(max(peaks))}"
    return ("yes" if max(peaks) > 1.1 * min(peaks) else "no"), (Fact(text, "ranks", max(peaks)),), ()


def _host(e: Evidence) -> Reply:
    if e.host_kill is not None:
        return "yes", (e.host_kill,), ()
    if tools.is_host_only(e) and e.message is not None:
        return "yes", (Fact(e.message.text, "message"),), ()
    killed = [code for _, code in e.host.exit_codes if code in (*KILLED_CODES, -7)] if e.host else []
    if killed:
        return "yes", (Fact(f"a process ended with {killed[0]}", "exit code", killed[0]),), ()
    if e.oom is not None:
        return "no", (Fact("the device's allocator reported it", "allocator"),), ()
    grows = tools.host_growth(e)
    if grows is not None:
        return "yes", (grows,), ()
    said = e.signal("says:host")
    if said is not None:
        return "yes", (tools.heard(said),), ()
    return ("no", (), ()) if e.failed else ("unknown", (), ())


def _verified(e: Evidence) -> Reply:
    if not e.outcomes:
        return "unknown", (), ()
    facts = tuple(
        Fact(
            f"{o.fix}: predicted {tools.size(o.predicted_saving)}, reached {tools.size(o.measured_saving)}",
            "rerun",
            o.measured_saving,
        )
        for o in e.outcomes
    )
    good = all((o.measured_saving or 0) >= 0.5 * (o.predicted_saving or 0) for o in e.outcomes)
    return ("yes" if good else "no"), facts, ()


QUESTIONS: tuple[Question, ...] = (
    Question("G0", None, "Is it this process's own GPU memory?", guide.GATE, _gate),
    Question("G0.2", "G0", "Is it a shortage in disguise, of a library beside torch?"),
    Question("G0.3", "G0", "Is the request itself impossible?"),
    Question("G0.4", "G0", "Was memory free and still refused?"),
    Question("G0.5", "G0", "Does another process hold the card?"),
    Question("G0.6", "G0", "Do streams or pools withhold free memory?", guide.CACHE),
    Question("G0.7", "G0", "Was an earlier failure caught and its memory kept?"),
    Question("Q1", None, "First iteration?", guide.FIRST, _first_iteration),
    Question("Q1.1", "Q1", "Is a checkpoint loaded twice, or onto the wrong card?"),
    Question("Q1.2", "Q1", "Is the whole model on the card before it is sharded?"),
    Question("Q1.3", "Q1", "Is it one giant tensor or workspace?"),
    Question("Q1.4", "Q1", "Do activations exceed the card?", guide.ACTIVATIONS),
    Question("Q1.5", "Q1", "Does optimizer state appear now?"),
    Question("Q1.6", "Q1", "Is it a temporary of the optimizer step?"),
    Question("Q1.8", "Q1", "Do model and optimizer alone not fit?"),
    Question("Q1.9", "Q1", "Does sharding or DDP keep more than it should?", guide.SHARD),
    Question("Q2", None, "Random iteration?", guide.RANDOM, _random_iteration),
    Question("Q2.1", "Q2", "Does the peak follow the batch?"),
    Question("Q2.2", "Q2", "Does free memory lie in unusable pieces?", guide.ENVIRONMENT),
    Question("Q2.3", "Q2", "Does Python's collector free it late?"),
    Question("Q3", None, "Same iteration, or growing?", guide.SAME, _same_iteration),
    Question("Q3.1", "Q3", "Is it evaluation?"),
    Question("Q3.1b", "Q3", "Is it saving a checkpoint?", guide.SAVE),
    Question("Q3.2", "Q3", "Does memory grow with every step?"),
    Question("Q3.3", "Q3", "Does the framework itself keep memory?"),
    Question("Q3.4", "Q3", "Did it rise and then stay?"),
    Question("P", None, "Do the ranks differ?", None, _ranks),
    Question("P.1", "P", "Does one card carry the others' contexts or outputs?", guide.FIRST_DEVICE),
    Question("H", None, "Is it host memory?", guide.HOST, _host),
    Question("H.1", "H", "Does every rank load its own copy?"),
    Question("H.2", "H", "Do loader workers copy the data set?"),
    Question("H.3", "H", "Is /dev/shm full?"),
    Question("H.4", "H", "Is a limit of the cgroup or the scheduler hit?"),
    Question("H.5", "H", "Is it offloaded state?"),
    Question("V", None, "Did the applied fixes do what was predicted?", guide.VERIFY, _verified),
)


PARENTS: dict[str, str | None] = {question.node: question.parent for question in QUESTIONS}
TEXTS: dict[str, str] = {question.node: question.text for question in QUESTIONS}


def walk(
    e: Evidence, answers: Mapping[Rule, Answer], best: Verdict | None, given: Mapping[str, str] | None = None
) -> tuple[FlowNode, ...]:
    """All nodes with their answers; those that lead to `best`, and those that the user answered, are on the path."""
    nodes = [_node(e, question, answers) for question in QUESTIONS]
    given = given or {}
    nodes = [replace(n, answer=given[n.node], given=True) if n.node in given else n for n in nodes]
    chosen = best.rule.node if best is not None else None
    path = {node for node in (chosen, PARENTS.get(chosen or "")) if node}
    spine = ("G0", "Q1", "Q2", "Q3")
    last = spine.index(PARENTS.get(chosen or "") or chosen or "") if path & set(spine) else None
    if last is not None:
        path |= set(spine[: last + 1])
    elif chosen is not None:
        path.add("G0")
    path |= set(given)
    return tuple(replace(node, on_path=node.node in path) for node in nodes)


def _node(e: Evidence, question: Question, answers: Mapping[Rule, Answer]) -> FlowNode:
    mine = {rule: answer for rule, answer in answers.items() if rule.node == question.node}
    found = max(
        ((rule, answer) for rule, answer in mine.items() if isinstance(answer, Finding)),
        key=lambda pair: pair[1].confidence,
        default=None,
    )
    base = FlowNode(question.node, question.parent, question.text, "unknown", guide=question.guide)
    if question.ask is not None:
        answer, evidence, missing = question.ask(e)
        return replace(base, answer=answer, evidence=evidence, missing=missing)
    if found is not None and found[1].confidence >= LIKELY:
        rule, finding = found
        return replace(
            base, answer="yes", verdict=rule.id, evidence=finding.evidence, missing=finding.missing
        )
    excluded = [answer for answer in mine.values() if isinstance(answer, Excluded)]
    undecided = [answer for answer in mine.values() if isinstance(answer, Undecided)]
    if found is not None:
        return replace(base, evidence=found[1].evidence, missing=found[1].missing)
    if excluded and not undecided:
        return replace(base, answer="no", evidence=_unique(fact for a in excluded for fact in a.evidence))
    return replace(base, missing=_unique(gap for a in undecided for gap in a.missing))


T = TypeVar("T")


def _unique(items: Iterable[T]) -> tuple[T, ...]:
    """`items` without repetition, in order."""
    return tuple(dict.fromkeys(items))
