"""What a launch came to, read from the records its processes left."""

from __future__ import annotations

import json
import signal as signals
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oomscope.live.state import RankState, choose_ranks, clock_offsets
from oomscope.protocol import layout
from oomscope.protocol.records import number
from oomscope.store.tail import iterate, read_records, record_files

#: Losses per rank in result.json: enough to compare two runs, and a bounded file.
MAX_STORED_LOSSES = 10_000


@dataclass(frozen=True)
class OomFact:
    """One out-of-memory error, caught before it unwound."""

    step: int
    phase: str
    requested_bytes: int | None
    device_free_bytes: int | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    capacity_bytes: int | None
    caught: bool
    """Training went on after it."""
    in_backward: bool
    message: str | None
    snapshot: str | None
    """Relative to the attempt."""


@dataclass(frozen=True)
class RankResult:
    """One rank's part; sizes in bytes, None on a job without a device."""

    rank: int
    steps: int
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    capacity_bytes: int | None
    peak_rss_bytes: int | None
    losses: list[float] = field(default_factory=list)
    """One per step that had one, in order."""
    peak_reserved_low_bytes: int | None = None
    """Of a simulated peak: what it may be at least and at most, as libraries choose the size of their workspaces."""
    peak_reserved_high_bytes: int | None = None
    peak_phase: str | None = None
    peak_composition: list[dict[str, Any]] = field(default_factory=list)
    assumed_values: dict[str, Any] = field(default_factory=dict)
    unsupported: list[str] = field(default_factory=list)
    oom: OomFact | None = None
    fixes: list[dict[str, Any]] = field(default_factory=list)
    state: str = "done"
    exception: str | None = None
    """Type and text of the exception that ended it."""
    world_size: int | None = None


@dataclass(frozen=True)
class JobResult:
    """The end of one launch."""

    exit_code: int
    """As a shell sees it: 128 + n after signal n."""
    signal: int | None
    duration_s: float
    first_failing_rank: int | None
    oom: bool
    """The job died of an out-of-memory error."""
    ranks: list[RankResult]
    timed_out: bool = False
    node: int | None = None
    """Number of the node this was, in a job that ran on others too; node 0 knows all ranks, the others theirs."""

    def to_json(self) -> dict[str, Any]:
        """result.json. A very long run keeps the first losses only; `steps` says how many there were."""
        value = asdict(self)
        for rank in value["ranks"]:
            rank["losses"] = rank["losses"][:MAX_STORED_LOSSES]
        return value


def read_outcome(
    attempt_dir: Path,
    *,
    exit_code: int,
    duration_s: float,
    timed_out: bool = False,
    node: int | None = None,
) -> JobResult:
    """Read the records of `attempt_dir` (an attempt or a prediction).

    Args:
        attempt_dir: folder with procs/.
        exit_code: as `subprocess` gives it.
        duration_s: wall time of the launch.
        timed_out: we ended it because its time was up.
        node: number of this node in a job of several nodes.

    Raises:
        SessionError: the records are of a newer version.
    """
    states, losses = _states(attempt_dir)
    ranks = [_rank_result(state, losses[state.file]) for state in states]
    first = first_failing(states, exit_codes(attempt_dir)) if exit_code != 0 else None
    died_of_oom = exit_code != 0 and any(_is_fatal_oom(state) for state in states)
    return JobResult(
        exit_code=128 - exit_code if exit_code < 0 else exit_code,
        signal=-exit_code if exit_code < 0 else None,
        duration_s=duration_s,
        first_failing_rank=first.rank if first is not None else None,
        oom=died_of_oom,
        ranks=ranks,
        timed_out=timed_out,
        node=node,
    )


def first_failing(states: Iterable[RankState], codes: Mapping[int, int] | None = None) -> RankState | None:
    """The rank whose trouble began first, by our own clock; clocks of other nodes are set right before.

    torchrun names the smallest time in whole seconds and often blames a victim: a rank that lost its peer. So
    a lost connection is never the cause while somebody else failed otherwise, and a rank that vanished
    without a word (killed by the system for host memory, say) is the cause when all others are victims.

    Args:
        states: the ranks at the end.
        codes: rank -> exit code, where the launcher told them.
    """
    states = list(states)
    causes = [state for state in states if _failure_time(state) is not None and not is_victim(state)]
    if causes:
        return min(causes, key=lambda state: (_failure_time(state) or 0, state.rank or 0))
    victims = [state for state in states if _failure_time(state) is not None]
    vanished = [state for state in states if state.state == "lost" or _was_ended_first(state, victims)]
    if codes:
        vanished = [
            state for state in vanished if codes.get(state.rank or 0) not in (0, -signals.SIGTERM)
        ] or vanished
    if vanished:
        return min(vanished, key=lambda state: (state.last_t + state.clock_offset_ns, state.rank or 0))
    return min(victims, key=lambda state: (_failure_time(state) or 0, state.rank or 0), default=None)


