"""Runs of rows that `scan` decoded, as columns of the history."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.columns import ACTION_CODES, NO_STACK, IntArray
from oomscope.core.snapshot.intern import Interner
from oomscope.core.snapshot.parse_events import OPTIONAL
from oomscope.core.snapshot.row_layouts import INTEGER, NOTHING, PAIR, REFERENCE
from oomscope.core.snapshot.scan import Run, Scanned, Unscannable


class ScannedRows:
    """Turns references back into what they refer to."""

    def __init__(self, scanned: Scanned, objects: list[Any]) -> None:
        if len(objects) != len(scanned.references):
            raise Unscannable("references do not match")
        self._runs: list[Run | None] = list(scanned.runs)
        self._objects = dict(zip(scanned.references.tolist(), objects, strict=True))
        self._highest = int(scanned.references[-1])
        self._taken: list[Any] = [
            one if isinstance(one, str) else [self._object(each) for each in one] for one in scanned.taken
        ]
        """Kept, because an interner knows lists by identity."""
        self._tables: dict[str, NDArray[np.int32]] = {}

    def columns(self, number: int, interner: Interner) -> dict[str, NDArray[Any]]:
        """Columns of a run, as `EventsBuilder.add_columns` wants them; each run can be taken once.

        Raises:
            Unscannable: the rows are not of the form that torch writes.
        """
        run = self._runs[number] if 0 <= number < len(self._runs) else None
        if run is None:
            raise Unscannable("an integer among the rows")
        self._runs[number] = None
        names = [self._object(key) for key in run.keys]
        kinds = dict(zip(names, run.kinds, strict=True))
        values = dict(zip(names, run.values, strict=True))
        if not all(type(name) is str for name in names) or len(values) != len(names):
            raise Unscannable("keys are not distinct texts")
        count = len(run.values[0])
        found: dict[str, NDArray[Any]] = {
            "action": self._action(kinds, values),
            "address": _integers(kinds, values, "addr"),
            "size": _integers(kinds, values, "size"),
            "stream": _streams(_integers(kinds, values, "stream"), interner),
            "time_us": _integers(kinds, values, "time_us")
            if "time_us" in kinds
            else np.zeros(count, np.int64),
            "stack": self._stacks(kinds, values, count, interner),
        }
        for key, (column, kind, dtype) in OPTIONAL.items():
            if key in kinds:
                found[column] = self._optional(kind, kinds[key], values[key], interner).astype(dtype)
        return found

    def _object(self, reference: int) -> Any:
        return self._objects[reference]

    def _action(self, kinds: dict[str, int], values: dict[str, IntArray]) -> NDArray[np.uint8]:
        if kinds.get("action") != REFERENCE:
            raise Unscannable("action is not a text")
        return self._mapped("action", values["action"], _action_code).astype(np.uint8)

    def _stacks(
        self, kinds: dict[str, int], values: dict[str, IntArray], count: int, interner: Interner
    ) -> NDArray[np.int32]:
        if kinds.get("frames", NOTHING) == NOTHING:
            return np.full(count, NO_STACK, np.int32)
        if kinds["frames"] != REFERENCE:
            raise Unscannable("frames is not a list")
        return self._mapped("stack", values["frames"], interner.stack).astype(np.int32)

    def taken(self, number: int) -> Any:
        """An object that was taken out of the rows, by its number.

        Raises:
            Unscannable: there is none.
        """
        if not 0 <= number < len(self._taken):
            raise Unscannable("an object that is not there")
        return self._taken[number]

    def _optional(self, kind: str, given: int, values: IntArray, interner: Interner) -> NDArray[Any]:
        if given == NOTHING:
            return np.full(len(values), -1, np.int64)
        if given == REFERENCE:
            return self._mapped(kind, values, getattr(interner, kind))
        if given == PAIR and kind == "pool":
            distinct, place = _distinct(values)
            pools = [interner.pool((pair >> 32, pair & 0xFFFFFFFF)) for pair in distinct.tolist()]
            return np.array(pools, np.int64)[place]
        raise Unscannable("a value is of an unusual kind")

    def _mapped(self, kind: str, values: IntArray, number_of: Callable[[Any], int]) -> NDArray[Any]:
        """Numbers of the objects that rows refer to or held themselves; each object is asked for once."""
        inside = values < 0
        if not inside.any():
            return self._table(kind, values, number_of)[values]
        found = np.empty(len(values), np.int32)
        found[~inside] = self._table(kind, values[~inside], number_of)[values[~inside]]
        numbers = -1 - values[inside]
        table = np.zeros(len(self._taken), np.int32)
        for number in np.flatnonzero(np.bincount(numbers, minlength=len(table))).tolist():
            table[number] = number_of(self._taken[number])
        found[inside] = table[numbers]
        return found

    def _table(self, kind: str, references: IntArray, number_of: Callable[[Any], int]) -> NDArray[np.int32]:
        """A table from reference to number, filled for `references`; one per kind, for all runs."""
        table = self._tables.get(kind)
        if table is None:
            table = self._tables[kind] = np.full(self._highest + 1, _UNSET, np.int32)
        if (table[references] == _UNSET).any():
            missing = np.zeros(len(table), np.bool_)
            missing[references] = True
            missing &= table == _UNSET
            for reference in np.flatnonzero(missing).tolist():
                table[reference] = number_of(self._object(reference))
        return table


_UNSET = -(1 << 31)


def _action_code(name: Any) -> int:
    if type(name) is not str or name not in ACTION_CODES:
        raise Unscannable("unknown action")
    return ACTION_CODES[name]


def _integers(kinds: dict[str, int], values: dict[str, IntArray], name: str) -> IntArray:
    if kinds.get(name) != INTEGER:
        raise Unscannable(f"{name} is not an integer")
    return values[name]


def _distinct(values: IntArray) -> tuple[IntArray, IntArray]:
    """(distinct values ascending, index of each value in them); sorts the distinct ones only."""
    distinct: IntArray = np.unique(values)
    return distinct, np.searchsorted(distinct, values)


def _streams(handles: IntArray, interner: Interner) -> NDArray[np.int32]:
    if (handles == handles[0]).all():
        return np.full(len(handles), interner.stream(int(handles[0])), np.int32)
    distinct, place = _distinct(handles)
    numbers = np.array([interner.stream(handle) for handle in distinct.tolist()], np.int32)
    return numbers[place]
