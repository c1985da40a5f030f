"""The diagnosis as plain text for a terminal of 80 columns, and as Markdown for an issue.

Colour is never needed.

Both read the JSON object (`oomscope.diagnosis/1`), so that a stored findings.json shows the same as a fresh
one.
"""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from oomscope.units import format_bytes
from oomscope.views.diagnosis import recovery_text

WIDTH = 80
HIGH, LIKELY = 0.75, 0.5


def sureness(confidence: float) -> str:
    """A confidence in words: "high 0.92", "likely 0.57", "possible 0.35"."""
    word = "high" if confidence >= HIGH else "likely" if confidence >= LIKELY else "possible"
    return f"{word} {confidence:.2f}"


def headline(findings: Mapping[str, Any]) -> str:
    """What failed, in one line: rank, step, phase, and the sizes that met."""
    subject = findings["subject"]
    parts = []
    if subject.get("rank") is not None:
        parts.append(f"rank {subject['rank']}")
    if subject.get("step") is not None:
        parts.append(f"step {subject['step']}")
    if subject.get("phase"):
        parts.append(str(subject["phase"]))
    if subject.get("requested_bytes") is not None:
        tried = f"tried {format_bytes(subject['requested_bytes'])}"
        if subject.get("device_free_bytes") is not None:
            tried += f", {format_bytes(subject['device_free_bytes'])} free"
        parts.append(tried)
    elif (on_host := _tried_on_host(findings)) is not None:
        parts.append(f"tried {format_bytes(on_host)} of host memory")
    if subject.get("capacity_bytes") is not None and subject.get("requested_bytes") is not None:
        parts.append(f"card {format_bytes(subject['capacity_bytes'])}")
    return " · ".join(parts)


def _tried_on_host(findings: Mapping[str, Any]) -> int | None:
    """Bytes that the judged message says the CPU's allocator was asked for."""
    line = findings["subject"].get("line")
    for message in findings["messages"]:
        if message.get("line") == line and message.get("cpu_bytes") is not None:
            return int(message["cpu_bytes"])
    return None


def _wrap(text: str, indent: str = "", first: str | None = None) -> list[str]:
    return textwrap.wrap(
        text, WIDTH, initial_indent=indent if first is None else first, subsequent_indent=indent,
        break_long_words=False, break_on_hyphens=False,
    )  # fmt: skip


