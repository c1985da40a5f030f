"""History rows to columns, in chunks: one pass over the dictionaries while they are in the processor's cache.

Rows that all have the keys of the first one go through C-level iterators; a chunk in which one does not is
read again row by row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import repeat
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.columns import ACTION_CODES, NO_STACK, Action, Events
from oomscope.core.snapshot.intern import Interner, brief
from oomscope.core.snapshot.notes import Notes
from oomscope.errors import SnapshotError

CHUNK = 16_384
"""Rows at a time; their dictionaries are about 6 MB, which a second-level cache nearly holds."""

OPTIONAL = {
    "pool_id": ("pool", "pool", np.int16),
    "compile_context": ("compile_context", "text", np.int32),
    "user_metadata": ("user_metadata", "text", np.int32),
    "category": ("category", "text", np.int32),
    "forward_frames": ("forward_stack", "formatted_stack", np.int32),
}
"""Key of a row -> (column, kind of `Interner` number, type); the column exists only if a row has the key."""

Columns = dict[str, NDArray[Any]]


class EventsBuilder:
    """Collects chunks of rows, in order, and joins them into `Events`."""

    def __init__(self, interner: Interner, notes: Notes, where: str) -> None:
        self._interner = interner
        self._notes = notes
        self._where = where
        self._chunks: list[Columns] = []
        self._rows = 0

    def add_rows(self, rows: Sequence[Any]) -> None:
        """Append rows in torch's form.

        Raises:
            SnapshotError: a row is not a dictionary, or a number in it is none.
        """
        for start in range(0, len(rows), CHUNK):
            chunk = rows[start : start + CHUNK]
            try:
                columns = self._uniform(chunk)
            except (KeyError, TypeError, ValueError, OverflowError, AttributeError):
                columns = self._one_by_one(chunk)
            self.add_columns(columns)

    def add_columns(self, columns: Columns) -> None:
        """Append rows that are columns already (numbers of this builder's interner)."""
        self._chunks.append(columns)
        self._rows += len(columns["action"])

    def build(self) -> Events:
        if not self._chunks:
            return Events.empty()
        names = {name for chunk in self._chunks for name in chunk}
        joined = {name: self._join(name) for name in sorted(names)}
        return Events(**joined)

    def _join(self, name: str) -> NDArray[Any]:
        parts = [
            chunk[name] if name in chunk else np.full(len(chunk["action"]), -1, _optional_type(name))
            for chunk in self._chunks
        ]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _uniform(self, rows: Sequence[Any]) -> Columns:
        """Columns of rows that have all keys of the first one; KeyError or another error when one has not."""
        count, first = len(rows), rows[0]
        if "addr" not in first or type(first.get("frames", [])) is not list:
            raise KeyError("addr")
        extra = [key for key in first if key in OPTIONAL]
        keys = ["action", "addr", "size", "stream"]
        keys += [key for key in ("time_us", "frames") if key in first] + extra
        values = dict(zip(keys, zip(*map(itemgetter(*keys), rows), strict=True), strict=True))
        if set(map(len, rows)) != {len(first)}:
            raise KeyError("rows differ")
        columns: Columns = {
            "action": np.fromiter(map(ACTION_CODES.__getitem__, values["action"]), np.uint8, count),
            "address": np.fromiter(values["addr"], np.int64, count),
            "size": np.fromiter(values["size"], np.int64, count),
            "stream": self._numbers(values["stream"], "stream", np.int32),
            "time_us": np.fromiter(values.get("time_us", repeat(0, count)), np.int64, count),
            "stack": self._stacks(values["frames"])
            if "frames" in values
            else np.full(count, NO_STACK, np.int32),
        }
        if set(map(type, values["addr"] + values["size"])) != {int}:
            raise TypeError("not integers")
        for key in extra:
            name, kind, dtype = OPTIONAL[key]
            columns[name] = self._numbers(values[key], kind, dtype)
        return columns

    def _stacks(self, lists: tuple[Any, ...]) -> NDArray[np.int32]:
        by_identity = dict(zip(map(id, lists), lists, strict=True))
        known = self._interner.stack_of_list
        for key in by_identity.keys() - known.keys():
            self._interner.stack(by_identity[key])
        return np.fromiter(map(known.__getitem__, map(id, lists)), np.int32, len(lists))

    def _numbers(self, values: tuple[Any, ...], kind: str, dtype: type) -> NDArray[Any]:
        """Interned numbers; the few distinct values of a chunk are interned once each."""
        one = getattr(self._interner, kind)
        try:
            distinct: dict[Any, int] = {value: one(value) for value in set(values)}
        except TypeError:  # lists cannot be keys
            return np.fromiter(map(one, values), dtype, len(values))
        return np.fromiter(map(distinct.__getitem__, values), dtype, len(values))

    def _one_by_one(self, rows: Sequence[Any]) -> Columns:
        """Columns of rows with differing keys; tolerant where the schema allows it."""
        present = [key for key in OPTIONAL if any(type(row) is dict and key in row for row in rows)]
        names = ["action", "address", "size", "stream", "time_us", "stack"]
        table = np.empty((len(names) + len(present), len(rows)), np.int64)
        for number, row in enumerate(rows):
            where = f"{self._where}[{self._rows + number}]"
            if type(row) is not dict:
                raise SnapshotError(f"{where} is {_kind(row)}, not a row of the history")
            table[: len(names), number] = self._row(row, where)
            for offset, key in enumerate(present):
                kind = OPTIONAL[key][1]
                table[len(names) + offset, number] = self._one(kind, row.get(key), where)
        columns: Columns = {name: table[number].copy() for number, name in enumerate(names)}
        columns["action"] = columns["action"].astype(np.uint8)
        columns["stream"] = columns["stream"].astype(np.int32)
        columns["stack"] = columns["stack"].astype(np.int32)
        for offset, key in enumerate(present):
            name, _, dtype = OPTIONAL[key]
            columns[name] = table[len(names) + offset].astype(dtype)
        return columns

    def _row(self, row: dict[Any, Any], where: str) -> tuple[int, ...]:
        action = row.get("action")
        code = ACTION_CODES.get(action, int(Action.UNKNOWN)) if type(action) is str else int(Action.UNKNOWN)
        if code == Action.UNKNOWN:
            self._notes.add(
                "unknown-action", f"{where} has the action {brief(action)}, which is not known here"
            )
        address = row["addr"] if "addr" in row else row.get("device_free", -1)
        return (
            code,
            integer(address, where, "addr"),
            integer(row.get("size", 0), where, "size"),
            self._one("stream", row.get("stream", 0), where),
            integer(row.get("time_us", 0), where, "time_us"),
            self._interner.stack(row.get("frames")),
        )

    def _one(self, kind: str, value: object, where: str) -> int:
        try:
            number: int = getattr(self._interner, kind)(value)
        except ValueError as error:
            raise SnapshotError(f"{where}: {error}") from error
        return number


def parse_events(rows: object, interner: Interner, notes: Notes, where: str) -> Events:
    """Columns of one device's history.

    Args:
        rows: torch's list of row dictionaries.
        interner: collects the shared tables.
        notes: collects warnings.
        where: name of the list in messages, such as "device_traces[0]".

    Raises:
        SnapshotError: not a list of rows.
    """
    if not isinstance(rows, (list, tuple)):
        raise SnapshotError(f"{where} is {_kind(rows)}, not a list")
    builder = EventsBuilder(interner, notes, where)
    builder.add_rows(rows)
    return builder.build()


def integer(value: object, where: str, name: str) -> int:
    """`value` as a 64-bit integer; None counts as 0.

    Raises:
        SnapshotError: something else.
    """
    if value is None:
        return 0
    if isinstance(value, int) and -(1 << 63) <= value < 1 << 63:
        return int(value)
    if isinstance(value, float) and value.is_integer() and abs(value) < 1 << 53:
        return int(value)
    raise SnapshotError(f"{where}: {name} is {brief(value)}, not a 64-bit integer")


def _kind(value: object) -> str:
    return f"of type {type(value).__name__}"


def _optional_type(name: str) -> type:
    return next(dtype for column, _, dtype in OPTIONAL.values() if column == name)
