"""Everything that a session folder knows about one attempt, as evidence for the diagnosis.

What is missing stays missing: a job without snapshot, without steps or without a device is judged on what it
has, and the diagnosis says what would decide it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.evidence import Evidence, ModelFact, OomFact, RankFact, Settings, Signal
from oomscope.core.diagnosis.log import LogReading, LogScanner
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.messages import parse_text
from oomscope.core.diagnosis.signals import from_frames
from oomscope.core.series.trend import judge
from oomscope.errors import SessionError
from oomscope.live import evidence_host as host_of
from oomscope.live import evidence_ranks as ranks_of
from oomscope.live.evidence_recovery import recovery
from oomscope.live.evidence_snapshot import SnapshotFacts, read_snapshot
from oomscope.live.evidence_source import adding_line, find_script, inspect, with_source
from oomscope.live.session import log_files
from oomscope.live.state import clock_offsets
from oomscope.protocol import layout
from oomscope.store.files import read_json
from oomscope.store.tail import read_attempt, read_records

_CHUNK = 1 << 20
_MAX_LOG_BYTES = 256 << 20
"""Of each log file only the end is read beyond this."""


def collect(path: Path | str, rank: int | None = None) -> Evidence:
    """Evidence of an attempt folder, or of a session's newest attempt that ran out of memory, else of its newest.

    Args:
        path: attempts/NNN, or the session folder.
        rank: judge this rank; default: the one that failed first, else the fullest.

    Raises:
        SessionError: no attempt there, or written by a newer oomscope.
    """
    folder = _attempt_folder(Path(path))
    by_file = one_clock(read_attempt(folder), folder)
    info = read_json(folder / layout.ATTEMPT_FILE) or {}
    result = read_json(folder / layout.RESULT_FILE) or {}
    files = {name: records for name, records in by_file.items() if _is_rank(name, records)}
    known = {name: ranks_of.rank_fact(records) for name, records in files.items()}
    chosen = _choose(known, rank, result.get("first_failing_rank"))
    records = files[chosen] if chosen is not None else []
    judged = known[chosen] if chosen is not None else None
    reading = _read_logs(folder)
    evidence = Evidence(
        sources=("session",),
        attempt=_number(folder),
        ranks=tuple(sorted(known.values(), key=lambda fact: (fact.rank is None, fact.rank or 0))),
        rank=judged,
        oom=judged.oom if judged is not None else None,
        exception=judged.exception if judged is not None else None,
        finished=result.get("exit_code") == 0 if "exit_code" in result else None,
    )
    evidence = _with_series(evidence)
    evidence = _with_records(evidence, records)
    evidence = _with_messages(evidence, reading)
    hello = ranks_of.last(records, "hello")
    evidence = _with_source(evidence, find_script(info, dict(hello) if hello else None))
    evidence = _with_settings(evidence, hello or {}, info)
    host = str((hello or {}).get("host") or "")
    there = [
        name for name in files if not host or (ranks_of.last(files[name], "hello") or {}).get("host") == host
    ]
    evidence = _with_outside(
        evidence, folder, [files[name] for name in there], [known[name] for name in there], result, host
    )
    return _with_snapshot(evidence, folder, records)


def one_clock(by_file: dict[str, list[dict[str, Any]]], folder: Path) -> dict[str, list[dict[str, Any]]]:
    """The records with the times of other nodes' ranks on the clock of node 0."""
    offsets = clock_offsets(read_records(folder / layout.NODES_FILE))
    if not offsets:
        return by_file
    shifted = {}
    for name, records in by_file.items():
        hello = ranks_of.last(records, "hello") or {}
        identity = hello.get("identity")
        node = identity.get("node_rank") if isinstance(identity, dict) else None
        by = offsets.get(node, 0)
        shifted[name] = [
            {**each, "t": each["t"] + by} if by and isinstance(each.get("t"), int) else each
            for each in records
        ]
    return shifted


def _attempt_folder(path: Path) -> Path:
    if (path / layout.PROCS_DIR).is_dir():
        return path
    attempts = path / layout.ATTEMPTS_DIR
    numbered = [each for each in attempts.glob("[0-9]*") if each.is_dir()] if attempts.is_dir() else []
    if not numbered:
        raise SessionError(
            f"{path} holds no attempt of oomscope", hint="oomscope sessions lists the sessions"
        )
    numbered.sort(key=lambda each: int(each.name) if each.name.isdigit() else -1)
    failed = [each for each in numbered if (read_json(each / layout.RESULT_FILE) or {}).get("oom")]
    return (failed or numbered)[-1]


