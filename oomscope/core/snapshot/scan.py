"""Reads the rows of a long history straight from the pickle's bytes, without making a dictionary per row.

torch writes every row of a history alike: `} MEMOIZE ( key value key value … u`, each key and most values references to
earlier objects. Such rows are decoded by their layout with numpy. What is left of the stream (segments, frames, the
first use of each string) is small and goes through the ordinary restricted unpickler, with one integer in place of each
run of rows and the same numbering of shared objects.

Nothing is trusted more than there: a run must be an unbroken chain of rows with the same keys, and anything unusual is
left to the unpickler.
Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from oomscope.core.snapshot.columns import ByteArray, IntArray
from oomscope.core.snapshot.row_layouts import PADDING, PAIR, REFERENCE, Layouts, Rows
from oomscope.core.snapshot.scan_objects import Bodies

MIN_RUN = 8
"""Shorter chains of rows are left to the unpickler: they gain nothing, and may be bytes inside a text."""

CHUNK = 1 << 22
"""Bytes decoded at a time: the arrays of one chunk stay in the cache."""

GIVE_UP = 16 << 20
"""Bytes from the first row on after which a run must have been found: rows that hold their frames, as torch 2.0 wrote
them, are of no form that can be scanned, and looking for one in all of them takes longer than unpickling."""

MAX_REFERENCE = 1 << 28
"""A stream with more shared objects would be several gigabytes long."""

MAX_ROW = 4096
"""Longest row in bytes that may go on in the next chunk."""

_FRAME, _MEMOIZE, _MARK, _DICT, _APPENDS = 0x95, 0x94, 0x28, 0x7D, 0x65
_BINGET = 0x68
_ACTION = b"\x8c\x06action\x94"


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
    """(n_rows,) int64 per key: the integer, or the reference; of a pair both 32-bit halves; -1 - n for object n
    that was taken out of the rows."""


@dataclass(slots=True)
class Scanned:
    """A stream without its runs."""

    rest: bytes
    """A pickle of (the object with an integer in place of each run, list of the objects that the runs refer
    to)."""
    runs: list[Run]
    references: IntArray
    """(m,) int64 ascending: reference of each object in that list."""
    taken: list[list[int] | str]
    """Each text, or the references in each list, that was taken out of the rows."""


def scan(data: memoryview, reference_of: Callable[[bytes], int], forget: Callable[[int], None]) -> Scanned:
    """Take the runs of rows out of a pickle.

    Args:
        data: a pickle of protocol 4 or 5.
        reference_of: unpickles a stream that ends after a memoized object and returns that object's reference.
        forget: told up to which byte `data` has been read.

    Raises:
        Unscannable: another protocol, or nothing in it that looks like a history.
    """
    if len(data) < 2 or data[0] != 0x80 or data[1] not in (4, 5):
        raise Unscannable("not protocol 4 or 5")
    head: list[bytes] = [bytes(data[:2])]
    split: _Splitter | None = None
    carried, tried = b"", 0
    last = False
    for parts, end, last in _payloads(data):
        text = b"".join([carried, *parts, bytes(PADDING)])
        size = len(text) - PADDING
        if split is None:
            begin = text.find(_ACTION, 0, size) + len(_ACTION)
            if begin < len(_ACTION):  # segments come first in most files: a few megabytes
                carried = text[max(0, size - len(_ACTION)) : size]
                head.append(text[: size - len(carried)])
                continue
            head.append(text[:begin])
            split = _Splitter(head, reference_of(b"".join(head) + b"."))
            text, size = text[begin:], size - begin
        carried = split.chunk(text, size, last=last)
        forget(end)
        tried += size
        if tried > GIVE_UP and not split.runs:
            raise Unscannable("rows of another form")
    if split is None or not last or not split.runs or not carried.endswith(b"."):
        raise Unscannable("no runs of rows")
    return split.finished(carried)


def _get(reference: int) -> bytes:
    """The opcode that fetches an object as a pickler would write it."""
    return bytes((_BINGET, reference)) if reference < 256 else b"j" + struct.pack("<I", reference)


def _get_all(references: IntArray) -> bytes:
    """`_get` of ascending references."""
    short = references[references < 256]
    long = np.empty((len(references) - len(short), 5), np.uint8)
    long[:, 0] = 0x6A
    long[:, 1:] = references[len(short) :, None].astype("<u4").view(np.uint8)
    return b"".join(map(_get, short.tolist())) + long.tobytes()


def _payloads(data: memoryview) -> Iterator[tuple[list[memoryview], int, bool]]:
    """(parts of some frames without their headers, where they end in `data`, whether they are the last)."""
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
            yield parts, position, False
            parts, size = [], 0
    tail = bytes(data[position : position + 16])
    if tail.strip(b"\x00"):
        raise Unscannable("not framed throughout")
    yield parts, position, True


class _Splitter:
    """Moves rows to `runs`, and what lies between them to `rest`."""

    def __init__(self, head: list[bytes], action: int) -> None:
        """`head`: the stream up to the first text "action"; `action`: the reference of that text."""
        self.runs: list[Run] = []
        self._rest = head
        self._bodies = Bodies()
        self._layouts = Layouts(action, self._bodies)

    def chunk(self, text: bytes, size: int, *, last: bool) -> bytes:
        """Take the next `size` bytes of the stream, the others being zeros; returns those to look at again."""
        data = np.frombuffer(text, np.uint8)
        starts = np.flatnonzero(data == _DICT)
        starts = starts[(data[starts + 1] == _MEMOIZE) & (data[starts + 2] == _MARK)]
        rows = self._layouts.decode(text, starts)
        whole = np.flatnonzero(rows.ends)
        done = 0
        for first, stop in _chains(data, starts[whole], rows.ends[whole], rows.shape[whole]):
            begin, end = int(whole[first]), int(whole[stop - 1])
            # Views, unless bytes inside a row look like the start of one.
            chosen = slice(begin, end + 1) if end - begin == stop - first - 1 else whole[first:stop]
            self._rest.append(text[done : int(starts[begin])])
            self._take(chosen, rows, text)
            done = int(rows.ends[end])
        if last:
            cut = size - 1
        elif len(starts) and size - int(starts[-1]) < MAX_ROW:
            cut = max(done, int(starts[-1]))
        else:
            cut = max(done, size - 2)
        self._rest.append(text[done:cut])
        return text[cut:size]

    def _take(self, chosen: slice | IntArray, rows: Rows, text: bytes) -> None:
        """Add a run; in the rest, keep the numbering of shared objects as if it were still there."""
        shape = rows.shape[chosen]
        keys, kinds = self._layouts.shapes[int(shape[0])]
        run = Run(keys, list(kinds), [])
        memos, objects, highest = [1], [], max(keys)
        for place, kind in enumerate(kinds):
            values = rows.column(place)[chosen]
            if kind == REFERENCE:
                if place in rows.list_ends:
                    self._number_lists(values, rows.list_ends[place][chosen], text)
                if (values < 0).any():
                    objects.append(np.where(values < 0, -1 - values, -1))
                    memos.append(0)
                highest = max(highest, int(values.max()))
            elif kind == PAIR:
                memos[-1] += 1
            run.values.append(values)
        # Fetched here, so that a reference to what comes later is an error, as it is for the unpickler.
        check = _get(highest) + b"0"
        stand_in = b"J" + struct.pack("<i", len(self.runs))
        self._rest.append(self._bodies.filler(memos, objects, len(shape)) + check + stand_in)
        self.runs.append(run)

    def _number_lists(self, values: IntArray, ends: IntArray, text: bytes) -> None:
        """Put -1 - number in place of where a list starts."""
        inside = np.flatnonzero(ends)
        pairs = zip(values[inside].tolist(), ends[inside].tolist(), strict=True)
        numbers = self._bodies.numbers([text[start:end] for start, end in pairs])
        values[inside] = -1 - np.array(numbers, np.int64)

    def finished(self, tail: bytes) -> Scanned:
        """What was split, given the last bytes of the stream."""
        taken = self._bodies.found()
        references = _references(self.runs, taken)
        fetched = b"](" + _get_all(references) + b"e\x86."
        self._rest += [tail[:-1], fetched]
        return Scanned(b"".join(self._rest), self.runs, references, taken)


def _chains(data: ByteArray, starts: IntArray, ends: IntArray, shape: IntArray) -> Iterator[tuple[int, int]]:
    """Ranges of rows of one shape that follow each other, at most the seam of two batches (APPENDS, MARK) apart."""
    if not len(starts):
        return
    gap = starts[1:] - ends[:-1]
    batch = (gap == 2) & (data[ends[:-1]] == _APPENDS) & (data[ends[:-1] + 1] == _MARK)
    broken = np.flatnonzero(((gap != 0) & ~batch) | (shape[1:] != shape[:-1])) + 1
    edges = [0, *broken.tolist(), len(starts)]
    for first, stop in pairwise(edges):
        if stop - first >= MIN_RUN:
            yield first, stop


def _references(runs: list[Run], taken: list[list[int] | str]) -> IntArray:
    """References that the runs use, ascending; found by marking, for they are small and dense."""
    keys = [key for run in runs for key in run.keys]
    keys += [each for one in taken if not isinstance(one, str) for each in one]
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
