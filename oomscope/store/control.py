"""Requests from viewers to the supervisor.

One small file each, written under a temporary name and renamed.
"""

from __future__ import annotations

import os
import secrets
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.errors import SessionError, UsageError
from oomscope.protocol import layout
from oomscope.store.files import read_json, write_json
from oomscope.store.session import Session

ACTIONS = ("stop", "kill", "detach", "rerun", "dump", "predict")


@dataclass(frozen=True, slots=True)
class Request:
    """One request; the answer is a supervisor record `answer` with the same id."""

    id: str
    do: str
    fixes: tuple[str, ...] = ()
    rank: int | None = None


def send(session: Session, do: str, *, fixes: tuple[str, ...] = (), rank: int | None = None) -> Request:
    """Ask the supervisor of `session` for something.

    Raises:
        UsageError: not one of ACTIONS.
        OSError: the session folder cannot be written.
    """
    if do not in ACTIONS:
        raise UsageError(f"unknown request {do!r}: one of {', '.join(ACTIONS)}")
    request = Request(f"{time.time_ns():x}-{secrets.token_hex(3)}", do, fixes, rank)
    write_json(
        session.path / layout.CONTROL_DIR / f"{request.id}.json",
        {"id": request.id, "do": do, "fixes": list(fixes), "rank": rank},
    )
    return request


def receive(session: Session) -> list[Request]:
    """The requests waiting, oldest first; each is removed, and a damaged one is answered by dropping it."""
    folder = session.path / layout.CONTROL_DIR
    try:
        names = sorted(
            entry.name
            for entry in os.scandir(folder)
            if entry.name.endswith(".json") and entry.name[0] != "."
        )
    except OSError:
        return []
    requests = []
    for name in names:
        path = folder / name
        try:
            value = read_json(path)
        except SessionError:
            value = None
        path.unlink(missing_ok=True)
        request = _parse(value, path)
        if request is not None:
            requests.append(request)
    return requests


def answer(session: Session, request: Request, ok: bool, text: str) -> None:
    """Tell the viewers what became of `request`."""
    session.append_supervisor({"k": "answer", "id": request.id, "ok": ok, "text": text})


def _parse(value: dict[str, Any] | None, path: Path) -> Request | None:
    if value is None or value.get("do") not in ACTIONS:
        return None
    fixes = value.get("fixes")
    rank = value.get("rank")
    return Request(
        id=str(value.get("id") or path.stem),
        do=str(value["do"]),
        fixes=tuple(each for each in fixes if isinstance(each, str)) if isinstance(fixes, list) else (),
        rank=rank if isinstance(rank, int) else None,
    )