def _number(folder: Path) -> int | None:
    return int(folder.name) if folder.name.isdigit() else None


def _is_rank(name: str, records: Sequence[ranks_of.Record]) -> bool:
    """Helper processes (loader workers, compilers) write files too; they are no ranks."""
    parsed = layout.parse_proc_file(name)
    if parsed is not None and parsed.rank is not None:
        return True
    return any(record.get("k") in ("step", "oom", "exception", "rank") for record in records)


def _choose(known: dict[str, RankFact], rank: int | None, first_failing: object = None) -> str | None:
    """The file of `rank`; without one, of the first that ran out of memory, else of the first that failed at all."""
    if rank is not None:
        return next((name for name, fact in known.items() if fact.rank == rank), None)
    failed = {name: fact for name, fact in known.items() if fact.oom is not None}
    failed = failed or {
        name: f for name, f in known.items() if f.exception is not None and f.exception.is_oom
    }
    if not failed:  # a rank that was killed left no error; those that lost it did
        found = next((name for name, fact in known.items() if fact.rank == first_failing), None)
        if found is not None and first_failing is not None:
            return found
    failed = failed or {name: f for name, f in known.items() if f.failed}
    if failed:
        return min(failed, key=lambda name: failed[name].failed_ns or 1 << 62)
    return max(known, key=lambda name: known[name].peak_reserved_bytes or 0, default=None)


def _with_series(e: Evidence) -> Evidence:
    rows = e.rank.steps if e.rank is not None else ()
    if not rows:
        return e
    steps = [row.step for row in rows]
    on_device = any(row.low is not None for row in rows)
    return replace(
        e,
        trend=judge(steps, [row.low for row in rows]) if on_device else None,
        peak_trend=judge(steps, [row.peak for row in rows]) if on_device else None,
        reserved_trend=judge(steps, [row.reserved for row in rows]) if on_device else None,
        # A simulated device keeps its books in the process's own memory, which says nothing about the job.
        rss_trend=None
        if e.rank is not None and e.rank.simulated
        else judge(steps, [row.rss for row in rows]),
    )


def _with_records(e: Evidence, records: Sequence[ranks_of.Record]) -> Evidence:
    model, peak = ranks_of.last(records, "model"), ranks_of.last(records, "peak")
    fact: ModelFact | None = ranks_of.model_fact(model) if model is not None else None
    ranked = [r for r in e.ranks if r.failed_ns is not None and r.oom is not None]
    first = min(ranked, key=lambda r: r.failed_ns or 0) if ranked else None
    return replace(
        e,
        model=fact,
        composition=ranks_of.composition(peak) if peak is not None else (),
        recovered=recovery(records, finished=e.finished, timed=e.rank is None or not e.rank.simulated),
        holders=tuple(adding_line(holder) for holder in ranks_of.holder_facts(records)),
        first_rank=first.rank if first is not None else None,
        first_rank_reason="earliest record" if first is not None and len(e.ranks) > 1 else "",
    )


def _read_logs(folder: Path) -> LogReading:
    """The texts of the job's own output, all files of the attempt one after the other."""
    scanner = LogScanner()
    for log in log_files(folder):
        try:
            with open(log.path, "rb") as stream:
                size = log.path.stat().st_size
                stream.seek(max(0, size - _MAX_LOG_BYTES))
                while chunk := stream.read(_CHUNK):
                    scanner.feed(chunk)
                scanner.feed(b"\n")
        except OSError:
            continue
    return scanner.finish()


def _with_messages(e: Evidence, reading: LogReading) -> Evidence:
    messages = list(reading.messages)
    text = e.exception.message if e.exception is not None and e.exception.is_oom else ""
    rank = e.rank.rank if e.rank is not None else None
    said = parse_text(f"{e.exception.type}: {text}") if text and e.exception else []
    own = [replace(m, rank=rank, line=None) for m in said if m.is_oom]
    if own and not any(_same(own[0], m) for m in messages):
        messages.append(own[0])
    events = [m for m in messages if m.is_oom]
    mine = own or [m for m in events if rank is not None and m.rank == rank] or events
    message = mine[0] if mine and (e.oom is not None or e.exception is not None or not e.finished) else None
    first = e.first_rank if e.first_rank is not None else reading.first_rank
    return replace(
        e,
        messages=tuple(messages),
        message=message,
        arithmetic=analyse(message) if message is not None else None,
        first_rank=first,
        first_rank_reason=e.first_rank_reason or (reading.first_rank_reason if first is not None else ""),
    )


