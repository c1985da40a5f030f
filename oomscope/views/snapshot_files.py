"""Which snapshot files a path or a session offers, and which of them belongs to a rank."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from oomscope.store.session import Session
from oomscope.store.snapshots import identity_of, snapshot_files


def session_files(session: Session) -> list[Path]:
    """Snapshots of the latest attempt that has any, by step and rank."""
    for attempt in reversed(session.attempts()):
        folder = attempt.path / "snapshots"
        found = snapshot_files(folder) if folder.is_dir() else []
        if found:
            return found
    return []


def offered(path: Path) -> list[Path]:
    """`path` itself, or the snapshots in a folder (also a session's)."""
    if not path.is_dir():
        return [path]
    if (path / "session.json").is_file():
        return session_files(Session.open(path))
    return snapshot_files(path)


def newest_of_rank(files: Sequence[Path], rank: int) -> Path | None:
    """The last snapshot of `rank`; the last one of all when no name tells a rank."""
    ranks = [identity_of(path).rank for path in files]
    if files and all(each is None for each in ranks):
        return files[-1]
    return next((path for path, each in reversed(list(zip(files, ranks, strict=True))) if each == rank), None)


def label_of(path: Path) -> str:
    """`rank 5`, else the file's name."""
    rank = identity_of(path).rank
    return f"rank {rank}" if rank is not None else path.name
