"""Rows of a pickled history decoded by their layout: which opcodes stand where in a row's bytes.

A pickler writes rows alike, so a few layouts cover millions of them. A layout is learnt from one row, in Python, and
then recognised in all others at once: their bytes are compared with its constant bytes (opcodes, keys, short texts),
and the bytes between are the values. Call stacks vary in length; there a layout ends, and what follows the stack is
recognised anew.
Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from oomscope.core.snapshot.columns import ByteArray, IntArray
from oomscope.core.snapshot.scan_objects import Bodies, list_end, list_ends

INTEGER, REFERENCE, NOTHING, PAIR = 0, 1, 2, 3
"""Kinds of a value. An object in the row itself is a REFERENCE too: elsewhere a reference to an earlier one may stand
there."""

MAX_KEYS = 14
MAX_LAYOUTS = 512
"""Layouts kept; torch's rows have fewer than 20."""
LEARN_AT_ONCE = 64
MAX_LEARNT_ROWS = 4096
"""Rows of one chunk that are read one by one in search of new layouts; the others are left to the unpickler."""
MAX_TEXT = 64
"""Bytes of a text that counts as a part of the layout."""
MAX_STRETCH = 512
"""Bytes of a layout: more than 14 keys with numbers have."""
PADDING = MAX_STRETCH + 16
"""Zeros after a chunk, so that a layout can be compared at its very end."""

_MEMOIZE, _SETITEMS, _NONE, _LONG1, _TEXT = 0x94, 0x75, 0x4E, 0x8A, 0x8C
_HEAD, _LIST, _TUPLE = b"}\x94(", b"]\x94", b"\x86\x94"
_INTEGERS = {0x4B: 1, 0x4D: 2, 0x4A: 4}
"""Opcode of an integer -> its bytes; of BININT (0x4A) they are signed."""
_REFERENCES = {0x68: 1, 0x6A: 4}


@dataclass(slots=True)
class _Value:
    """Where a value is in a layout, relative to its first byte."""

    kind: int
    at: int = 0
    width: int = 0
    is_signed: bool = False
    second_at: int = 0
    """Of a pair: where the other integer is."""
    second_width: int = 0
    text: bytes = b""
    """Of a text in the row itself: its bytes."""
    body: int = -1
    """And its number in `Bodies`."""


@dataclass(slots=True)
class _Layout:
    """Constant bytes with values between, up to the end of the row or to a list."""

    pattern: IntArray
    """(k,) the bytes as 8-byte words, 0 where they vary."""
    mask: IntArray
    """(k,) all bits of constant bytes."""
    size: int
    """Bytes; of a stretch that a list follows without the first two of the list, which are compared too."""
    values: list[_Value]
    is_last: bool
    """The row ends here; else a list follows."""
    shape: int = -1
    """Of the last one: number of the row's keys and kinds."""
    hits: int = 0
    following: dict[bytes, _Layout] = field(default_factory=dict)
    """Layouts seen after the list."""


@dataclass(slots=True)
class Rows:
    """All candidate rows of a chunk, decoded."""

    ends: IntArray
    """(n,) where each row ends, 0 when it is none of a history."""
    shape: IntArray
    """(n,) number of its keys and kinds in `Layouts.shapes`."""
    values: list[IntArray]
    """(n,) per place in a row: the integer, the reference, -1 - number of a text in `Bodies`, or where the list starts;
    of a pair both 32-bit halves."""
    list_ends: dict[int, IntArray]
    """Place -> (n,) where the list there ends, 0 where there is none."""

    def column(self, place: int) -> IntArray:
        while place >= len(self.values):
            self.values.append(np.zeros(len(self.ends), np.int64))
        return self.values[place]


