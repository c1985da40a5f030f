"""Find and read every out-of-memory text in a piece of log.

The entry point for whole texts is `parse_text`; `log.LogScanner` feeds windows of big logs through the same
code.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.message import Frame, OomMessage
from oomscope.core.diagnosis.messages_forms import FORMS, LINE_FORMS, Fields, Form
from oomscope.core.diagnosis.messages_text import Line, Stream, rank_inside, stamp_seconds, streams

_SEGMENT = 1500
"""Squeezed characters that a text may span: eight "Process N" clauses fit."""
_TRACEBACK = "Traceback(mostrecentcalllast)"
_EXCEPTION = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]*(?:Error|Exception))[:(]\s*['\"]?$")
_WARNING = re.compile(r"(?:[A-Z][a-z]+)?Warning:|\[WARNING\]|WARNING[:\s-]|Failed to clone\(\)")
_ENDS = re.compile(
    r"environment-variables\)|MemoryManagement|unallocatedmemory\.|(?:cached|byPyTorch)\)|butunallocated\.?|systemfailure\)\.?|suppliedmemoryfraction\):[\w.]+"
)
_FILE = re.compile(r"File \"(?P<file>[^\"]+)\", line (?P<line>\d+), in (?P<function>.+?)\s*$")
_FILE_IPYTHON = re.compile(r"File (?P<file>[^\s:]+):(?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?")
_FILE_RICH = re.compile(r"(?P<file>[^\s:│]+\.py):(?P<line>\d+) in (?P<function>[\w.<>]+)")
_CELL = re.compile(r"(?P<file>Cell In ?\[\d+\])(?:, line |:)(?P<line>\d+)(?:, in (?P<function>[\w.<>]+))?")
_RICH_SOURCE = re.compile(r"^\s*❱?\s*\d+\s*[│|]?\s*(?P<source>\S.*)$")
_MAX_FRAMES = 120
_LOOK_BACK = 400
"""Lines above a text that may hold its traceback."""

Anchor = tuple[int, int, Form, "re.Match[str]"]


def parse_text(text: str) -> list[OomMessage]:
    """Every out-of-memory text in `text`, in the order of the log, echoes of one event merged."""
    return merge(parse_lines(enumerate(text.split("\n"), 1)))


def parse_lines(lines: Iterable[tuple[int, str]]) -> list[OomMessage]:
    """The texts in numbered raw lines, unmerged, sorted by line."""
    found: list[OomMessage] = []
    for stream in streams(lines):
        found.extend(_parse_stream(stream))
    return sorted(found, key=lambda message: message.line or 0)


def _parse_stream(stream: Stream) -> list[OomMessage]:
    squeezed = stream.squeezed
    anchors = _anchors(squeezed)
    found = []
    for index, (start, end, form, match) in enumerate(anchors):
        if form.ends_in_number and stream.digit_follows(end):
            continue
        limit = min(len(squeezed), start + _SEGMENT)
        if index + 1 < len(anchors):
            limit = min(limit, anchors[index + 1][0])
        traceback = squeezed.find(_TRACEBACK, end, limit)
        if traceback >= 0:
            limit = traceback
        fields = {"kind": form.kind, **form.read(match, squeezed[start:limit])}
        found.append(_message(stream, start, end, limit, fields))
    taken = {message.line for message in found}
    for line in stream.lines:
        for kind, pattern in LINE_FORMS:
            if line.number not in taken and pattern.match(line.text.strip()):
                found.append(_line_message(kind, line))
    return found


def _anchors(squeezed: str) -> list[Anchor]:
    """Anchors in text order; where two overlap the form listed first stays."""
    candidates: list[tuple[int, int, int, Form, re.Match[str]]] = []
    for priority, form in enumerate(FORMS):
        candidates.extend((m.start(), priority, m.end(), form, m) for m in form.anchor.finditer(squeezed))
    kept: list[tuple[int, int, int, Form, re.Match[str]]] = []
    for candidate in sorted(candidates, key=lambda c: (c[1], c[0])):
        start, _, end, _, _ = candidate
        if all(end <= other[0] or start >= other[2] for other in kept):
            kept.append(candidate)
    kept.sort(key=lambda c: c[0])
    shortages = [start for start, _, _, form, _ in kept if form.kind == "nccl_oom"]
    return [
        (start, end, form, match)
        for start, _, end, form, match in kept
        if not (form.kind == "nccl_other" and any(start < s < start + _SEGMENT for s in shortages))
    ]


def _message(stream: Stream, start: int, end: int, limit: int, fields: Fields) -> OomMessage:
    index = stream.index_at(start)
    line = stream.lines[index]
    before = line.text[: stream.column_at(start)]
    words_end = _words_end(stream, start, end, limit)
    words = stream.words(start, words_end)
    exception = _EXCEPTION.search(before.rstrip())
    swallowed = bool(_WARNING.search(before)) and (exception is None or exception.group(1) == "Error")
    values: dict[str, Any] = {
        "line": line.number,
        "rank": line.rank if line.rank is not None else rank_inside(before),
        "local_rank": line.local_rank,
        "time_s": stamp_seconds(before) if before else None,
        "is_warning": swallowed,
        "exception": exception.group(1) if exception and not swallowed else None,
        "before": " ".join(before.split())[-160:],
        "text": words,
        "frames": tuple(frames_above(stream.lines, index)),
    }
    values.update({key: value for key, value in fields.items() if value is not None})
    message = OomMessage(**values)
    return replace(message, tags=analyse(message).tags)


def _words_end(stream: Stream, start: int, end: int, limit: int) -> int:
    """Where the words of the message stop: its usual last phrase, else the end of the line."""
    squeezed = stream.squeezed
    last = None
    for match in _ENDS.finditer(squeezed, start, limit):
        last = match.end()
    if last is not None:
        return last
    index = stream.index_at(start)
    line_end = stream._starts[index + 1] if index + 1 < len(stream.lines) else len(squeezed)
    return max(end, min(limit, line_end))


def _line_message(kind: str, line: Line) -> OomMessage:
    return OomMessage(
        kind=kind, line=line.number, rank=line.rank, local_rank=line.local_rank, text=line.text.strip()[:600]
    )


def frames_above(lines: list[Line], index: int) -> list[Frame]:
    """The frames of the last traceback above line `index`, outermost first.

    [] when there is none in reach.
    """
    first = None
    for back in range(index, max(-1, index - _LOOK_BACK), -1):
        if "Traceback (most recent call last)" in lines[back].text:
            first = back
            break
    frames: list[Frame] = []
    if first is None:
        return frames
    for position in range(first, index):
        text = lines[position].text
        match = (
            _FILE.search(text) or _FILE_RICH.search(text) or _FILE_IPYTHON.search(text) or _CELL.search(text)
        )
        if match:
            source = _source_below(lines, position, index, int(match["line"]))
            frames.append(Frame(match["file"], int(match["line"]), match["function"] or "<module>", source))
    return frames[-_MAX_FRAMES:]


def _source_below(lines: list[Line], position: int, end: int, number: int) -> str:
    """The source text that a traceback prints under a frame.

    The next line, or in rich's the one with the frame's number.
    """
    below = lines[position + 1].text if position + 1 < end else ""
    if _FILE.search(below) or "Traceback (most" in below:
        return ""
    plain = below.strip()
    if plain and not re.match(r"[❱\d]", plain):
        return plain
    for line in lines[position + 1 : min(end, position + 10)]:
        match = _RICH_SOURCE.match(line.text)
        if match and re.match(rf"\s*(?:❱|-+>)?\s*{number}\b", line.text):
            return match["source"].strip()
    return ""


def merge(messages: list[OomMessage]) -> list[OomMessage]:
    """Echoes of one event become one message.

    The same numbers again, a killed pid named twice, the two lines of old THC errors.

    Failures of the launcher's other ranks (`elastic_fail_other`) stand only when the log holds nothing else:
    beside a real text they are its echo.
    """
    kept: list[OomMessage] = []
    seen: dict[tuple[Any, ...], int] = {}
    for message in messages:
        key = _identity(message)
        same = seen.get(key)
        if (
            same is not None
            and None not in (kept[same].rank, message.rank)
            and kept[same].rank != message.rank
        ):
            same = None
        if same is None and message.kind == "cuda_oom_short" and kept and kept[-1].kind == "cuda_oom_short":
            same = len(kept) - 1 if kept[-1].text.startswith("THCudaCheck") else None
        if same is None:
            seen[key] = len(kept)
            kept.append(message)
        else:
            kept[same] = _richer(kept[same], message)
    if any(message.is_oom for message in kept):
        kept = [message for message in kept if message.kind != "elastic_fail_other"]
    return kept


def _identity(message: OomMessage) -> tuple[Any, ...]:
    if message.pid is not None:
        return ("pid", message.pid, message.kind in ("elastic_sigkill", "host_kill"))
    if message.allocated_bytes is not None:
        # Numbers this precise never repeat by chance, so a copy without a prefix is the same event.
        numbers = (
            message.tried_bytes,
            message.free_bytes,
            message.allocated_bytes,
            message.reserved_unallocated_bytes,
        )
        return (message.kind, message.gpu, *numbers)
    return ("line", message.line, message.kind)


def _richer(one: OomMessage, other: OomMessage) -> OomMessage:
    """`one` with what only `other` knows."""
    filled = {
        name: getattr(other, name)
        for name in ("rank", "local_rank", "exitcode", "time_s", "exception")
        if getattr(one, name) is None and getattr(other, name) is not None
    }
    if len(other.frames) > len(one.frames):
        filled["frames"] = other.frames
    if one.kind == "host_kill" and other.kind == "elastic_sigkill":
        filled["kind"] = other.kind
    if one.is_warning and not other.is_warning:
        filled["is_warning"] = False
    return replace(one, **filled)
