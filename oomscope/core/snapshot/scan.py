"""Reads the rows of a long history straight from the pickle's bytes, without making a dictionary per row.

torch writes every row of a history alike: `} MEMOIZE ( key value key value … u`, each key and most values
references to earlier objects. Such
rows can be decoded in lockstep with numpy: all first values of a chunk at once, then all second ones. What is
left of the stream (segments,
frames, the first use of each string) is small and goes through the ordinary restricted unpickler, with one
integer in place of each run of
rows and the same numbering of shared objects.

Nothing is trusted more than there: a run must be an unbroken chain of rows with the same keys, and anything
unusual is left to the unpickler.
Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.columns import BoolArray, ByteArray, IntArray
from oomscope.core.snapshot.scan_lists import Bodies, filler, list_ends

MIN_RUN = 8
"""Shorter chains of rows are left to the unpickler: they gain nothing, and may be bytes inside a text."""

CHUNK = 4 << 20
"""Bytes decoded at a time: the arrays of one chunk stay in the cache."""

MAX_KEYS = 14
MAX_REFERENCE = 1 << 28
"""A stream with more shared objects would be several gigabytes long."""

MAX_ROW = 4096
"""Longest row in bytes that is looked at."""

_FRAME, _MEMOIZE, _MARK, _DICT, _SETITEMS = 0x95, 0x94, 0x28, 0x7D, 0x75
_BINGET, _LONG_BINGET, _TUPLE2 = 0x68, 0x6A, 0x86
_INT1, _INT2, _INT4, _LONG1, _NONE = 0x4B, 0x4D, 0x4A, 0x8A, 0x4E
_ACTION = b"\x8c\x06action\x94"

INTEGER, REFERENCE, NOTHING, PAIR = 0, 1, 2, 3
"""Kinds of a value."""

_KIND = np.full(256, 255, np.uint8)
_KIND[[_INT1, _INT2, _INT4, _LONG1]] = INTEGER
_KIND[[_BINGET, _LONG_BINGET]] = REFERENCE
_KIND[_NONE] = NOTHING
_WIDTH = np.zeros(256, np.int64)
for _opcode, _bytes in ((_INT1, 1), (_INT2, 2), (_INT4, 4), (_BINGET, 1), (_LONG_BINGET, 4)):
    _WIDTH[_opcode] = _bytes
_MASK = np.array([(1 << 8 * width) - 1 for width in range(9)], np.uint64)
_SIGN = np.array([0] + [1 << (8 * width - 1) for width in range(1, 9)], np.uint64)


class Unscannable(Exception):  # noqa: N818  # an answer, not a fault
    """The stream is not of the form that can be scanned; unpickle it whole."""


@dataclass(slots=True)
class Run:
    """Consecutive rows with the same keys."""

    keys: tuple[int, ...]
    """References of the keys."""
    kinds: list[int]
    """Kind of the values of each key, the same in all rows."""
    values: list[IntArray]
    """(n_rows,) int64 per key: the integer, or the reference; of a pair both 32-bit halves; -1 - n for list n
    of `Scanned`."""


@dataclass(slots=True)
class Scanned:
    """A stream without its runs."""

    rest: bytes
    """A pickle of (the object with an integer in place of each run, list of the objects that the runs refer
    to)."""
    runs: list[Run]
    references: IntArray
    """(m,) int64 ascending: reference of each object in that list."""
    lists: list[list[int]]
    """References in each list that was taken out of the rows."""


def scan(data: memoryview, reference_of: Callable[[bytes], int], forget: Callable[[int], None]) -> Scanned:
    """Take the runs of rows out of a pickle.

    Args:
        data: a pickle of protocol 4 or 5.
        reference_of: unpickles a stream that ends after a memoized object and returns that object's
        reference.
        forget: told up to which byte `data` has been read.

    Raises:
        Unscannable: another protocol, or nothing in it that looks like a history.
    """
    if len(data) < 2 or data[0] != 0x80 or data[1] not in (4, 5):
        raise Unscannable("not protocol 4 or 5")
    rest: list[bytes] = [bytes(data[:2])]
    runs: list[Run] = []
    bodies = Bodies()
    key: bytes | None = None
    carried = b""
    last = False
    for payload, end, last in _payloads(data):
        carried += payload
        if key is None:
            found = carried.find(_ACTION)
            if found < 0 and not last:
                continue  # segments come first in most files: a few megabytes
            if found < 0:
                raise Unscannable("no history")
            head = found + len(_ACTION)
            key = _get(reference_of(b"".join(rest) + carried[:head] + b"."))
            rest.append(carried[:head])
            carried = carried[head:]
        carried = _chunk(carried, key, rest, runs, bodies, last)
        forget(end)
    if not last or not runs or not carried.endswith(b"."):
        raise Unscannable("no runs of rows")
    lists = bodies.references()
    references = _references(runs, lists)
    rest.append(carried[:-1])
    rest.append(b"](" + b"".join(map(_get, references.tolist())) + b"e\x86.")
    return Scanned(b"".join(rest), runs, references, lists)


def _get(reference: int) -> bytes:
    """The opcode that fetches an object as a pickler would write it."""
    return bytes((_BINGET, reference)) if reference < 256 else b"j" + struct.pack("<I", reference)


def _payloads(data: memoryview) -> Iterator[tuple[bytes, int, bool]]:
    """(bytes of some frames without their headers, where they end in `data`, whether they are the last)."""
    position, parts, size = 2, [], 0
    while position < len(data):
        if data[position] != _FRAME or position + 9 > len(data):
            break  # bytes after the end of the pickle, or an object too large for a frame
        length = int.from_bytes(data[position + 1 : position + 9], "little")
        end = position + 9 + length
        if end > len(data):
            raise Unscannable("cut off")
        parts.append(data[position + 9 : end])
        size += length
        position = end
        if size >= CHUNK:
            yield b"".join(parts), position, False
            parts, size = [], 0
    tail = bytes(data[position : position + 16])
    if tail.strip(b"\x00"):
        raise Unscannable("not framed throughout")
    yield b"".join(parts), position, True


def _chunk(text: bytes, key: bytes, rest: list[bytes], runs: list[Run], bodies: Bodies, last: bool) -> bytes:
    """Move runs to `runs` and what lies between to `rest`; returns the bytes to look at again."""
    data = np.frombuffer(text + bytes(16), np.uint8)
    starts = np.flatnonzero(data[: len(text)] == _DICT)
    starts = starts[(data[starts + 1] == _MEMOIZE) & (data[starts + 2] == _MARK)]
    ends, columns = _decode(data, starts, key, len(text))
    whole = np.flatnonzero(ends > 0)
    done = 0
    for first, stop in _chains(data, starts[whole], ends[whole]):
        chain = whole[first:stop]
        for run in _split(chain, columns):
            begin, finish = int(starts[run[0]]), int(ends[run[-1]])
            if len(run) < MIN_RUN:
                continue
            rest.append(text[done:begin])
            made, fill = _run(run, columns, text, bodies)
            rest.append(fill + b"J" + struct.pack("<i", len(runs)))
            runs.append(made)
            done = finish
    if last:
        rest.append(text[done:-1])
        return text[-1:]
    cut = max(done, len(text) - 2)
    if len(starts) and len(text) - int(starts[-1]) < MAX_ROW:
        cut = max(done, int(starts[-1]))
    rest.append(text[done:cut])
    return text[cut:]


@dataclass(slots=True)
class _Column:
    """One key of all candidate rows of a chunk."""

    key: IntArray
    """(n,) int64: reference, -1 in rows that have ended."""
    kind: ByteArray
    value: IntArray
    list_end: IntArray | None = None
    """(n,) int64: where the list at `value` ends, 0 where the value is none; None when there are no lists."""


def _decode(data: ByteArray, starts: IntArray, key: bytes, size: int) -> tuple[IntArray, list[_Column]]:
    """(end of each candidate row, 0 when it is none; its keys and values)."""
    wide = np.ndarray((len(data) - 7,), "<u8", data.data, strides=(1,))
    ends = np.zeros(len(starts), np.int64)
    position = starts + 3
    limit = size - 1
    position = np.minimum(position, limit)
    # Rows of a history name their action first or later, but all of them name it; blocks and annotations do
    # not.
    alive = np.ones(len(starts), np.bool_)
    action = int.from_bytes(key[1:], "little")
    has_action = np.zeros(len(starts), np.bool_)
    columns: list[_Column] = []
    for _ in range(MAX_KEYS):
        opcode = data[position]
        finished = alive & (opcode == _SETITEMS)
        ends[finished] = position[finished] + 1
        alive &= ~finished
        if not alive.any():
            break
        name, position, alive = _key(data, wide, position, opcode, alive, limit)
        has_action |= alive & (name == action)
        before = position
        value, kind, position = _value(data, wide, position, limit)
        list_end = _lists(data, before, alive & (kind == 255), limit)
        if list_end is not None:
            found = list_end > 0
            value, position = np.where(found, before, value), np.where(found, list_end, position)
            kind = np.where(found, np.uint8(REFERENCE), kind)
        alive &= kind != 255
        columns.append(_Column(np.where(alive, name, -1), kind, value, list_end))
    ends[~has_action] = 0
    return ends, columns


def _lists(data: ByteArray, position: IntArray, maybe: BoolArray, limit: int) -> IntArray | None:
    """Ends of the lists at the positions that `maybe` selects; None when there are none."""
    rows = np.flatnonzero(maybe)
    if not len(rows):
        return None
    ends = np.zeros(len(position), np.int64)
    ends[rows] = np.minimum(list_ends(data, position[rows], limit), limit)
    return ends


def _same(opcodes: ByteArray) -> int:
    """The opcode when all are the same, as the rows of one history mostly are; else -1."""
    first = int(opcodes[0])
    return first if bool((opcodes == first).all()) else -1


def _key(
    data: ByteArray,
    wide: NDArray[np.uint64],
    position: IntArray,
    opcode: ByteArray,
    alive: BoolArray,
    limit: int,
) -> tuple[IntArray, IntArray, BoolArray]:
    """(reference, position after it, still alive) of the key at each position."""
    same = _same(opcode)
    if same == _BINGET:
        return data[position + 1].astype(np.int64), np.minimum(position + 2, limit), alive
    word = wide[position + 1]
    if same == _LONG_BINGET:
        return (word & _MASK[4]).astype(np.int64), np.minimum(position + 5, limit), alive
    short, long = opcode == _BINGET, opcode == _LONG_BINGET
    name = np.where(short, word & _MASK[1], word & _MASK[4]).astype(np.int64)
    return name, np.minimum(position + np.where(short, 2, 5), limit), alive & (short | long)


def _value(
    data: ByteArray, wide: NDArray[np.uint64], position: IntArray, limit: int
) -> tuple[IntArray, ByteArray, IntArray]:
    """(value, kind, position after it) at each position."""
    opcode = data[position]
    same = _same(opcode)
    if same in (_BINGET, _LONG_BINGET):
        width = 1 if same == _BINGET else 4
        value = (wide[np.minimum(position + 1, limit)] & _MASK[width]).astype(np.int64)
        return value, np.full(len(value), REFERENCE, np.uint8), np.minimum(position + 1 + width, limit)
    if same == _LONG1:
        width = _same(data[np.minimum(position + 1, limit)])
        if 0 < width < 8:  # the usual 6 bytes of an address, 7 of a time
            value = (wide[np.minimum(position + 2, limit)] << np.uint64(64 - 8 * width)).view(np.int64)
            value >>= 64 - 8 * width
            return value, np.full(len(value), INTEGER, np.uint8), np.minimum(position + 2 + width, limit)
    return _mixed_value(data, wide, position, opcode, limit)


def _mixed_value(
    data: ByteArray, wide: NDArray[np.uint64], position: IntArray, opcode: ByteArray, limit: int
) -> tuple[IntArray, ByteArray, IntArray]:
    """`_value` where the opcodes differ from row to row."""
    kind = _KIND[opcode]
    is_long = opcode == _LONG1
    width = np.where(is_long, data[np.minimum(position + 1, limit)], _WIDTH[opcode])
    kind = np.where(width > 8, np.uint8(255), kind)
    width = np.minimum(width, 8)
    value = wide[np.minimum(position + 1 + is_long, limit)] & _MASK[width]
    signed = is_long | (opcode == _INT4)
    sign = _SIGN[width]
    value = np.where(signed, (value ^ sign) - sign, value).astype(np.int64)
    after = np.minimum(position + 1 + is_long + width, limit)
    return _pairs(data, wide, value, kind, after, limit)


def _pairs(
    data: ByteArray, wide: NDArray[np.uint64], value: IntArray, kind: ByteArray, after: IntArray, limit: int
) -> tuple[IntArray, ByteArray, IntArray]:
    """Join two small integers that TUPLE2 and MEMOIZE follow: a pool, written anew in each row."""
    second = data[after]
    maybe = (kind == INTEGER) & ((second == _INT1) | (second == _INT2) | (second == _INT4))
    if not maybe.any():
        return value, kind, after
    width = _WIDTH[second]
    closing = np.minimum(after + 1 + width, limit)
    pair = maybe & (data[closing] == _TUPLE2) & (data[np.minimum(closing + 1, limit)] == _MEMOIZE)
    number = (wide[np.minimum(after + 1, limit)] & _MASK[width]).astype(np.int64)
    small = (value >= 0) & (value < 1 << 31) & (number < 1 << 31)
    joined = np.where(pair, (value << 32) | number, value)
    kind = np.where(pair, np.where(small, np.uint8(PAIR), np.uint8(255)), kind)
    return joined, kind, np.where(pair, np.minimum(closing + 2, limit), after)


def _chains(data: ByteArray, starts: IntArray, ends: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of rows that follow each other, at most the seam of two batches (APPENDS, MARK) apart."""
    if not len(starts):
        return
    gap = starts[1:] - ends[:-1]
    batch = (gap == 2) & (data[ends[:-1]] == 0x65) & (data[ends[:-1] + 1] == _MARK)
    broken = np.flatnonzero((gap != 0) & ~batch) + 1
    edges = [0, *broken.tolist(), len(starts)]
    for first, stop in pairwise(edges):
        if stop - first >= MIN_RUN:
            yield first, stop