class Layouts:
    """The layouts of a stream, learnt while it is read."""

    def __init__(self, action: int, bodies: Bodies) -> None:
        """`action`: reference of the text "action"; rows of a history have that key, blocks and ranges do not."""
        self._action = action
        self._bodies = bodies
        self._first: dict[bytes, _Layout] = {}
        self._count = 0
        self._numbers: dict[tuple[tuple[int, ...], tuple[int, ...]], int] = {}
        self.shapes: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """(references of the keys, kinds of the values)."""

    def decode(self, text: bytes, starts: IntArray) -> Rows:
        """Decode the dictionaries at `starts`.

        Args:
            text: the chunk, followed by `PADDING` zeros.
            starts: (n,) where an empty dictionary, MEMOIZE and MARK stand.
        """
        data = np.frombuffer(text, np.uint8)
        count = len(starts)
        rows = Rows(np.zeros(count, np.int64), np.full(count, -1, np.int64), [], {})
        by_hits = sorted(self._first.items(), key=lambda item: -item[1].hits)
        self._first = dict(by_hits)
        waiting = np.arange(count)
        learnt = 0
        while len(waiting) and learnt < MAX_LEARNT_ROWS:
            waiting = self._match(self._first, data, rows, waiting, starts[waiting], 0)
            known = self._count
            for start in starts[waiting[:LEARN_AT_ONCE]].tolist():
                self._learn(text, start)
            learnt += LEARN_AT_ONCE
            if self._count == known:
                waiting = waiting[LEARN_AT_ONCE:]
        return rows

    def _match(
        self,
        layouts: dict[bytes, _Layout],
        data: ByteArray,
        rows: Rows,
        which: IntArray,
        positions: IntArray,
        place: int,
    ) -> IntArray:
        """Decode the rows `which` from `positions` on, values `place` and later; returns those that match nothing."""
        missed: list[IntArray] = []
        for layout in list(layouts.values()):
            if not len(which):
                break
            words = _words(data, positions, len(layout.pattern))
            differs = (words[:, 0] ^ layout.pattern[0]) & layout.mask[0]
            for number in range(1, len(layout.pattern)):
                differs |= (words[:, number] ^ layout.pattern[number]) & layout.mask[number]
            hit = np.flatnonzero(differs == 0)
            layout.hits += len(hit)
            if len(hit):
                self._values(layout, words, rows, which, place)
                ends = positions[hit] + layout.size
                missed.append(self._ends(layout, data, rows, which[hit], ends, place + len(layout.values)))
                others = np.flatnonzero(differs)
                which, positions = which[others], positions[others]
        return np.concatenate([which, *missed]) if missed else which

    @staticmethod
    def _values(layout: _Layout, words: IntArray, rows: Rows, which: IntArray, place: int) -> None:
        """Store the values of rows as if all had this layout; those of the others are stored again, or never read."""
        raw = words.view(np.uint8)
        where: slice | IntArray = slice(None) if len(which) == len(rows.ends) else which
        for number, value in enumerate(layout.values, place):
            if value.body >= 0:
                rows.column(number)[where] = -1 - value.body
            elif value.kind != NOTHING:
                rows.column(number)[where] = _numbers(raw, value)

    def _ends(
        self, layout: _Layout, data: ByteArray, rows: Rows, which: IntArray, ends: IntArray, place: int
    ) -> IntArray:
        """Note where rows of this layout end, or go on behind the list that follows as value `place`.

        Returns:
            The rows that match nothing there.
        """
        if layout.is_last:
            rows.shape[which] = layout.shape
            rows.ends[which] = ends if layout.shape >= 0 else 0
            return which[:0]
        rows.column(place)[which] = ends
        if place not in rows.list_ends:
            rows.list_ends[place] = np.zeros(len(rows.ends), np.int64)
        ends = list_ends(data, ends, len(data) - PADDING)
        rows.list_ends[place][which] = ends
        whole = np.flatnonzero(ends)
        return self._match(layout.following, data, rows, which[whole], ends[whole], place + 1)

    def _learn(self, text: bytes, start: int) -> None:
        """Add the layouts of the row at `start`, if it is one."""
        stretches: list[_Reader] = []
        position = start
        while not stretches or not stretches[-1].is_last:
            read = _Reader(text, position)
            stretches.append(read)
            if not read.layout(is_first=position == start) or len(stretches) > MAX_KEYS:
                return
            if not read.is_last:
                position = list_end(text, read.position)
                if not position:
                    return
        keys = [key for read in stretches for key in read.keys]
        kinds = [kind for read in stretches for kind in read.kinds]
        shape = self._shape(tuple(keys), tuple(kinds))
        if (
            len(keys) > MAX_KEYS
            or self._count >= MAX_LAYOUTS
            or (shape < 0 and any(read.has_text for read in stretches))
        ):
            return  # blocks are worth knowing, so as not to read each of them; frames with their texts are not
        layouts = self._first
        for read in stretches:
            made = read.made()
            name = made.pattern.tobytes() + made.mask.tobytes()
            if name not in layouts:
                layouts[name] = made
                self._count += 1
                for value in made.values:
                    value.body = self._bodies.text(value.text) if value.text else -1
            layouts[name].shape = shape
            layouts = layouts[name].following

    def _shape(self, keys: tuple[int, ...], kinds: tuple[int, ...]) -> int:
        """Number of these keys and kinds; -1 when they are none of a history."""
        if self._action not in keys:
            return -1
        number = self._numbers.setdefault((keys, kinds), len(self.shapes))
        if number == len(self.shapes):
            self.shapes.append((keys, kinds))
        return number


def _words(data: ByteArray, positions: IntArray, count: int) -> IntArray:
    """(n, count) int64: the 8 * count bytes at each position."""
    size = 8 * count
    windows = np.ndarray((len(data) - size + 1,), f"V{size}", data.data, strides=(1,))
    found: IntArray = windows[positions].view("<i8").reshape(-1, count)
    return found