def _events(findings: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    return [
        m
        for m in findings["messages"]
        if m["kind"] not in ("nccl_other", "elastic_fail_other", "worker_other")
    ]


def nothing_found(tracebacks: int, lines: int) -> str:
    """The answer for a log without any such event."""
    kinds = (
        f"{tracebacks} traceback{'s' if tracebacks != 1 else ''} of other kinds"
        if tracebacks
        else "no traceback"
    )
    return f"no out-of-memory event found; {kinds} in {lines:,} line{'s' if lines != 1 else ''}"


def text(findings: Mapping[str, Any], *, guide: bool = False) -> str:
    """The diagnosis for a terminal.

    With `guide`, what the usual flowchart says at each step, and its corrections.
    """
    lines: list[str] = []
    events = _events(findings)
    title = headline(findings)
    if title:
        happened = "Out of memory" if findings.get("failed", True) else "Did not run out of memory"
        if findings.get("recovered"):
            happened = "Recovered from out of memory"
        lines += _wrap(f"{happened}: {title}", "  ", "")
    if findings.get("recovered"):
        lines += _wrap(recovery_text(findings["recovered"]), "  ")
    lines += _where_in_log(findings, events)
    lines += _answered(findings)
    verdicts = findings["verdicts"]
    if not verdicts:
        lines.append("No memory problem found.")
    for number, verdict in enumerate(verdicts):
        if number == 0 or verdict["confidence"] >= LIKELY:
            lines += ["", *_verdict(verdict)]
    weak = [v for v in verdicts[1:] if v["confidence"] < LIKELY]
    if weak:
        names = ", ".join(f"{v['rule']} {v['confidence']:.2f}" for v in weak[:4])
        lines += ["", *_wrap(f"Less likely: {names}", "  ", "")]
    for advice in findings.get("advice") or ():
        lines += ["", *_wrap(f"Note: {advice}", "  ", "")]
    lines += ["", *_flow(findings["flow"], guide)]
    for note in findings.get("notes") or ():
        lines += _wrap(f"Note: {note}", "  ", "")
    return "\n".join(lines) + "\n"


def _answered(findings: Mapping[str, Any]) -> list[str]:
    """The user's answers that this rests on."""
    answers = findings.get("answers") or {}
    texts = {node["node"]: node["question"] for node in findings["flow"]}
    if not answers:
        return []
    said = "; ".join(f"{texts.get(node, node)} {answer}" for node, answer in answers.items())
    return _wrap(f"With your answers: {said}", "  ")


def _where_in_log(findings: Mapping[str, Any], events: Sequence[Mapping[str, Any]]) -> list[str]:
    lines = []
    if len(events) > 1:
        ranks = sorted({m["rank"] for m in events if m["rank"] is not None})
        text_ = f"{len(events)} events"
        if ranks:
            text_ += f" on rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
        first = findings.get("first_rank")
        if first is not None and len(ranks) > 1:
            text_ += f"; rank {first} failed first ({findings.get('first_rank_reason')})"
        lines += _wrap(text_, "  ")
    at = findings["subject"].get("line")
    if at is not None and at > 1:
        lines.append(f"  at line {at}")
    return lines


def _verdict(verdict: Mapping[str, Any]) -> list[str]:
    sure = sureness(verdict["confidence"])
    if verdict["cause"] == "unknown":
        lines = ["Cause not decided: the evidence allows several."]
    else:
        lines = _wrap(f"{verdict['rule']}: {verdict['title']}  ({sure})", "  ", "")
    lines += _wrap(verdict["explanation"], "  ")
    where = verdict.get("where")
    if where:
        lines += _wrap(f"at {where['file']}:{where['line']} in {where['function']}", "      ", "  ")
        if where.get("source"):
            lines.append(f"      {where['source'].strip()}"[:WIDTH])
    for fact in verdict["evidence"]:
        lines += _wrap(f"{fact['text']}  [{fact['source']}]", "    ", "  - ")
    for gap in verdict["missing"]:
        lines += _wrap(f"would help: {gap['what']}: {gap['capture']}", "    ", "  ? ")
    if verdict["fixes"]:
        lines += _wrap(f"fixes: {', '.join(verdict['fixes'])}", "    ", "  > ")
    if verdict["cause"] != "unknown":
        lines.append(f"  more: oomscope rules show {verdict['rule']}")
    return lines


def _flow(flow: Sequence[Mapping[str, Any]], guide: bool) -> list[str]:
    """The questions on top, and the path that was taken below them."""
    lines = ["The questions:"]
    for node in flow:
        top = node["parent"] is None
        if not top and not (node["on_path"] or node["answer"] == "yes"):
            continue
        if node["node"] in ("P", "V") and node["answer"] == "unknown":
            continue
        mark = ">" if node["on_path"] else " "
        question = f"{mark} {'' if top else '  '}{node['question']}"
        mine = " (you)" if node.get("given") else ""
        lines.append(f"{question:<62}{node['answer']}{mine}")
        if top and node["evidence"] and node["on_path"]:
            lines += _wrap(node["evidence"][0]["text"], "      ")
        if guide and node.get("guide"):
            lines += _wrap(node["guide"], "      ")
    return lines


def markdown(findings: Mapping[str, Any]) -> str:
    """The diagnosis to paste into an issue."""
    happened = "Recovered from out of memory" if findings.get("recovered") else "Out of memory"
    lines = [f"### {happened}: {headline(findings) or 'no numbers'}", ""]
    if findings.get("recovered"):
        lines += [_escape(recovery_text(findings["recovered"])), ""]
    lines += [_escape(line.strip()) for line in _answered(findings)] + (
        [""] if findings.get("answers") else []
    )
    for verdict in findings["verdicts"]:
        if verdict is not findings["verdicts"][0] and verdict["confidence"] < LIKELY:
            continue
        title = (
            "Cause not decided"
            if verdict["cause"] == "unknown"
            else f"`{verdict['rule']}`: {verdict['title']}"
        )
        sure = "" if verdict["cause"] == "unknown" else f" ({sureness(verdict['confidence'])})"
        lines += [f"**{title}**{sure}", "", _escape(verdict["explanation"]), ""]
        where = verdict.get("where")
        if where:
            lines += [f"At `{where['file']}:{where['line']}`: `{where['source'].strip()}`", ""]
        if verdict["evidence"]:
            lines += ["| evidence | source |", "| --- | --- |"]
            lines += [f"| {_cell(fact['text'])} | {_cell(fact['source'])} |" for fact in verdict["evidence"]]
            lines.append("")
        if verdict["missing"]:
            lines += [
                f"- would help: {_escape(gap['what'])}: `{gap['capture']}`" for gap in verdict["missing"]
            ]
            lines.append("")
        if verdict["fixes"]:
            lines += ["Fixes: " + ", ".join(f"`{fix}`" for fix in verdict["fixes"]), ""]
    if not findings["verdicts"]:
        lines += ["No memory problem found.", ""]
    lines += [f"> {_escape(advice)}" for advice in findings.get("advice") or ()]
    lines += ["<details><summary>Questions asked</summary>", "", "| question | answer |", "| --- | --- |"]
    for node in findings["flow"]:
        if node["parent"] is None or node["answer"] == "yes" or node.get("given"):
            mine = " (you)" if node.get("given") else ""
            lines.append(
                f"| {'' if node['parent'] is None else '— '}{_cell(node['question'])} | {node['answer']}{mine} |"
            )
    lines += ["", "</details>", ""]
    return "\n".join(lines)


def _escape(words: str) -> str:
    """Text that must not become markup: a log may hold anything."""
    for character in "\\`*_<>[]|":
        words = words.replace(character, "\\" + character) if character != "<" else words.replace("<", "&lt;")
    return words


def _cell(words: str) -> str:
    return _escape(" ".join(words.split()))
