"""The list of recorded sessions, each with what one wants to know before opening it."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.errors import OomscopeError
from oomscope.store import library
from oomscope.store.session import Session
from oomscope.views.coerce import clean, integer, objects, text, texts


@dataclass(frozen=True)
class SessionRow:
    """One session. Sizes in bytes."""

    path: Path
    id: str
    state: str
    script: str
    attempts: int
    verdict: str
    peak_bytes: int | None
    created_s: float
    """Seconds since the epoch."""
    is_pinned: bool = False
    """Retention never deletes it."""

    def matches(self, words: str) -> bool:
        """Whether every word of `words` occurs somewhere in the row."""
        pinned = "pinned" if self.is_pinned else ""
        everything = f"{self.id} {self.state} {self.script} {self.verdict} {pinned}".lower()
        return all(word in everything for word in words.lower().split())


@dataclass(frozen=True)
class SessionTable:
    """The sessions of one state folder."""

    rows: tuple[SessionRow, ...] = ()
    older: int = 0
    """Sessions beyond the newest ones in `rows`."""
    unreadable: tuple[str, ...] = ()
    """Folders that cannot be shown, one sentence each."""


def table(home: Path | None = None, *, limit: int = 500) -> SessionTable:
    """The newest `limit` sessions below `home`, newest first."""
    found, others = library.sessions_and_others(home)
    return SessionTable(
        tuple(row(session) for session in found[:limit]),
        max(0, len(found) - limit),
        tuple(clean(why, limit=300).replace(f"{path.parent}{os.sep}", "") for path, why in others),
    )


#: Orders of the list: name, and what it means.
ORDERS = {
    "age": "newest first",
    "name": "by script",
    "state": "by state",
    "peak": "highest peak first",
}


def ordered(rows: Sequence[SessionRow], order: str, *, reverse: bool = False) -> list[SessionRow]:
    """`rows` in `order`; within one value the newest first."""
    keys: dict[str, Callable[[SessionRow], Any]] = {
        "age": lambda r: 0,
        "name": lambda r: r.script.lower(),
        "state": lambda r: r.state,
        "peak": lambda r: -(r.peak_bytes or 0),
    }
    found = sorted(sorted(rows, key=lambda r: -r.created_s), key=keys[order])
    return found[::-1] if reverse else found


def row(session: Session) -> SessionRow:
    """The row of one session; torn files leave their fields empty."""
    command = texts(session.info, "command")
    script = next(
        (Path(part).name for part in command if part.endswith(".py")), command[0] if command else ""
    )
    attempts = session.attempts()
    verdict, peak = "", None
    for attempt in reversed(attempts):
        try:
            findings, result = attempt.findings() or {}, attempt.result() or {}
        except OomscopeError:
            continue
        found = objects(findings, "verdicts")
        verdict = verdict or (text(found[0], "rule") if found else "")
        peaks = [integer(rank, "peak_reserved_bytes") or 0 for rank in objects(result, "ranks")]
        peak = peak if peak is not None else max(peaks, default=0) or None
    created = session.info.get("created")
    return SessionRow(
        path=session.path,
        id=session.id,
        state=session.current_state(),
        script=script,
        attempts=len(attempts),
        verdict=verdict,
        peak_bytes=peak,
        created_s=created / 1e9 if isinstance(created, int) else 0.0,
        is_pinned=session.is_pinned,
    )


def age(seconds: float) -> str:
    """How long ago, in the largest unit that fits: "4 min", "3 h", "12 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"