def _numbers(raw: ByteArray, value: _Value) -> IntArray:
    """(n,) int64: the value of each row, from the rows' bytes."""
    if value.kind == PAIR:
        first, second = (
            _unsigned(raw, at, width)
            for at, width in ((value.at, value.width), (value.second_at, value.second_width))
        )
        return (first << 32) | second
    if not value.is_signed:
        return _unsigned(raw, value.at, value.width)
    # Eight bytes that end with the value, or begin with it, shifted so that its sign spreads.
    end, shift = value.at + value.width, 64 - 8 * value.width
    if end < 8:
        return (raw[:, value.at : value.at + 8].view("<i8")[:, 0] << shift) >> shift
    wide: IntArray = raw[:, end - 8 : end].view("<i8")[:, 0] >> shift
    return wide


def _unsigned(raw: ByteArray, at: int, width: int) -> IntArray:
    found: IntArray = raw[:, at : at + width].view(f"<u{width}")[:, 0].astype(np.int64)
    return found


class _Reader:
    """Reads one stretch of a row, opcode by opcode."""

    def __init__(self, text: bytes, position: int) -> None:
        self._text = text
        self._start = self.position = position
        self._varying: list[tuple[int, int]] = []
        self.keys: list[int] = []
        self.values: list[_Value] = []
        self.is_last = False

    @property
    def kinds(self) -> list[int]:
        """Kind of the value of each key."""
        return [value.kind for value in self.values] + ([] if self.is_last else [REFERENCE])

    @property
    def has_text(self) -> bool:
        return any(value.text for value in self.values)

    def layout(self, *, is_first: bool) -> bool:
        """Whether a layout starts here; afterwards `position` is behind it."""
        text = self._text
        if is_first:
            self.position += len(_HEAD)
        while self.position - self._start < MAX_STRETCH - MAX_TEXT - 32:
            opcode = self._opcode()
            if opcode == _SETITEMS:
                self.position += 1
                self.is_last = True
                return True
            width = _REFERENCES.get(opcode)
            if width is None or len(self.keys) >= MAX_KEYS:
                return False
            self.keys.append(int.from_bytes(text[self.position + 1 : self.position + 1 + width], "little"))
            self.position += 1 + width
            if text.startswith(_LIST, self.position):
                return True
            value = self._value()
            if value is None:
                return False
            self.values.append(value)
        return False

    def _value(self) -> _Value | None:
        opcode = self._opcode()
        if opcode == _NONE:
            self.position += 1
            return _Value(NOTHING)
        if opcode == _TEXT:
            return self._inner_text()
        width = _REFERENCES.get(opcode)
        if width is not None:
            return _Value(REFERENCE, self._skip(1, width), width)
        if opcode == _LONG1:
            width = self._text[self.position + 1] if self.position + 1 < len(self._text) else 0
            return _Value(INTEGER, self._skip(2, width), width, is_signed=True) if 0 < width <= 8 else None
        return self._integer(opcode)

    def _integer(self, opcode: int) -> _Value | None:
        """A small integer, or a pair of them: a pool, which torch makes anew per row."""
        width = _INTEGERS.get(opcode)
        if width is None:
            return None
        value = _Value(INTEGER, self._skip(1, width), width, is_signed=width == 4)
        second = _INTEGERS.get(self._opcode())
        if second is None:
            return value
        at = self._skip(1, second)
        if width == 4 or second == 4 or not self._text.startswith(_TUPLE, self.position):
            return None
        self.position += len(_TUPLE)
        return _Value(PAIR, value.at, width, second_at=at, second_width=second)

    def _inner_text(self) -> _Value | None:
        """A short text that is shared with nothing, such as the "N/A" of a row without a compile context."""
        start = self.position
        size = self._text[start + 1] if start + 1 < len(self._text) else MAX_TEXT + 1
        end = start + 2 + size
        if size > MAX_TEXT or self._text[end : end + 1] != bytes((_MEMOIZE,)):
            return None
        self.position = end + 1
        return _Value(REFERENCE, text=self._text[start : end + 1])

    def _opcode(self) -> int:
        return self._text[self.position] if self.position < len(self._text) else -1

    def _skip(self, head: int, width: int) -> int:
        """Move over an opcode and its varying bytes; returns where these are in the layout."""
        at = self.position + head - self._start
        self._varying.append((at, width))
        self.position += head + width
        return at

    def made(self) -> _Layout:
        """The layout that was read."""
        size = self.position - self._start
        compared = size if self.is_last else size + len(_LIST)
        padded = max(16, -(-compared // 8) * 8)  # `_numbers` reads eight bytes from a value on
        mask = bytearray(b"\xff" * compared + bytes(padded - compared))
        for at, width in self._varying:
            mask[at : at + width] = bytes(width)
        words = np.frombuffer(bytes(mask), "<i8")
        pattern = self._text[self._start : self._start + compared].ljust(padded, b"\0")
        return _Layout(np.frombuffer(pattern, "<i8") & words, words, size, self.values, self.is_last)