def _same(one: OomMessage, other: OomMessage) -> bool:
    return (
        one.kind == other.kind
        and one.tried_bytes == other.tried_bytes
        and one.allocated_bytes == other.allocated_bytes
    )


def _with_source(e: Evidence, script: Path | None) -> Evidence:
    frames = (*(e.oom.frames if e.oom else ()), *(e.exception.frames if e.exception else ()))
    lint, signals = inspect(script, (frame.file for frame in frames))
    on_stack = from_frames(map(with_source, frames), "traceback") if frames else ()
    return replace(
        e, script=str(script) if script else None, lint=lint, signals=(*e.signals, *signals, *on_stack)
    )


def _with_settings(e: Evidence, hello: ranks_of.Record, info: dict[str, Any]) -> Evidence:
    found = hello.get("env")
    environment = found if isinstance(found, dict) else {}
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    conf = next((str(environment[name]) for name in names if environment.get(name)), "")
    settings = Settings(
        raw=conf,
        expandable="expandable_segments:true" in conf.lower().replace(" ", ""),
        max_split="max_split_size_mb" in conf,
        gc_threshold="garbage_collection_threshold" in conf,
    )
    version = hello.get("torch")
    fixes = info.get("fixes") or (info.get("plan") or {}).get("fixes") or []
    applied = [str(f.get("id") if isinstance(f, dict) else f) for f in fixes if isinstance(fixes, list)]
    signals = tuple(Signal(f"fix:{each}", f"this attempt runs with {each}", "attempt") for each in applied)
    return replace(
        e,
        settings=settings,
        torch_version=version if isinstance(version, str) else None,
        signals=(*e.signals, *signals),
    )


def _with_outside(
    e: Evidence,
    folder: Path,
    files: Sequence[Sequence[ranks_of.Record]],
    facts: Sequence[RankFact],
    result: dict[str, Any],
    host: str,
) -> Evidence:
    """What the collectors of `host` saw. On a simulated card the machine's own GPUs have no part in it."""
    records = host_of.read_host(folder, host)
    own = host_of.pids(files, facts)
    simulated = any(fact.simulated for fact in facts)
    return replace(
        e,
        host=host_of.host_fact(records, own, result),
        processes=() if simulated else host_of.process_facts(records, own, host_of.ordinals(files)),
        outcomes=host_of.outcomes(folder),
        packed_need_bytes=host_of.packed_need_bytes(folder),
    )


def _with_snapshot(e: Evidence, folder: Path, records: Sequence[ranks_of.Record]) -> Evidence:
    name = None
    for record in records:
        if record.get("k") == "snapshot" and isinstance(record.get("path"), str):
            name = record["path"] if record.get("reason") == "oom" or name is None else name
    if name is None:
        return e
    path = (folder / name).resolve()
    if not path.is_relative_to(folder.resolve()) or not path.is_file():
        return replace(e, notes=(*e.notes, f"no snapshot at {name}"))
    found = read_snapshot(
        path,
        device=e.oom.device if e.oom is not None else None,
        steps=e.rank.steps if e.rank is not None else (),
        oom=e.oom,
    )
    return with_snapshot_facts(e, found)


def with_snapshot_facts(e: Evidence, found: SnapshotFacts) -> Evidence:
    """`e` with what a snapshot adds; what the observer saw stays."""
    settings = found.settings or e.settings
    if found.settings is not None and e.settings is not None and found.settings.expandable is None:
        settings = e.settings
    oom: OomFact | None = e.oom or found.oom
    return replace(
        e,
        sources=(*e.sources, "snapshot"),
        oom=oom,
        live=found.live,
        growth=found.growth,
        allocator=found.allocator,
        settings=settings,
        torch_version=e.torch_version or found.torch_version,
        notes=(*e.notes, *found.notes),
    )
