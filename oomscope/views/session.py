"""A session folder as a stream of frames: reads what changed, passes on what the user asks for.

`poll` may read files and therefore runs off the UI thread; the `Frame` it returns is immutable.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import psutil

from oomscope.store import control
from oomscope.store.session import ENDED, Session
from oomscope.views import (
    compare,
    composition,
    diagnosis,
    events,
    fixes,
    movers,
    ranks,
    series,
    status,
    wording,
)
from oomscope.views.attempt_files import AttemptFiles
from oomscope.views.coerce import clean, integer, items, text, texts
from oomscope.views.frame import Frame
from oomscope.views.gpus import GpuReadings
from oomscope.views.protocols import Rank
from oomscope.views.rank_events import RankEvents


class LiveView(Protocol):
    """What `oomscope.live.session.SessionView` gives."""

    @property
    def ranks(self) -> Sequence[Any]: ...
    @property
    def events(self) -> Sequence[Mapping[str, Any]]: ...

    def poll(self) -> bool:
        """Read what is new; whether anything was."""
        ...


class SessionModel:
    """One session, polled."""

    def __init__(self, session: Session, live: LiveView | None = None) -> None:
        self.session = session
        self._live = live
        self._attempts: dict[int, AttemptFiles] = {}
        self._histories: dict[int, tuple[tuple[int, ...], series.History]] = {}
        self._past_attempts: dict[int, _Past] = {}
        self._peaks: dict[tuple[int, int], tuple[Any, composition.Composition | None]] = {}
        self._noticed = RankEvents()
        self._gpus: tuple[Path, GpuReadings] | None = None
        self._supervisor_seen: tuple[int, list[events.EventLine]] = (-1, [])
        local = session.info.get("host") == socket.gethostname()
        self._host_total = psutil.virtual_memory().total if local else None

    @property
    def live(self) -> LiveView:
        """The live view, made on first use."""
        if self._live is None:
            from oomscope.live.session import SessionView

            self._live = SessionView(self.session)
        return self._live

    @property
    def script(self) -> str:
        """Name of what is run, for the title."""
        command = texts(self.session.info, "command")
        named = next((part for part in command if part.endswith(".py")), None)
        if named:
            return Path(named).name
        return Path(command[0]).name if command else self.session.id

    def poll(self) -> Frame:
        """Read what is new in the folder and make the picture of now."""
        live = self.live
        live.poll()
        states: list[Rank] = sorted(live.ranks, key=lambda rank: int(rank.rank))
        histories = {state.rank: self._history(state) for state in states}
        state = self.session.current_state()
        files = self._attempt_files()
        rows = self._rows(states, histories, files[-1].path if files else None, is_over=state in ENDED)
        stored = self.session.state()
        number = integer(stored, "attempt") or (files[-1].number if files else 1)
        self._noticed.notice(files[-1].number if files else number, states, rows)
        # A rerun that went well has findings too, but nothing in them: the cause is the last one found.
        with_findings = [f for f in reversed(files) if f.load("findings")]
        diagnosed = next((f for f in with_findings if items(f.load("findings"), "verdicts")), None)
        diagnosed = diagnosed or next(iter(with_findings), None)
        predicted = next((f for f in reversed(files) if f.load("fixes")), None)
        found = diagnosed.diagnosis() if diagnosed else None
        offered = predicted.fixes() if predicted else None
        comparison = self._comparison(files, rows, number)
        progress = events.progress(live.events)
        exception = next((_exception(s.exception) for s in states if s.exception), "")
        current = next((f for f in files if f.number == number), None)
        info: Mapping[str, Any] = current.load("attempt") if current else {}
        command = texts(info, "command") or texts(self.session.info, "command")
        cwd = text(info, "cwd") or text(self.session.info, "cwd")
        return Frame(
            path=self.session.path,
            state=state,
            attempt=number,
            headline=status.headline(
                state, script=self.script, attempt=number, ranks=rows, nodes=_nodes(states)
            ),
            alert=status.alert(
                state, ranks=rows, diagnosis=found, fixes=offered, progress=progress,
                comparison=comparison, exception=exception,
            ),
            ranks=rows,
            histories=histories,
            phase_peaks=_phase_peaks(states),
            events=self._events(live.events, files),
            progress=progress,
            diagnosis=found,
            diagnosis_attempt=diagnosed.number if diagnosed else 0,
            composition=self._composition(diagnosed, found, states, number),
            fixes=offered,
            fixes_attempt=predicted.number if predicted else 0,
            comparison=comparison,
            movers=self._movers(files, states, number),
            attempt_histories=self._attempt_histories(files, histories, number),
            command=tuple(wording.below(part, cwd) for part in command),
            cwd=cwd,
            is_attached=self.session.info.get("attached") is True,
            device_word=wording.kind_of_number(any(row.simulated for row in rows)),
            exception=exception,
            problems=tuple(line.text for f in files for line in f.problems()),
        )  # fmt: skip

    def ask(self, do: str, *, fixes: Sequence[str] = (), rank: int | None = None) -> str:
        """Write a request for the supervisor; returns its id, which the answer carries.

        Raises:
            OSError: the session folder cannot be written.
        """
        return control.send(self.session, do, fixes=tuple(fixes), rank=rank).id

    # -- parts of a frame --------------------------------------------------------------------

    def _rows(
        self,
        states: Sequence[Rank],
        histories: Mapping[int, series.History],
        attempt: Path | None,
        *,
        is_over: bool,
    ) -> tuple[ranks.RankRow, ...]:
        """The rank table, each rank with the newest reading of its GPU."""
        if attempt is not None and (self._gpus is None or self._gpus[0] != attempt):
            self._gpus = (attempt, GpuReadings(attempt))
        gpus = self._gpus[1] if self._gpus and not is_over else None
        if gpus is not None:
            gpus.poll()
        now = time.time_ns()
        return tuple(
            ranks.rank_row(
                state,
                histories[state.rank],
                host_total_bytes=self._host_total,
                is_over=is_over,
                gpu=gpus.of(state.gpu_uuid, state.host, state.pid, now) if gpus else None,
            )
            for state in states
        )

    def _history(self, state: Rank) -> series.History:
        """A frozen copy of the rank's series, the old one while nothing was added."""
        source = getattr(state, "series", None)
        if source is None:
            return series.EMPTY
        size = len(source.peak)
        tail = (
            (source.low[-1], source.peak[-1], source.reserved[-1] if source.reserved else 0) if size else ()
        )
        stamp = (size, source.span, source.first_step, *tail)
        kept = self._histories.get(state.rank)
        if kept is None or kept[0] != stamp:
            kept = self._histories[state.rank] = (stamp, series.freeze(source))
        return kept[1]

    def _composition(
        self,
        diagnosed: AttemptFiles | None,
        found: diagnosis.Diagnosis | None,
        states: Sequence[Rank],
        current: int,
    ) -> composition.Composition | None:
        """The make-up of the diagnosed rank's peak; the ranks of an earlier attempt are read once."""
        if diagnosed is None:
            return None
        peaks: Mapping[int, Any] = {state.rank: getattr(state, "peak", None) for state in states}
        if diagnosed.number != current:
            peaks = self._past(diagnosed.number).peaks
        rank = found.rank if found is not None and found.rank in peaks else next(iter(peaks), None)
        return None if rank is None else self._peak(diagnosed.number, rank, peaks[rank])

    def _peak(self, attempt: int, rank: int, record: Any) -> composition.Composition | None:
        """The view of a `peak` record, the old one while the record is the same."""
        kept = self._peaks.get((attempt, rank))
        if kept is None or kept[0] is not record:
            kept = self._peaks[attempt, rank] = (record, composition.read(record))
        return kept[1]

    def _movers(
        self, files: Sequence[AttemptFiles], states: Sequence[Rank], current: int
    ) -> movers.Movers | None:
        """The fullest rank's peak in the first attempt beside that in the newest one."""
        if len(files) < 2:
            return None
        found = []
        for each in (files[0], files[-1]):
            live = {state.rank: getattr(state, "peak", None) for state in states}
            peaks = live if each.number == current else self._past(each.number).peaks
            read = [self._peak(each.number, rank, record) for rank, record in peaks.items()]
            parts = [part for part in read if part is not None]
            if not parts:
                return None
            found.append((f"attempt {each.number}", max(parts, key=lambda part: part.peak_bytes)))
        (before, first), (after, second) = found
        return movers.compare(before, first, after, second)

    def _attempt_files(self) -> list[AttemptFiles]:
        for attempt in self.session.attempts():
            if attempt.number not in self._attempts:
                self._attempts[attempt.number] = AttemptFiles(attempt)
        return [self._attempts[number] for number in sorted(self._attempts)]

    def _comparison(
        self, files: Sequence[AttemptFiles], live: Sequence[ranks.RankRow], current: int
    ) -> compare.Comparison | None:
        """All attempts as rows, each with what was predicted for it before it started."""
        if not files:
            return None
        rows = []
        offered: fixes.Fixes | None = None
        simulated = any(row.simulated for row in live)
        for each in files:
            info, result = each.load("attempt"), each.load("result")
            row = compare.attempt_row(each.number, info, result, simulated=simulated)
            if row.fixes and offered is not None:
                row = replace(row, predicted=offered.predicted_for(row.fixes))
            if not result and each.number == current:
                row = _from_live(row, live)
            rows.append(row)
            offered = each.fixes() or offered
        proved = next((each for each in reversed(files) if each.load("proof")), None)
        return compare.compare(
            rows, compare.read_proof(proved.number, proved.load("proof")) if proved else None
        )

    def _past(self, attempt: int) -> _Past:
        """What the ranks of an attempt that is over had reached; read once."""
        if attempt not in self._past_attempts:
            self._past_attempts[attempt] = _read_past(self.session, attempt)
        return self._past_attempts[attempt]

    def _attempt_histories(
        self, files: Sequence[AttemptFiles], histories: Mapping[int, series.History], current: int
    ) -> dict[int, series.History]:
        """The fullest rank of each attempt over its steps; of many attempts, the first and the newest ones."""
        shown = files if len(files) <= 4 else [files[0], *files[-3:]]
        found = {}
        for each in shown:
            known = histories if each.number == current else self._past(each.number).histories
            found[each.number] = max(
                known.values(), key=lambda h: max(h.peak, default=0), default=series.EMPTY
            )
        return found

    def _events(
        self, records: Sequence[Mapping[str, Any]], files: Sequence[AttemptFiles]
    ) -> tuple[events.EventLine, ...]:
        if len(records) != self._supervisor_seen[0]:
            self._supervisor_seen = (len(records), events.supervisor_lines(records))
        # A stable sort: lines without a time of their own stay where they were noticed.
        unread = [line for each in files for line in each.problems()]
        return tuple(
            sorted([*self._supervisor_seen[1], *self._noticed.lines, *unread], key=lambda line: line.t_ns)
        )


