"""The supervisor's records and what the ranks report, as lines of one log."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from oomscope.views.coerce import flag, integer, text, texts


@dataclass(frozen=True)
class EventLine:
    """Something that happened."""

    t_ns: int
    """UTC, nanoseconds since the epoch; 0 when unknown."""
    severity: str
    """"error", "warn", "ok" or "info"."""
    text: str
    rank: int | None = None
    step: int | None = None

    def clock(self) -> str:
        """Local time of day, as in a log."""
        return time.strftime("%H:%M:%S", time.localtime(self.t_ns / 1e9)) if self.t_ns else "        "


def _started(record: Mapping[str, Any]) -> tuple[str, str]:
    fixes = texts(record, "fixes")
    return "info", f"attempt {integer(record, 'attempt') or '?'} started" + (
        f" with {', '.join(fixes)}" if fixes else ""
    )


def _ended(record: Mapping[str, Any]) -> tuple[str, str]:
    number, code = integer(record, "attempt") or "?", integer(record, "exit_code")
    if flag(record, "oom"):
        return "error", f"attempt {number} ran out of memory"
    if code == 0:
        return "ok", f"attempt {number} finished"
    return "warn", f"attempt {number} ended with exit code {code}"


def _predicting(record: Mapping[str, Any]) -> tuple[str, str]:
    done, total = integer(record, "done"), integer(record, "total")
    counted = f" ({done} of {total})" if done is not None and total else ""
    return "info", f"predicting {text(record, 'fix', 'fixes')}{counted}"


def _decision(record: Mapping[str, Any]) -> tuple[str, str]:
    by = {"user": "you chose", "option": "chosen on the command line:", "recommendation": "recommended:"}
    fixes = ", ".join(texts(record, "fixes")) or "nothing"
    return "info", f"{by.get(text(record, 'by'), 'chosen:')} {fixes}"


def _finished(record: Mapping[str, Any]) -> tuple[str, str]:
    code = integer(record, "exit_code")
    said = text(record, "text") or f"finished with exit code {code}"
    return ("ok" if code == 0 else "warn"), said


def _answer(record: Mapping[str, Any]) -> tuple[str, str]:
    return ("info" if flag(record, "ok") else "warn"), text(record, "text", "request answered")


def _found(record: Mapping[str, Any]) -> str:
    rule = text(record, "rule")
    return f"cause: {rule}" if rule else "nothing found to explain"


_WORDS: dict[str, Callable[[Mapping[str, Any]], tuple[str, str]]] = {
    "attempt_started": _started,
    "attempt_ended": _ended,
    "diagnosing": lambda record: ("info", "finding the cause"),
    "diagnosed": lambda record: ("info", _found(record)),
    "predicting": _predicting,
    "predicted": lambda record: ("info", "predictions are ready"),
    "waiting": lambda record: ("warn", "waiting for your choice of fixes"),
    "decision": _decision,
    "finished": _finished,
    "signal": lambda record: ("warn", f"signal {text(record, 'signal') or text(record, 'text')}"),
    "answer": _answer,
    "proved": lambda record: ("info", "compared with the prediction"),
    "orphans": lambda record: ("warn", "processes left over by the job were ended"),
    "note": lambda record: ("info", text(record, "text")),
}


def supervisor_line(record: Mapping[str, Any]) -> EventLine | None:
    """The record as a line; None for a kind that this program does not know or that says nothing."""
    words = _WORDS.get(str(record.get("k")))
    if words is None:
        return None
    severity, said = words(record)
    return EventLine(integer(record, "t") or 0, severity, said) if said else None


def supervisor_lines(records: Iterable[Mapping[str, Any]]) -> list[EventLine]:
    """Lines of all `records`; of several `predicting` in a row only the newest stays."""
    lines: list[EventLine] = []
    previous = ""
    for record in records:
        line = supervisor_line(record)
        if line is None:
            continue
        kind = str(record.get("k"))
        if kind == previous == "predicting":
            lines[-1] = line
        else:
            lines.append(line)
        previous = kind
    return lines


@dataclass(frozen=True)
class Progress:
    """How far the predictions are."""

    fix: str
    done: int
    total: int

    def sentence(self) -> str:
        return f"predicting {self.fix}, {self.done} of {self.total} done"


def progress(records: Sequence[Mapping[str, Any]]) -> Progress | None:
    """The newest prediction progress; None when no prediction is under way."""
    for record in reversed(records):
        kind = record.get("k")
        if kind == "predicting":
            return Progress(
                text(record, "fix", "fixes"), integer(record, "done") or 0, integer(record, "total") or 0
            )
        if kind in ("predicted", "attempt_started", "finished"):
            return None
    return None
