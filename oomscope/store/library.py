"""All sessions below one state folder: listing, finding by a short name, and clearing away old ones."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from oomscope.errors import SessionError
from oomscope.protocol import layout
from oomscope.store.session import ENDED, Session, default_home
from oomscope.units import GIB

#: Retention, as documented: sessions older than this go, and the oldest snapshots go first when there is too
#: much.
KEEP_DAYS = 14
KEEP_BYTES = 10 * GIB


def sessions(home: Path | None = None) -> list[Session]:
    """All readable sessions, newest first.

    Folders that are not sessions or are newer than this program are left out.
    """
    return sessions_and_others(home)[0]


def sessions_and_others(home: Path | None = None) -> tuple[list[Session], list[tuple[Path, str]]]:
    """All readable sessions, newest first, and the folders beside them that are none, each with the reason."""
    folder = (home or default_home()) / "sessions"
    found, others = [], []
    try:
        names = sorted((entry.name for entry in os.scandir(folder) if entry.is_dir()), reverse=True)
    except OSError:
        return [], []
    for name in names:
        try:
            found.append(Session.open(folder / name))
        except SessionError as error:
            others.append((folder / name, error.message))
    return sorted(found, key=_created, reverse=True), others


def find(target: str, home: Path | None = None) -> Session:
    """The session that `target` means: a path, an id, the unique beginning or end of one, or "last".

    Raises:
        SessionError: none or several match, or the folder cannot be used.
    """
    if os.sep in target or Path(target).is_dir():
        return Session.open(target)
    known = sessions(home)
    if target in ("last", "latest"):
        if not known:
            raise SessionError("there is no session yet", hint="oomscope run train.py")
        return known[0]
    folder = (home or default_home()) / "sessions" / target
    if folder.is_dir():
        return Session.open(folder)
    matches = [each for each in known if each.id.startswith(target) or each.id.endswith(target)]
    matches = matches or [each for each in known if target in each.id]
    if len(matches) == 1:
        return matches[0]
    if matches:
        names = ", ".join(each.id for each in matches[:5])
        raise SessionError(f"{target!r} means several sessions: {names}", hint="give more of the name")
    raise SessionError(f"no session {target!r}", hint="oomscope sessions lists them")


def prune(
    home: Path | None = None, *, keep_days: float = KEEP_DAYS, keep_bytes: int = KEEP_BYTES
) -> list[str]:
    """Delete what is too old or too much, never a pinned or a running session; returns what was deleted.

    Snapshots go first: they are most of the bytes, and a session without them still tells its story.
    """
    deleted = []
    candidates = [each for each in sessions(home) if not each.is_pinned and each.current_state() in ENDED]
    oldest = time.time() - keep_days * 86400
    for session in list(candidates):
        if _created(session) / 1e9 < oldest and delete(session.path):
            candidates.remove(session)
            deleted.append(session.id)
    total = sum(size for each in sessions(home) for _, size in _files(each.path))
    for session in reversed(candidates):  # oldest first
        for path, size in list(_files(session.path)):
            if total <= keep_bytes:
                return deleted
            if path.parent.name == layout.SNAPSHOTS_DIR:
                path.unlink(missing_ok=True)
                total -= size
                deleted.append(f"{session.id}/{path.relative_to(session.path)}")
    for session in reversed(candidates):
        if total <= keep_bytes:
            break
        size = sum(each for _, each in _files(session.path))
        if delete(session.path):
            total -= size
            deleted.append(session.id)
    return deleted


def _created(session: Session) -> int:
    created = session.info.get("created")
    return created if isinstance(created, int) else 0


def _files(folder: Path) -> Iterator[tuple[Path, int]]:
    for root, _, names in os.walk(folder):
        for name in names:
            path = Path(root) / name
            try:
                yield path, path.lstat().st_size
            except OSError:
                continue


def delete(folder: Path) -> bool:
    """Remove a session folder; session.json first, so that a half deleted one is no session any more."""
    try:
        (folder / layout.SESSION_FILE).unlink()
        shutil.rmtree(folder)
    except OSError:
        return False
    return True
