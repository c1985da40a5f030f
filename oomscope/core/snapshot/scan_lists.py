"""Lists of references inside a pickle: the call stacks of rows.

Torch writes a stack once per allocation and not once per stack. A body, the bytes of such a list, is the same
for the same stack once its
frames have been met, so stacks are told apart by their bytes, without making a list.
Opcodes: https://github.com/python/cpython/blob/main/Lib/pickletools.py
"""

from __future__ import annotations

import struct

import numpy as np

from oomscope.core.snapshot.columns import ByteArray, IntArray

MAX_DEPTH = 1024
"""Deepest stack that is followed."""

_LIST, _MEMOIZE, _MARK, _APPENDS, _APPEND = 0x5D, 0x94, 0x28, 0x65, 0x61
_BINGET, _LONG_BINGET = 0x68, 0x6A
_SIZE = np.zeros(256, np.int64)
_SIZE[_BINGET], _SIZE[_LONG_BINGET] = 2, 5
_HEAD = 3
"""Bytes before the first reference of a list: EMPTY_LIST, MEMOIZE, MARK."""


def list_ends(data: ByteArray, starts: IntArray, limit: int) -> IntArray:
    """Where the list at each of `starts` ends, 0 where there is none of references only.

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
    """Distinct list bodies, numbered."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}

    def number(self, body: bytes) -> int:
        """Number of a list given as its bytes."""
        return self._numbers.setdefault(body, len(self._numbers))

    def references(self) -> list[list[int]]:
        """References in each body, in the order of the numbers."""
        return [_references(body) for body in self._numbers]


def _references(body: bytes) -> list[int]:
    position = _HEAD if body[2:3] == b"(" else 2
    found = []
    while position < len(body):
        if body[position] == _BINGET:
            found.append(body[position + 1])
            position += 2
        elif body[position] == _LONG_BINGET:
            found.append(struct.unpack_from("<I", body, position + 1)[0])
            position += 5
        else:
            break
    return found


def filler(lists: IntArray, memos_before: int, memos_after: int) -> bytes:
    """Opcodes that make the same number of shared objects as some rows, with a number in place of each list.

    Later rows refer to the lists of earlier ones; what they get then is the list's number.

    Args:
        lists: (n_rows,) int64, number of the list in each row, -1 for none.
        memos_before: other shared objects of a row before its list, the row itself included.
        memos_after: and after it.
    """
    has = lists >= 0
    sizes = memos_before + memos_after + np.where(has, 7, 0)
    begin = np.cumsum(sizes) - sizes + memos_before
    out = np.full(int(sizes.sum()), _MEMOIZE, np.uint8)
    place, number = begin[has], lists[has]
    out[place] = 0x4A  # BININT number, MEMOIZE, POP
    for byte in range(4):
        out[place + 1 + byte] = (number >> (8 * byte)) & 0xFF
    out[place + 6] = 0x30
    return b"N" + out.tobytes() + b"0"