@dataclass(frozen=True)
class _Past:
    """An attempt that is over, by rank."""

    peaks: Mapping[int, Any]
    histories: Mapping[int, series.History]


def _read_past(session: Session, attempt: int) -> _Past:
    from oomscope.live.session import SessionView

    view = SessionView(session, attempt)
    view.poll()
    return _Past(
        {int(state.rank or 0): state.peak for state in view.ranks},
        {int(state.rank or 0): series.freeze(state.series) for state in view.ranks},
    )


def _from_live(row: compare.AttemptRow, live: Sequence[ranks.RankRow]) -> compare.AttemptRow:
    """The running attempt's row with what its ranks have reached so far."""
    device = [r for r in live if r.on_device]
    return replace(
        row,
        reached_bytes=max((r.peak_reserved_bytes or 0 for r in device), default=0) or None,
        reached_allocated_bytes=max((r.peak_bytes or 0 for r in device), default=0) or None,
        capacity_bytes=max((r.capacity_bytes or 0 for r in device), default=0) or None,
        steps=max((r.step or 0 for r in live), default=0),
    )


def _exception(record: Mapping[str, Any] | None) -> str:
    if not isinstance(record, Mapping):
        return ""
    kind, message = text(record, "type"), text(record, "message")
    return clean(f"{kind}: {message}" if message else kind, limit=200)


def _nodes(states: Sequence[Any]) -> int:
    return len({getattr(state, "host", None) for state in states} - {None}) or 1


def _phase_peaks(states: Sequence[Any]) -> dict[int, Mapping[str, int]]:
    found: dict[int, Mapping[str, int]] = {}
    for state in states:
        peaks = getattr(state, "phase_peaks", None)
        if isinstance(peaks, Mapping) and peaks:
            found[int(state.rank)] = {str(k): int(v) for k, v in peaks.items()}
    return found
