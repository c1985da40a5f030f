"""One rank as its records tell it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomscope.live.series import StepSeries
from oomscope.protocol.records import number

Record = Mapping[str, Any]

#: A rank that has written nothing for so long is silent: ten of its readings are missing.
SILENT_AFTER_S = 5.0
_MAX_NOTES = 100


@dataclass
class RankState:
    """What is known of one rank.

    Sizes in bytes, None where the job has no such thing or has not said it yet.
    """

    rank: int | None = None
    local_rank: int | None = None
    world_size: int | None = None
    node_rank: int | None = None
    clock_offset_ns: int = 0
    """What to add to its times to compare them with those of node 0."""
    pid: int = 0
    host: str = ""
    file: str = ""
    """Name of its record file in procs/."""
    device: int | None = None
    gpu_name: str | None = None
    gpu_uuid: str | None = None
    simulated: bool = False
    state: str = "starting"
    """starting, running, oom, failed, stopped, done, lost or silent.

    `stopped`: it was told to end, by SIGTERM or Ctrl-C. `lost`: its process is gone without a word.
    """
    step: int = 0
    """The step that runs, which is the number of completed steps."""
    micro_step: int = 0
    phase: str = "other"
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    device_used_bytes: int | None = None
    rss_bytes: int | None = None
    peak_rss_bytes: int | None = None
    retries: int | None = None
    ooms: int | None = None
    loss: float | None = None
    series: StepSeries = field(default_factory=StepSeries)
    first_t: int = 0
    last_t: int = 0
    """UTC ns of the first and the last record."""
    oom: dict[str, Any] | None = None
    """The last `oom` record; its `caught` says whether training went on after it."""
    oom_was_last: bool = False
    """No step was completed after the last `oom` record."""
    exception: dict[str, Any] | None = None
    fixes: list[dict[str, Any]] = field(default_factory=list)
    model: dict[str, Any] | None = None
    peak: dict[str, Any] | None = None
    simulation: dict[str, Any] | None = None
    """The last `simulated` record: assumed values, unsupported operators, card."""
    phase_peaks: dict[str, int] = field(default_factory=dict)
    """Most allocated bytes seen in each phase."""
    snapshots: list[dict[str, Any]] = field(default_factory=list)
    agent_errors: list[dict[str, Any]] = field(default_factory=list)
    notes: list[dict[str, Any]] = field(default_factory=list)
    """What the agent says about itself: where it counts steps from, what it leaves alone and why."""
    lost_records: int = 0
    hello: dict[str, Any] | None = None
    term: str | None = None
    """The signal by which it was told to end: SIGTERM or SIGINT."""
    term_ns: int | None = None
    """When, UTC."""
    said_bye: bool = False

    def take(self, record: Record) -> None:
        """Take one record in; unknown kinds and fields of the wrong type are skipped."""
        t = record.get("t")
        if isinstance(t, int):
            self.first_t = self.first_t or t
            self.last_t = max(self.last_t, t)
        handler = _HANDLERS.get(str(record.get("k")))
        if handler is not None:
            handler(self, record)

    def refresh(self, now_ns: int | None = None, *, alive: bool | None = None) -> None:
        """Bring `state` up to date with the clock and with whether the process lives (None: unknown)."""
        if self.said_bye or self.exception is not None:
            self.state = self._ended_state()
        elif alive is False:
            left = "lost" if self.term is None else "stopped"
            self.state = "oom" if self.oom is not None and not self.oom["caught"] else left
        elif self.last_t and self._age_s(now_ns) > SILENT_AFTER_S:
            self.state = "silent"
        elif self.hello is not None:
            self.state = "running" if self.step or self.rank is not None else "starting"

    def _age_s(self, now_ns: int | None) -> float:
        """Seconds since its last record, on this host's clock."""
        return ((now_ns or time.time_ns()) - self.last_t - self.clock_offset_ns) / 1e9

    def _ended_state(self) -> str:
        if self.exception is not None:
            return "oom" if self.exception.get("is_oom") else "failed"
        return "done" if self.term is None else "stopped"

    # -- one method per kind

    def _hello(self, record: Record) -> None:
        self.hello = dict(record)
        self.pid = _int(record.get("pid")) or 0
        self.host = str(record.get("host") or "")
        self.simulated = bool(record.get("simulated"))
        identity = record.get("identity")
        if isinstance(identity, Mapping):
            self._identify(identity)

    def _rank(self, record: Record) -> None:
        self._identify(record)
        self.device = _int(record.get("device"))
        self.gpu_name = _text(record.get("gpu_name"))
        self.gpu_uuid = _text(record.get("gpu_uuid"))
        self.capacity_bytes = _int(record.get("capacity_bytes")) or self.capacity_bytes
        self.simulated = bool(record.get("simulated"))

    def _identify(self, record: Record) -> None:
        for name in ("rank", "local_rank", "world_size", "node_rank"):
            value = _int(record.get(name))
            if value is not None:
                setattr(self, name, value)

    def _memory(self, record: Record) -> None:
        for name in ("allocated_bytes", "reserved_bytes", "rss_bytes", "retries", "ooms"):
            value = _int(record.get(name))
            if value is not None:
                setattr(self, name, value)
        for name in ("peak_allocated_bytes", "peak_reserved_bytes", "peak_rss_bytes"):
            value = _int(record.get(name))
            if value is not None:
                setattr(self, name, max(value, getattr(self, name) or 0))

    def _reading(self, record: Record) -> None:
        self._memory(record)
        self.step = max(self.step, _int(record.get("step")) or 0)
        self.micro_step = _int(record.get("micro_step")) or 0
        self.phase = str(record.get("phase") or "other")
        free, total = _int(record.get("device_free_bytes")), _int(record.get("device_total_bytes"))
        if free is not None and total is not None:
            self.device_used_bytes = total - free
            if self.capacity_bytes is None:
                self.capacity_bytes = total

    def _step(self, record: Record) -> None:
        self._memory(record)
        step = _int(record.get("step"))
        if step is None:
            return
        low = _int(record.get("low_allocated_bytes"))
        if low is not None:
            self.allocated_bytes = low
        self.step = max(self.step, step + 1)
        self.micro_step = 0
        loss = number(record.get("loss"))
        if loss is not None:
            self.loss = loss
        self.series.add(step, record)
        self.oom_was_last = False
        if self.oom is not None and self.oom.get("caught") is None:
            self.oom["caught"] = True

    def _phase(self, record: Record) -> None:
        self.phase = str(record.get("phase") or "other")

    def _phase_peak(self, record: Record) -> None:
        peak = _int(record.get("peak_allocated_bytes"))
        if peak is not None:
            name = str(record.get("phase"))
            self.phase_peaks[name] = max(peak, self.phase_peaks.get(name, 0))

    def _oom(self, record: Record) -> None:
        self._memory(record)
        self.oom = dict(record)
        self.oom.setdefault("caught", None)
        self.oom_was_last = True
        self.ooms = (self.ooms or 0) or 1
        self.phase = str(record.get("phase") or self.phase)
        self.step = max(self.step, _int(record.get("step")) or 0)
        self.capacity_bytes = self.capacity_bytes or _int(record.get("capacity_bytes"))

    def _exception(self, record: Record) -> None:
        if not record.get("main_thread", True) and self.exception is not None:
            return
        self.exception = dict(record)
        if self.oom is not None:
            if record.get("is_oom"):
                self.oom["caught"] = False
                self.oom["message"] = self.oom.get("message") or record.get("message")
            elif self.oom.get("caught") is None:
                self.oom["caught"] = True

    def _bye(self, record: Record) -> None:
        self.said_bye = True
        self.step = max(self.step, _int(record.get("steps")) or 0)
        if self.oom is not None and self.oom.get("caught") is None and self.exception is None:
            self.oom["caught"] = True

    def _peak(self, record: Record) -> None:
        self.peak = dict(record)
        self._memory({key: record.get(key) for key in ("peak_allocated_bytes", "peak_reserved_bytes")})

    def _gap(self, record: Record) -> None:
        self.lost_records += _int(record.get("lost")) or 0

    def _term(self, record: Record) -> None:
        self.term = _text(record.get("signal")) or "SIGTERM"
        self.term_ns = _int(record.get("t"))


