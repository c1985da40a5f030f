"""An attachment as one JSON object (`oomscope.attach/1`) and as lines of text."""

from __future__ import annotations

import os
import socket
from typing import Any

from oomscope.collect.base import State
from oomscope.collect.gpumap import Assignment
from oomscope.collect.stacks import StackDump, guess_from_locals, phase_of
from oomscope.launch.attach_session import AttachSession
from oomscope.launch.attachment import Attachment
from oomscope.units import format_bytes

SCHEMA = "oomscope.attach/1"
#: Innermost frames shown of a stack.
_MAX_FRAMES = 40


def attach_json(session: AttachSession) -> dict[str, Any]:
    """The whole attachment; sizes in bytes, null where not known."""
    gpus = session.gpus()
    job = session.job
    return {
        "schema": SCHEMA,
        "job": {
            "target": job.target,
            "name": job.name,
            "host": socket.gethostname(),
            "launcher": job.launcher,
            "run_id": job.run_id,
            "expected_local_ranks": job.expected_local,
            "session": str(session.session.path),
        },
        "ranks": [_rank(session, each, gpus.by_pid.get(each.rank.pid)) for each in session.ranks],
        "collectors": session.collectors(),
        "notes": [*job.problems, *gpus.notes, *_collector_notes(session), *_agent_notes(session)],
    }


def _collector_notes(session: AttachSession) -> list[str]:
    return [
        f"{name}: {status['why']}"
        for name, status in session.collectors().items()
        if status["state"] not in (State.OK.value, State.STARTING.value) and status["why"]
    ]


def _agent_notes(session: AttachSession) -> list[str]:
    """What agents say about themselves, the same sentence once."""
    said: dict[str, list[str]] = {}
    for each in session.ranks:
        state = session.state_of(each)
        for note in state.notes if state is not None else ():
            said.setdefault(str(note.get("text")), []).append(str(session.number_of(each)))
    return [f"rank {', '.join(ranks)}: {text}" for text, ranks in said.items()]


def _rank(session: AttachSession, each: Attachment, gpu: Assignment | None) -> dict[str, Any]:
    rank, state = each.rank, session.state_of(each)
    process = _host_row(session, rank.pid)
    guess = guess_from_locals(each.stack) if each.stack is not None else {}
    told = state is not None and (state.step > 0 or state.series.last_step >= 0)
    return {
        "rank": session.number_of(each),
        "local_rank": rank.local_rank,
        "world_size": rank.world_size,
        "pid": rank.pid,
        "start_ticks": rank.start_ticks,
        "source": rank.source,
        "container": rank.container,
        "workers": rank.workers,
        "ended": each.ended,
        "gpu_uuid": gpu.uuid if gpu is not None else None,
        "gpu_how": gpu.how if gpu is not None else "unknown",
        "gpu_used_bytes": gpu.used_bytes if gpu is not None else None,
        "rung": each.rung.value,
        "why_not_higher": each.why_not_higher,
        "agent": each.agent,
        "stack": _stack(each.stack),
        "stack_mode": each.stack.mode if each.stack is not None and each.stack.ok else None,
        "guess": guess,
        "step": state.step if state is not None and told else None,
        "phase": _phase(session, each),
        "loss": state.loss if state is not None else None,
        "allocated_bytes": state.allocated_bytes if state is not None else None,
        "reserved_bytes": state.reserved_bytes if state is not None else None,
        "peak_allocated_bytes": state.peak_allocated_bytes if state is not None else None,
        "capacity_bytes": state.capacity_bytes if state is not None else None,
        "rss_bytes": process.get("rss_bytes") or (state.rss_bytes if state is not None else None),
        "process_state": process.get("state"),
        "injected": _injected(each),
    }


def _injected(each: Attachment) -> dict[str, Any] | None:
    if each.report is None:
        return None
    report = each.report
    return {
        "by": report.injector,
        "state": report.state,
        "thread": report.thread_did or None,
        "stopped_us": round(report.stopped_us),
    }


def _phase(session: AttachSession, each: Attachment) -> str | None:
    state = session.state_of(each)
    if state is not None and state.phase != "other":
        return state.phase
    return phase_of(each.stack.main) if each.stack is not None and each.stack.main is not None else None


def _stack(dump: StackDump | None) -> list[dict[str, Any]]:
    """Frames of the main thread, innermost first."""
    thread = dump.main if dump is not None else None
    if thread is None:
        return []
    return [
        {"function": frame.function, "file": frame.file, "line": frame.line}
        for frame in thread.frames[:_MAX_FRAMES]
    ]


def _host_row(session: AttachSession, pid: int) -> dict[str, Any]:
    rows = session.machine.host.get("processes", ())
    return next((row for row in rows if row["pid"] == pid), {})


def attach_lines(session: AttachSession) -> list[str]:
    """The attachment for people, at most 110 columns where the reasons allow it."""
    value = attach_json(session)
    job = value["job"]
    head = (
        f"{job['name']}: {len(value['ranks'])} rank{'s' if len(value['ranks']) != 1 else ''} on {job['host']}"
    )
    if job["launcher"]:
        head += f", launcher {job['launcher']}"
    if job["run_id"] and job["run_id"] != "none":
        head += f", run id {job['run_id']}"
    lines = [
        head,
        "",
        f"{'rank':>4} {'pid':>8}  {'rung':<8} {'gpu':<18} {'gpu memory':>11} {'rss':>10} {'step':>7}  where",
    ]
    lines += [*map(_line, value["ranks"]), ""]
    by_reason: dict[str, list[str]] = {}
    for row in value["ranks"]:
        if row["why_not_higher"]:
            name = str(row["rank"]) if row["rank"] is not None else f"pid {row['pid']}"
            by_reason.setdefault(row["why_not_higher"], []).append(name)
    for reason, names in by_reason.items():
        lines.append(f"! rank {', '.join(names)}: {reason}")
    lines += [f"! {note}" for note in value["notes"]]
    lines.append(f"session {job['session']}")
    return lines


def _line(row: dict[str, Any]) -> str:
    gpu = (row["gpu_uuid"] or "-")[:12] + ("?" if "guess" in row["gpu_how"] else "")
    held = format_bytes(row["gpu_used_bytes"], 1) if row["gpu_used_bytes"] is not None else "-"
    rss = format_bytes(row["rss_bytes"], 1) if row["rss_bytes"] else "-"
    step = (
        row["step"]
        if row["step"] is not None
        else f"~{row['guess']['step']}"
        if "step" in row["guess"]
        else "-"
    )
    number = "?" if row["rank"] is None else row["rank"]
    where = "ended" if row["ended"] else _where(row)
    return f"{number:>4} {row['pid']:>8}  {row['rung']:<8} {gpu:<18} {held:>11} {rss:>10} {step:>7}  {where}"


def _where(row: dict[str, Any]) -> str:
    """Phase, and the innermost frame that is not torch's or the standard library's."""
    frames = row["stack"]
    own = [
        frame
        for frame in frames
        if "site-packages" not in frame["file"] and "/lib/python" not in frame["file"]
    ]
    frame = (own or frames or [None])[0]
    place = f"{os.path.basename(frame['file'])}:{frame['line']} {frame['function']}" if frame else ""
    return " ".join(part for part in (row["phase"], place) if part) or "-"
