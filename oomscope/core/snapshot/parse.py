"""From torch's own objects (lists and dictionaries, as unpickled) to a `Snapshot`.

The schema grew from torch 2.0 to 2.13 and files are cut, edited and made by other tools; so every key may be
missing and unknown keys are
left alone. What cannot be a snapshot raises `SnapshotError`; what only limits the answer becomes a warning.
Nothing here recurses: a
hostile file may nest lists 200,000 deep.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from oomscope.core.snapshot.columns import Annotations, Events
from oomscope.core.snapshot.identity import Identity
from oomscope.core.snapshot.intern import Interner, brief, clean_text
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.core.snapshot.notes import Notes
from oomscope.core.snapshot.parse_events import OPTIONAL, EventsBuilder, integer
from oomscope.core.snapshot.parse_segments import MAX_DEVICES, empty_tables, parse_segments
from oomscope.core.snapshot.version import oldest_version, torch_version
from oomscope.errors import SnapshotError

KNOWN_KEYS = ("segments", "device_traces", "allocator_settings", "external_annotations")
MAX_SETTING_KEYS = 1000


def parse_snapshot(
    raw: object, *, name: str = "", identity: Identity | None = None, runs: Any = None
) -> Snapshot:
    """Columns of an unpickled snapshot.

    Args:
        raw: what `torch.cuda.memory._snapshot()` returns (a dictionary), or the bare list of segments of
            `torch.cuda.memory_snapshot()`.
        name: file name for messages and titles.
        identity: rank, step and process id when the caller knows them.
        runs: rows that a scanner took out of the stream before unpickling (`ScannedRows`); an integer in place of a
            row stands for the run of that number.

    Raises:
        SnapshotError: not a snapshot; the message says which part is not.
    """
    if isinstance(raw, (list, tuple)):
        if raw and type(raw[0]) is not dict:
            raise SnapshotError(f"holds a list of {type(raw[0]).__name__}, not a memory snapshot", hint=_HINT)
        raw = {"segments": raw}
    if type(raw) is not dict:
        raise SnapshotError(f"holds {_describe(raw)}, not a memory snapshot", hint=_HINT)
    if "segments" not in raw and "device_traces" not in raw:
        keys = ", ".join(sorted(brief(key) for key in list(raw)[:5])) or "none"
        raise SnapshotError(f'has neither "segments" nor "device_traces" (keys: {keys})', hint=_HINT)
    interner, notes = Interner(), Notes()
    interner.pool((0, 0))
    if runs is not None:
        interner.taken = runs.taken
    tables = parse_segments(raw.get("segments", []), interner, notes)
    events = _traces(raw.get("device_traces", []), interner, notes, runs)
    annotations = _annotations(raw.get("external_annotations", []), interner, notes)
    count = max([len(events), *(device + 1 for device in tables)], default=0)
    devices = []
    for device in range(count):
        segments, blocks = tables.get(device) or empty_tables()
        rows = events[device] if device < len(events) else Events.empty()
        devices.append(DeviceSnapshot(device, segments, blocks, rows))
    if interner.bad_frames:
        notes.add("bad-frames", "frames that are not of torch's form were left out", interner.bad_frames)
    return Snapshot(
        name=name,
        devices=devices,
        stacks=interner.table(),
        streams=interner.streams,
        pools=interner.pools,
        texts=interner.texts,
        settings=_settings(raw.get("allocator_settings"), notes),
        annotations=annotations,
        torch_at_least=oldest_version(raw, _event_keys(events)),
        torch_version=torch_version(interner.frames, raw),
        keys=tuple(clean_text(key)[:100] for key in list(raw)[:100]),
        identity=identity or Identity(),
        warnings=notes.warnings(),
    )


_HINT = "save one with torch.cuda.memory._dump_snapshot(path)"


def _describe(raw: object) -> str:
    return "nothing" if raw is None else f"an object of type {type(raw).__name__}"


def _traces(raw: object, interner: Interner, notes: Notes, runs: Any) -> list[Events]:
    if not isinstance(raw, (list, tuple)):
        raise SnapshotError(f"device_traces is of type {type(raw).__name__}, not a list")
    if len(raw) > MAX_DEVICES:
        raise SnapshotError(f"device_traces has {len(raw)} devices")
    return [
        _trace(rows, interner, notes, f"device_traces[{device}]", runs) for device, rows in enumerate(raw)
    ]


def _event_keys(traces: list[Events]) -> set[str]:
    """Keys that rows of some trace have, of those that came later than others."""
    columns = {key: column for key, (column, _, _) in OPTIONAL.items()}
    found = {
        key for key, column in columns.items() if any(getattr(each, column) is not None for each in traces)
    }
    return found | ({"time_us"} if any(each.has_times for each in traces) else set())


def _trace(rows: object, interner: Interner, notes: Notes, where: str, runs: Any) -> Events:
    if not isinstance(rows, (list, tuple)):
        raise SnapshotError(f"{where} is of type {type(rows).__name__}, not a list")
    builder = EventsBuilder(interner, notes, where)
    if runs is None:
        builder.add_rows(rows)
        return builder.build()
    start = 0
    for number, row in enumerate(rows):
        if type(row) is int:
            builder.add_rows(rows[start:number])
            builder.add_columns(runs.columns(row, interner))
            start = number + 1
    builder.add_rows(rows[start:])
    return builder.build()


def _annotations(raw: object, interner: Interner, notes: Notes) -> Annotations:
    if not isinstance(raw, (list, tuple)):
        notes.add(
            "bad-annotations", f"external_annotations is of type {type(raw).__name__}, not a list; ignored"
        )
        return Annotations()
    rows = []
    for number, row in enumerate(raw):
        if type(row) is not dict or row.get("stage") not in ("START", "END"):
            notes.add("bad-annotations", f"external_annotations[{number}] is not of torch's form; ignored")
            continue
        where = f"external_annotations[{number}]"
        device = integer(row.get("device", 0), where, "device")
        time = integer(row.get("time_us", 0), where, "time_us")
        rows.append(
            (
                row["stage"] == "START",
                interner.text(row.get("name", "")),
                max(-1, min(device, MAX_DEVICES)),
                time,
            )
        )
    table = np.array(rows, np.int64).reshape(-1, 4).T.copy()
    return Annotations(
        table[0].astype(np.bool_), table[1].astype(np.int32), table[2].astype(np.int32), table[3]
    )


def _settings(raw: object, notes: Notes) -> dict[str, Any]:
    """`allocator_settings` reduced to what JSON can hold, two levels deep."""
    if raw is None:
        return {}
    if type(raw) is not dict:
        notes.add("bad-settings", f"allocator_settings is of type {type(raw).__name__}; ignored")
        return {}
    return {clean_text(key): _setting(value) for key, value in list(raw.items())[:MAX_SETTING_KEYS]}


def _setting(value: object, depth: int = 0) -> Any:
    if type(value) is dict and depth == 0:
        return {clean_text(key): _setting(item, 1) for key, item in list(value.items())[:MAX_SETTING_KEYS]}
    if value is None or isinstance(value, (bool, int)):
        return value
    if isinstance(value, float):
        return value if np.isfinite(value) else None
    return clean_text(value) if isinstance(value, str) else f"<{type(value).__name__}>"
