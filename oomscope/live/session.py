"""A session folder as it stands now: its attempts, its ranks, its events.

Polled by viewers; it only reads.
"""

from __future__ import annotations

import os
import socket
import time
from pathlib import Path
from typing import Any

from oomscope.live.state import RankState, choose_ranks, clock_offsets
from oomscope.protocol import layout
from oomscope.store.session import Attempt, Session, process_start_time
from oomscope.store.tail import FolderTail, Tail

#: Supervisor records kept for the event list.
MAX_EVENTS = 1000


class SessionView:
    """The newest attempt of a session, kept up to date by `poll`.

    Attributes:
        session: the session.
        attempt: the attempt that is shown, None before the first one starts.
        ranks: its ranks, sorted; helpers are in `others`.
        state: the session's state (store.session.STATES).
        events: supervisor records, oldest first, at most MAX_EVENTS.
    """

    def __init__(self, session: Session, attempt: int | None = None) -> None:
        """`attempt` shows that one for good; default: the newest, moving on when another starts."""
        self.session = session
        self.attempt: Attempt | None = None
        self.ranks: list[RankState] = []
        self.others: list[RankState] = []
        self.state = session.current_state()
        self.events: list[dict[str, Any]] = []
        self._fixed = attempt
        self._supervisor = Tail(session.path / layout.SUPERVISOR_FILE)
        self._tail: FolderTail | None = None
        self._nodes: Tail | None = None
        self._offsets: dict[int | None, int] = {}
        self._states: dict[str, RankState] = {}
        self._fingerprint: tuple[Any, ...] = ()

    def poll(self) -> bool:
        """Read what is new; True when anything that can be seen has changed.

        Raises:
            SessionError: the session is written by a newer oomscope.
        """
        changed = self._choose_attempt()
        events = self._supervisor.poll()
        if events:
            self.events = (self.events + events)[-MAX_EVENTS:]
            changed = True
        if self._tail is not None:
            for name, records in self._tail.poll():
                changed = True
                state = self._states.setdefault(name, RankState(file=name))
                for record in records:
                    state.take(record)
        return self._refresh() or changed

    @property
    def bad_lines(self) -> int:
        """Lines of this attempt that could not be read."""
        return 0 if self._tail is None else self._tail.bad_lines

    @property
    def lost_records(self) -> int:
        """Records of this attempt that their writers could not write."""
        return 0 if self._tail is None else self._tail.lost

    def _choose_attempt(self) -> bool:
        attempts = self.session.attempts()
        if self._fixed is not None:
            attempts = [each for each in attempts if each.number == self._fixed]
        newest = attempts[-1] if attempts else None
        if newest is None or (self.attempt is not None and newest.number == self.attempt.number):
            return False
        self.attempt = newest
        self._tail = FolderTail(newest.procs)
        self._nodes, self._offsets = Tail(newest.path / layout.NODES_FILE), {}
        self._states = {}
        return True

    def _refresh(self) -> bool:
        now = time.time_ns()
        over = self.attempt is not None and (self.attempt.path / layout.RESULT_FILE).exists()
        if self._nodes is not None:
            self._offsets |= clock_offsets(self._nodes.poll())
        for state in self._states.values():
            state.clock_offset_ns = self._offsets.get(state.node_rank, 0)
            state.refresh(now, alive=_is_alive(state, over))
        self.ranks, self.others = choose_ranks(self._states.values())
        self.state = self.session.current_state()
        fingerprint = (self.state, *((state.rank, state.state) for state in self.ranks))
        changed = fingerprint != self._fingerprint
        self._fingerprint = fingerprint
        return changed

    def log_files(self) -> list[LogFile]:
        """The output files of the shown attempt."""
        return [] if self.attempt is None else log_files(self.attempt.path)


class LogFile:
    """One file of the job's output."""

    def __init__(self, path: Path, rank: int | None, stream: str) -> None:
        """`rank` is None for the launcher's own output; `stream` is "stdout", "stderr" or "launcher"."""
        self.path = path
        self.rank = rank
        self.stream = stream

    def __repr__(self) -> str:
        return f"LogFile(rank={self.rank}, stream={self.stream!r}, path={str(self.path)!r})"


def log_files(attempt_dir: Path) -> list[LogFile]:
    """All output files of an attempt: the launcher's, then each rank's stdout and stderr.

    torchrun names its folders `<run id>/attempt_<restart>/<local rank>`; on several nodes each node has its
    own.
    """
    found = []
    launcher = attempt_dir / layout.LAUNCHER_LOG
    if launcher.exists():
        found.append(LogFile(launcher, None, "launcher"))
    for root, _, names in sorted(os.walk(attempt_dir / layout.LOGS_DIR)):
        folder = Path(root)
        rank_text = folder.name.removeprefix("rank")
        if not rank_text.isdigit():
            continue
        found += [
            LogFile(folder / name, int(rank_text), name.removesuffix(".log"))
            for name in ("stdout.log", "stderr.log")
            if name in names
        ]
    return sorted(found, key=lambda each: (each.rank is not None, each.rank or 0, each.stream != "stdout"))


def _is_alive(state: RankState, over: bool) -> bool | None:
    """Whether the process runs; None when it cannot be known (another host)."""
    if over:
        return False
    if state.hello is None or state.host != socket.gethostname():
        return None
    start = state.hello.get("start_time")
    if not isinstance(start, int) or start == 0:
        return None
    return process_start_time(state.pid) == start