def _split(chain: IntArray, columns: list[_Column]) -> Iterator[IntArray]:
    """Parts of a chain whose rows have the same keys with values of the same kinds."""
    changed: BoolArray = np.zeros(len(chain) - 1, np.bool_)
    for column in columns:
        names = column.key[chain]
        if names[0] < 0 and (names < 0).all():
            continue
        kinds = np.where(names < 0, np.uint8(0), column.kind[chain])
        if not ((names == names[0]).all() and (kinds == kinds[0]).all()):
            changed |= (names[1:] != names[:-1]) | (kinds[1:] != kinds[:-1])
    edges = [0, *(np.flatnonzero(changed) + 1).tolist(), len(chain)]
    for first, stop in pairwise(edges):
        yield chain[first:stop]


def _run(rows: IntArray, columns: list[_Column], text: bytes, bodies: Bodies) -> tuple[Run, bytes]:
    """The rows, and opcodes that keep the numbering of shared objects as if they were still there."""
    used = [column for column in columns if column.key[rows[0]] >= 0]
    kinds = [int(column.kind[rows[0]]) for column in used]
    values = [column.value[rows] for column in used]
    holding = [
        n
        for n, column in enumerate(used)
        if column.list_end is not None and (column.list_end[rows] > 0).any()
    ]
    if len(holding) > 1:
        raise Unscannable("rows with several lists")
    lists = np.full(len(rows), -1, np.int64)
    at = holding[0] if holding else len(used)
    for number in holding:
        ends = used[number].list_end[rows]  # type: ignore[index]
        inside = np.flatnonzero(ends > 0)
        starts = values[number][inside].tolist()
        one = bodies.number
        lists[inside] = [one(text[a:b]) for a, b in zip(starts, ends[inside].tolist(), strict=True)]
        values[number] = np.where(ends > 0, -1 - lists, values[number])
    fill = filler(lists, 1 + kinds[:at].count(PAIR), kinds[at:].count(PAIR))
    return Run(tuple(int(column.key[rows[0]]) for column in used), kinds, values), fill


def _references(runs: list[Run], lists: list[list[int]]) -> IntArray:
    """References that the runs use, ascending; found by marking, for they are small and dense."""
    keys = [key for run in runs for key in run.keys] + [each for one in lists for each in one]
    used = [
        values[values >= 0]
        for run in runs
        for kind, values in zip(run.kinds, run.values, strict=True)
        if kind == REFERENCE
    ]
    highest = max([*keys, *(int(values.max()) for values in used if len(values))])
    if highest > MAX_REFERENCE:
        raise Unscannable("references are out of range")
    seen = np.zeros(highest + 1, np.bool_)
    seen[keys] = True
    for values in used:
        seen[values] = True
    return np.flatnonzero(seen)
