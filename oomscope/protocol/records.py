"""The records that processes of the job and the supervisor append, one JSON object a line.

Each has `t` (UTC, nanoseconds since the epoch), `k` (kind) and `n` (sequence number within its file). Readers
skip kinds and fields they do not know, so fields may be added without a new version; a changed meaning needs
one.
"""

from __future__ import annotations

import json
from typing import Any, TypedDict

#: Version of the records; a reader refuses a larger one.
PROTOCOL_VERSION = 1

HELLO = "hello"
RANK = "rank"
READING = "reading"
STEP = "step"
PHASE = "phase"
PHASE_PEAK = "phase_peak"
OOM = "oom"
EXCEPTION = "exception"
SNAPSHOT = "snapshot"
FIX = "fix"
PEAK = "peak"
SIMULATED = "simulated"
MODEL = "model"
GAP = "gap"
AGENT_ERROR = "agent_error"
TERM = "term"
BYE = "bye"
ALARM = "alarm"
DUMP = "dump"
CHECKPOINT = "checkpoint"
CHILD = "child"
HOLDER = "holder"

#: Kinds that are written by the thread that made them, at once: the process may not live until the next
#: flush.
CRITICAL = frozenset(
    {
        HELLO,
        OOM,
        EXCEPTION,
        SNAPSHOT,
        PEAK,
        SIMULATED,
        MODEL,
        FIX,
        HOLDER,
        ALARM,
        DUMP,
        TERM,
        BYE,
        AGENT_ERROR,
    }
)

#: Phases of a training step, in PyTorch's own words.
PHASES = ("load", "init", "data", "forward", "backward", "optimizer", "eval", "save", "resume", "other")

#: Longest line that a reader accepts, in bytes: an OOM record with its frames is a few kB.
MAX_LINE_BYTES = 1 << 20


class Record(TypedDict, total=False):
    """The fields that every record has."""

    t: int
    k: str
    n: int


class Identity(TypedDict, total=False):
    """Who a process is in the job; None where it is not part of a group."""

    rank: int | None
    local_rank: int | None
    world_size: int | None
    local_world_size: int | None
    node_rank: int | None
    run_id: str | None
    restart: int | None


class Step(Record, total=False):
    """One finished optimizer step, counted from 0.

    Sizes in bytes; device sizes are None where there is no device.
    """

    step: int
    micro_steps: int
    low_allocated_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    reserved_bytes: int | None
    rss_bytes: int
    peak_rss_bytes: int
    loss: float | None
    input_numel: int | None
    duration_ns: int
    retries: int | None


class Reading(Record, total=False):
    """One sample of the process, taken twice a second by the agent's thread. Sizes in bytes."""

    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    device_free_bytes: int | None
    device_total_bytes: int | None
    retries: int | None
    ooms: int | None
    rss_bytes: int
    peak_rss_bytes: int
    step: int
    micro_step: int
    phase: str


_ENCODER = json.JSONEncoder(separators=(",", ":"), default=str, allow_nan=False)
_LENIENT = json.JSONEncoder(separators=(",", ":"), default=str)


def without_nan(value: Any) -> Any:
    """`value` with NaN and infinities as strings.

    JSON has no words for them and strict parsers refuse Python's.
    """
    if isinstance(value, float) and (value != value or value in (float("inf"), float("-inf"))):
        return repr(value)
    if isinstance(value, dict):
        return {key: without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    return value


def number(value: Any) -> float | None:
    """A number as `encode` wrote it: "nan", "inf" and "-inf" are numbers again; None for anything else."""
    if isinstance(value, bool):
        return None
    if isinstance(value, (int, float)) or value in ("nan", "inf", "-inf"):
        return float(value)
    return None


def encode(record: dict[str, Any]) -> bytes:
    """One line, newline included. NaN and infinite numbers become the strings "nan", "inf" and "-inf"."""
    try:
        text = _ENCODER.encode(record)
    except ValueError:
        text = _LENIENT.encode(without_nan(record))
    return text.encode("utf-8", "backslashreplace") + b"\n"