def _was_ended_first(state: RankState, victims: Iterable[RankState]) -> bool:
    """Whether somebody told this rank to end before any other one failed; a launcher tells the others afterwards."""
    times = [time for each in victims if (time := _failure_time(each)) is not None]
    if state.state != "stopped" or state.term_ns is None or not times:
        return False
    return state.term_ns + state.clock_offset_ns < min(times)


def exit_codes(attempt_dir: Path) -> dict[int, int]:
    """Rank -> exit code as torchrun told it (elastic.jsonl), negative for a signal.

    {} for other launchers.
    """
    codes: dict[int, int] = {}
    files = [attempt_dir / layout.ELASTIC_FILE, *sorted(attempt_dir.glob("elastic-node*.jsonl"))]
    for record in (each for file in files for each in read_records(file)):
        event = record.get("event")
        metadata = event.get("metadata") if isinstance(event, Mapping) else None
        if not isinstance(metadata, Mapping) or not isinstance(metadata.get("global_rank"), int):
            continue
        try:
            details = json.loads(str(metadata.get("metadata")))
            code = details["exit_code"][0]
        except (ValueError, KeyError, IndexError, TypeError):
            continue
        if isinstance(code, int):
            codes[metadata["global_rank"]] = code
    return codes


#: Texts of errors that a rank gets because another one is gone. Source: gloo, NCCL and c10d messages.
_VICTIM_TEXTS = (
    "Connection closed by peer",
    "Connection reset by peer",
    "Broken pipe",
    "Socket Timeout",
    "Timed out waiting",
    "remote process exited",
    "NCCL communicator was aborted",
    "Connection refused",
    "connectFullMesh",
    "failed to recv, got 0 bytes",
)


def is_victim(state: RankState) -> bool:
    """Whether its exception only says that another rank is gone."""
    if state.exception is None or state.exception.get("is_oom"):
        return False
    message = str(state.exception.get("message"))
    return any(text in message for text in _VICTIM_TEXTS)


def _failure_time(state: RankState) -> int | None:
    times = []
    if state.exception is not None:
        times.append(state.exception.get("t"))
    if state.oom is not None and not state.oom.get("caught"):
        times.append(state.oom.get("t"))
    known = [t for t in times if isinstance(t, int)]
    return min(known) + state.clock_offset_ns if known else None


def _is_fatal_oom(state: RankState) -> bool:
    """Whether a rank of a job that failed died of it, be it that the script caught the error only to exit."""
    if state.exception is not None:
        return bool(state.exception.get("is_oom"))
    return state.oom is not None and (state.oom_was_last or not state.oom.get("caught"))


def _states(attempt_dir: Path) -> tuple[list[RankState], dict[str, list[float]]]:
    """The states of the ranks (helpers left out), sorted by rank; and each file's losses."""
    states = []
    losses: dict[str, list[float]] = {}
    offsets = clock_offsets(read_records(attempt_dir / layout.NODES_FILE))
    for path in record_files(attempt_dir):
        state = RankState(file=path.name)
        values = losses[path.name] = []
        for record in iterate(path):
            state.take(record)
            loss = number(record.get("loss")) if record.get("k") == "step" else None
            if loss is not None:
                values.append(loss)
        state.clock_offset_ns = offsets.get(state.node_rank, 0)
        state.refresh(alive=False)
        states.append(state)
    return choose_ranks(states)[0], losses


def _rank_result(state: RankState, losses: list[float]) -> RankResult:
    peak: Mapping[str, Any] = state.peak or {}
    simulation: Mapping[str, Any] = state.simulation or {}
    phase = peak.get("phase") or max(state.phase_peaks, key=state.phase_peaks.__getitem__, default=None)
    exception = state.exception
    return RankResult(
        rank=state.rank or 0,
        steps=state.step,
        peak_allocated_bytes=state.peak_allocated_bytes,
        peak_reserved_bytes=state.peak_reserved_bytes,
        capacity_bytes=state.capacity_bytes,
        peak_rss_bytes=state.peak_rss_bytes,
        losses=losses,
        peak_reserved_low_bytes=peak.get("peak_reserved_low_bytes"),
        peak_reserved_high_bytes=peak.get("peak_reserved_high_bytes"),
        peak_phase=phase,
        peak_composition=list(peak.get("composition") or []),
        assumed_values=dict(simulation.get("assumed_values") or {}),
        unsupported=list(simulation.get("unsupported") or []),
        oom=_oom_fact(state.oom) if state.oom is not None else None,
        fixes=list(state.fixes),
        state=state.state,
        exception=f"{exception.get('type')}: {exception.get('message')}" if exception is not None else None,
        world_size=state.world_size,
    )


def _oom_fact(record: Mapping[str, Any]) -> OomFact:
    return OomFact(
        step=record.get("step") or 0,
        phase=str(record.get("phase") or "other"),
        requested_bytes=record.get("requested_bytes"),
        device_free_bytes=record.get("device_free_bytes"),
        allocated_bytes=record.get("allocated_bytes"),
        reserved_bytes=record.get("reserved_bytes"),
        capacity_bytes=record.get("capacity_bytes"),
        caught=bool(record.get("caught")),
        in_backward=bool(record.get("in_backward")),
        message=record.get("message"),
        snapshot=record.get("snapshot"),
    )
