"""The list of recorded sessions, each with what one wants to know before opening it."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

from oomscope.errors import OomscopeError
from oomscope.store import library
from oomscope.store.session import Session
from oomscope.views.coerce import integer, objects, text, texts


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

    def matches(self, words: str) -> bool:
        """Whether every word of `words` occurs somewhere in the row."""
        everything = f"{self.id} {self.state} {self.script} {self.verdict}".lower()
        return all(word in everything for word in words.lower().split())


def rows(home: Path | None = None, *, limit: int = 500) -> list[SessionRow]:
    """The newest `limit` sessions below `home`, newest first; what cannot be read is left out."""
    return [row(session) for session in library.sessions(home)[:limit]]


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
    )


def age(seconds: float) -> str:
    """How long ago, in the largest unit that fits: "4 min", "3 h", "12 d"."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit}"
    return f"{max(0, seconds):.0f} s"


def day_and_time(created_s: float) -> str:
    """Local date and time of the start."""
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(created_s))
