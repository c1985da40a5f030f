"""Whose process is it: which rank of which job, and what torch in it says about its memory."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from oomscope.collect.procfs import all_processes, read_stat
from oomscope.errors import OomscopeError
from oomscope.launch.discover import discover
from oomscope.live.session import SessionView
from oomscope.live.state import RankState
from oomscope.store import library
from oomscope.store.session import ENDED

#: Sessions are looked for again after this time.
_RESCAN_S = 5.0
#: Newest running sessions that are followed.
_MAX_SESSIONS = 16


@dataclass(frozen=True, slots=True)
class Owner:
    """The place of a process in a job."""

    job: str
    rank: int | None
    is_worker: bool
    """A DataLoader worker or another child of the rank."""


class Owners:
    """Finds the jobs of processes, and remembers them as long as the processes live."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int], Owner | None] = {}

    def of(self, pids: Iterable[int]) -> dict[int, Owner]:
        """The owners of those `pids` that belong to a training job."""
        found: dict[int, Owner] = {}
        unknown = []
        for pid in set(pids):
            stat = read_stat(pid)
            if stat is None:
                continue
            key = (pid, stat.start_ticks)
            if key not in self._known:
                unknown.append(key)
            elif (owner := self._known[key]) is not None:
                found[pid] = owner
        if unknown:
            self._identify(unknown)
            found.update({key[0]: owner for key in unknown if (owner := self._known.get(key)) is not None})
        return found

    def _identify(self, keys: list[tuple[int, int]]) -> None:
        table = all_processes()
        for key in keys:
            if key in self._known:  # found as another one's rank
                continue
            self._known[key] = None
            try:
                job = discover(str(key[0]), table)
            except OomscopeError:
                continue
            for rank in job.ranks:
                for pid in (rank.pid, *rank.workers, *rank.helpers):
                    if pid in table:
                        owner = Owner(job.name, rank.rank, pid != rank.pid)
                        self._known[(pid, table[pid].stat.start_ticks)] = owner


class TorchReadings:
    """What the agents of running sessions say, by pid."""

    def __init__(self, home: Path | None = None) -> None:
        self._home = home
        self._views: dict[Path, SessionView] = {}
        self._scanned = -_RESCAN_S

    def poll(self) -> dict[int, RankState]:
        """Ranks of this host that report now."""
        now = time.monotonic()
        if now - self._scanned >= _RESCAN_S:
            self._scanned = now
            self._scan()
        found: dict[int, RankState] = {}
        for view in self._views.values():
            try:
                view.poll()
            except OomscopeError:
                continue
            found.update(
                {state.pid: state for state in view.ranks if state.state in ("running", "starting", "oom")}
            )
        return found

    def _scan(self) -> None:
        running = {}
        for session in library.sessions(self._home)[:_MAX_SESSIONS]:
            if session.current_state() not in ENDED:
                running[session.path] = self._views.get(session.path) or SessionView(session)
        self._views = running
