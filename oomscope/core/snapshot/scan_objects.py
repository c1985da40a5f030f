"""Objects that a pickler wrote inside the rows themselves: call stacks, and texts that torch makes anew per row.

They are told apart by their bytes, without making an object per row: the bytes of a stack are the same for the same
stack once its frames have been met.
Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from itertools import count

import numpy as np

from oomscope.core.snapshot.columns import ByteArray, IntArray

MAX_DEPTH = 1024
"""Deepest stack that is followed."""

_LIST, _MEMOIZE, _MARK, _APPENDS, _APPEND = 0x5D, 0x94, 0x28, 0x65, 0x61
_WIDTHS = {0x68: 1, 0x6A: 4}
"""Opcodes of a reference (BINGET, LONG_BINGET) -> its bytes."""
_SIZE = np.zeros(256, np.int64)
for _opcode, _width in _WIDTHS.items():
    _SIZE[_opcode] = 1 + _width
_POP = b"0"
_HEAD = 3
"""Bytes before the first reference of a list: EMPTY_LIST, MEMOIZE, MARK."""
_FILLER = 7
"""Bytes that stand for a list in `Bodies.filler`."""


def list_ends(data: ByteArray, starts: IntArray, limit: int) -> IntArray:
    """Where the list at each of `starts` ends, 0 where there is none of references only, before `limit`.

    A list is `] MEMOIZE`, then nothing, or one reference and APPEND, or MARK, references and APPENDS.
    """
    ends = np.zeros(len(starts), np.int64)
    is_list = (data[starts] == _LIST) & (data[np.minimum(starts + 1, limit)] == _MEMOIZE)
    following = data[np.minimum(starts + 2, limit)]
    long = np.flatnonzero(is_list & (following == _MARK))
    ends[long] = _ends_of_marked(data, starts[long] + _HEAD, limit)
    short = np.flatnonzero(is_list & (following != _MARK))
    after = starts[short] + 2 + _SIZE[data[np.minimum(starts[short] + 2, limit)]]
    single = (after > starts[short] + 2) & (data[np.minimum(after, limit)] == _APPEND)
    ends[short] = np.where(single, after + 1, starts[short] + 2)
    ends[ends > limit] = 0
    return ends


def _ends_of_marked(data: ByteArray, position: IntArray, limit: int) -> IntArray:
    """Ends of lists of several references, walked in lockstep; those that have ended drop out."""
    ends = np.zeros(len(position), np.int64)
    active = np.arange(len(position))
    for _ in range(MAX_DEPTH):
        if not len(active):
            break
        opcode = data[np.minimum(position, limit)]
        done = opcode == _APPENDS
        ends[active[done]] = position[done] + 1
        size = _SIZE[opcode]
        going = size > 0
        active, position = active[going], position[going] + size[going]
    return ends


class Bodies:
    """Distinct objects that were taken out of the rows, by their bytes, numbered."""

    def __init__(self) -> None:
        self._numbers: defaultdict[bytes, int] = defaultdict(count().__next__)
        self._texts: dict[int, bytes] = {}

    def numbers(self, bodies: Iterable[bytes]) -> list[int]:
        """Number of each list, given as its bytes."""
        return list(map(self._numbers.__getitem__, bodies))

    def text(self, body: bytes) -> int:
        """Number of a text given as its bytes."""
        number = self._numbers[body]
        self._texts[number] = body
        return number

    def found(self) -> list[list[int] | str]:
        """Each text, or the references in each list, in the order of the numbers.

        Raises:
            UnicodeDecodeError: a text is damaged.
        """
        return [
            str(body[2:-1], "utf-8", "surrogatepass")
            if number in self._texts
            else [reference for reference, _ in _references(body, _HEAD if body[2:3] == b"(" else 2)]
            for body, number in self._numbers.items()
        ]

    def filler(self, memos: Sequence[int], objects: Sequence[IntArray], rows: int) -> bytes:
        """Opcodes that make the same number of shared objects as some rows.

        Later rows refer to the objects of earlier ones: they get a list's number in its place, and texts as they are.

        Args:
            memos: other shared objects of a row: before the first taken object (the row itself included), between the
                first and the second, ..., and after the last.
            objects: (rows,) int64 per taken object of a row: its number, -1 for none.
            rows: number of rows.
        """
        bytes_of = np.full(len(self._numbers) + 1, _FILLER)
        bytes_of[-1] = 0
        is_text = np.zeros(len(bytes_of), np.bool_)
        for number, body in self._texts.items():
            bytes_of[number], is_text[number] = len(body) + 1, True
        sizes = sum((bytes_of[numbers] for numbers in objects), np.full(rows, sum(memos)))
        place = np.cumsum(sizes) - sizes
        out = np.full(int(sizes.sum()), _MEMOIZE, np.uint8)
        for before, numbers in zip(memos, objects, strict=False):
            place += before
            lists = (numbers >= 0) & ~is_text[numbers]
            _put_numbers(out, place[lists], numbers[lists])
            texts = is_text[numbers]
            for number in np.flatnonzero(np.bincount(numbers[texts])).tolist():
                text = np.frombuffer(self._texts[number] + _POP, np.uint8)
                out[place[numbers == number][:, None] + np.arange(len(text))] = text
            place += bytes_of[numbers]
        # Nothing refers to a row; what does gets a dictionary, as from the whole stream, and is refused as there.
        return b"}" + out.tobytes() + _POP


def _put_numbers(out: ByteArray, place: IntArray, numbers: IntArray) -> None:
    """Write BININT number, MEMOIZE, POP at each place; the MEMOIZE is there."""
    out[place] = 0x4A
    for byte in range(4):
        out[place + 1 + byte] = (numbers >> (8 * byte)) & 0xFF
    out[place + 6] = _POP[0]


def list_end(text: bytes, start: int) -> int:
    """`list_ends` for one list, without numpy; its EMPTY_LIST and MEMOIZE have been seen."""
    position = start + 2
    if text.startswith(b"(", position):
        *_, (_, position) = [(0, position + 1), *_references(text, position + 1)]
        return position + 1 if text[position : position + 1] == b"e" else 0
    for _, after in _references(text, position):
        return after + 1 if text[after : after + 1] == b"a" else position
    return position


def _references(text: bytes, position: int) -> Iterator[tuple[int, int]]:
    """(reference, position after it) of each reference from `position` on."""
    while (width := _WIDTHS.get(text[position] if position < len(text) else -1)) is not None:
        after = position + 1 + width
        yield int.from_bytes(text[position + 1 : after], "little"), after
        position = after
