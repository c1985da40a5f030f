"""What happened on the ranks, noticed as the difference between two polls: flushes, ends, snapshots, fixes, doubts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePath
from typing import Any

from oomscope.views import wording
from oomscope.views.coerce import clean, integer, items, text
from oomscope.views.events import EventLine
from oomscope.views.ranks import RankRow

#: Lines kept; a session lives for days.
_MAX_LINES = 500
_ENDS = {
    "oom": "ran out of memory",
    "failed": "failed",
    "stopped": "was told to end",
    "lost": "its process is gone",
    "silent": "nothing heard for a while",
}
_FIX_WORDS = {
    "applied": ("info", "applied"),
    "refused": ("warn", "refused"),
    "no_effect": ("warn", "applied, without effect"),
}


class RankEvents:
    """Lines about the ranks of one session, in the order in which they were noticed."""

    def __init__(self) -> None:
        self.lines: list[EventLine] = []
        self._retries: dict[tuple[int, int], int] = {}
        self._states: dict[tuple[int, int], str] = {}
        self._counts: dict[tuple[int, int, str], int] = {}

    def notice(self, attempt: int, states: Sequence[Any], rows: Sequence[RankRow]) -> None:
        """Compare with the poll before; `states` are the ranks' live states, `rows` their views."""
        for state, row in zip(states, rows, strict=True):
            self.lines += self._flushes(attempt, state, row)
            self.lines += self._end(attempt, state, row)
            self.lines += self._lists(attempt, state, row)
        del self.lines[:-_MAX_LINES]

    def _flushes(self, attempt: int, state: Any, row: RankRow) -> Iterator[EventLine]:
        key = (attempt, row.rank)
        before = self._retries.get(key)
        self._retries[key] = row.retries
        if row.retries <= (before or 0):
            return
        said = f"cudaMalloc retry #{row.retries}: the cache was flushed"
        if before is None:
            said = f"{wording.plural(row.retries, 'cudaMalloc retry', 'cudaMalloc retries')} so far"
        yield EventLine(_time(state), "warn", said, row.rank, row.step)

    def _end(self, attempt: int, state: Any, row: RankRow) -> Iterator[EventLine]:
        key = (attempt, row.rank)
        before = self._states.get(key, "running")
        self._states[key] = row.state
        if row.state != before and row.state in _ENDS:
            yield EventLine(_time(state), row.severity, _ENDS[row.state], row.rank, row.step)

    def _lists(self, attempt: int, state: Any, row: RankRow) -> Iterator[EventLine]:
        """New entries of the lists that a rank's state keeps."""
        for name, make in (
            ("snapshots", _snapshot),
            ("fixes", _fix),
            ("agent_errors", _agent_error),
            ("notes", _note),
        ):
            for record in self._fresh((attempt, row.rank, name), getattr(state, name, ())):
                severity, said = make(record)
                yield EventLine(integer(record, "t") or _time(state), severity, said, row.rank)
        doubts = getattr(state, "simulation", None)
        for record in self._fresh((attempt, row.rank, "simulation"), [doubts] if doubts else []):
            unsupported = [clean(name, limit=60) for name in items(record, "unsupported")]
            if unsupported:
                said = f"not simulated exactly: {', '.join(unsupported[:4])}"
                more = f" and {len(unsupported) - 4} more" if len(unsupported) > 4 else ""
                yield EventLine(integer(record, "t") or _time(state), "warn", said + more, row.rank)

    def _fresh(self, key: tuple[int, int, str], records: Sequence[Any]) -> list[Mapping[str, Any]]:
        seen = self._counts.get(key, 0)
        self._counts[key] = len(records)
        return [record for record in records[seen:] if isinstance(record, Mapping)]


def _time(state: Any) -> int:
    return int(getattr(state, "last_t", 0) or 0)


def _snapshot(record: Mapping[str, Any]) -> tuple[str, str]:
    size = integer(record, "bytes")
    name = PurePath(text(record, "path", "snapshot")).name
    return "info", f"snapshot {name}" + (f", {wording.size(size)}" if size is not None else "")


def _fix(record: Mapping[str, Any]) -> tuple[str, str]:
    severity, word = _FIX_WORDS.get(text(record, "state"), ("warn", text(record, "state", "unknown")))
    detail = text(record, "detail")
    return severity, f"{text(record, 'id', 'fix')} {word}" + (f": {detail}" if detail else "")


def _note(record: Mapping[str, Any]) -> tuple[str, str]:
    return "info", text(record, "text")[:200]


def _agent_error(record: Mapping[str, Any]) -> tuple[str, str]:
    probe = text(record, "probe", "a probe")
    return "warn", f"the agent switched {probe} off: {text(record, 'error', 'an error')}"
