"""Asking the agents of a running job for a dump: one datagram to each rank's socket."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import socket
import time
from collections.abc import Iterable
from pathlib import Path

from oomscope.protocol import layout
from oomscope.store.files import read_json
from oomscope.store.session import Session


def request_dump(session: Session, *, rank: int | None = None, reason: str = "request") -> int:
    """Ask every rank of the newest attempt, or `rank` alone, for stacks and a snapshot; how many took the message.

    Never raises for a rank that is gone: it does not count.
    """
    attempts = session.attempts()
    if not attempts:
        return 0
    attempt = attempts[-1]
    config = read_json(attempt.path / layout.BOOT_DIR / layout.AGENT_CONFIG) or {}
    folder = Path(config.get("rundir") or "")
    if not folder.is_absolute() or not folder.is_dir():
        return 0
    return send_dump((str(folder / f"{pid}.sock") for pid in _pids(attempt.procs, rank)), reason)


def send_dump(sockets: Iterable[str], reason: str) -> int:
    """Ask the agents at these sockets for stacks and a snapshot; how many took the message."""
    message = {
        "cmd": "dump",
        "id": secrets.token_hex(6),
        "reason": reason,
        "rank": None,
        "t": time.time_ns(),
    }
    data = json.dumps(message).encode()
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        return sum(_send(sender, data, path) for path in sockets)


def _pids(procs: Path, rank: int | None) -> list[int]:
    """Pids of the ranks that have a record file, or of `rank` alone."""
    host = layout.safe_name(socket.gethostname())
    found = (layout.parse_proc_file(name) for name in sorted(os.listdir(procs)))
    return [each.pid for each in found if each and each.host == host and (rank is None or each.rank == rank)]


def _send(sender: socket.socket, message: bytes, path: str) -> bool:
    with contextlib.suppress(OSError):
        sender.sendto(message, path)
        return True
    return False