def clock_offsets(records: Iterable[Record]) -> dict[int | None, int]:
    """Node -> ns to add to its clock, from nodes.jsonl; the last measurement counts."""
    offsets: dict[int | None, int] = {}
    for record in records:
        node, offset = _int(record.get("node")), _int(record.get("offset_ns"))
        if record.get("k") == "node" and node is not None and offset is not None:
            offsets[node] = offset
    return offsets


def choose_ranks(states: Iterable[RankState]) -> tuple[list[RankState], list[RankState]]:
    """Which processes are the ranks, sorted by rank, and which are others.

    Two processes may claim one number. A member of a group beats the script that spawned the group and counts
    as rank 0 of nothing (also where rank 0 of the group is not simulated); of two members, the one that
    started later is what torchrun restarted. And when a script only started another one that trains, the one
    that trains is rank 0.
    """
    ranks: dict[int, RankState] = {}
    others = []
    for state in states:
        if state.rank is None:
            others.append(state)
        elif state.rank not in ranks or _claim(state) > _claim(ranks[state.rank]):
            ranks[state.rank] = state
    first = ranks.get(0)
    if first is not None and len(ranks) > 1 and first.step == 0 and not _is_member(first):
        others.append(ranks.pop(0))
    if set(ranks) <= {0} and all(state.step == 0 for state in ranks.values()):
        trained = [state for state in others if state.step > 0]
        if trained:
            chosen = max(trained, key=lambda state: state.first_t)
            others.remove(chosen)
            chosen.rank = 0
            ranks[0] = chosen
    return [ranks[rank] for rank in sorted(ranks)], others


def _claim(state: RankState) -> tuple[bool, int]:
    return _is_member(state), state.first_t


def _is_member(state: RankState) -> bool:
    return (state.world_size or 1) > 1


_HANDLERS: dict[str, Callable[[RankState, Record], None]] = {
    "hello": RankState._hello,
    "rank": RankState._rank,
    "reading": RankState._reading,
    "step": RankState._step,
    "phase": RankState._phase,
    "phase_peak": RankState._phase_peak,
    "oom": RankState._oom,
    "exception": RankState._exception,
    "bye": RankState._bye,
    "peak": RankState._peak,
    "gap": RankState._gap,
    "term": RankState._term,
    "simulated": lambda state, record: setattr(state, "simulation", dict(record)),
    "model": lambda state, record: setattr(state, "model", dict(record)),
    "fix": lambda state, record: state.fixes.append(dict(record)),
    "snapshot": lambda state, record: state.snapshots.append(dict(record)),
    "note": lambda state, record: state.notes.append(dict(record)) if len(state.notes) < _MAX_NOTES else None,
    "agent_error": lambda state, record: state.agent_errors.append(dict(record)),
}


def _int(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _text(value: object) -> str | None:
    return value if isinstance(value, str) else None
