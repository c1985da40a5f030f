"""Segments at the cursor, each scaled to its bytes: live blocks by category, gaps, and the selected block.

Before a failed request the blocks that stood in its way have lines of their own, in segments that come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from math import ceil
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.categories import Category
from oomscope.tui.widgets.categories import GLYPHS, STYLES
from oomscope.tui.widgets.spans import Span, columns, pad, width_of
from oomscope.tui.widgets.virtual import VirtualList
from oomscope.units import format_bytes
from oomscope.views.snapshot_exact import Failure
from oomscope.views.snapshot_picture import Painter, Picture

IntArray = NDArray[np.int64]

_FREE = -1
_SELECTED = -2
_IN_THE_WAY = -3


class SegmentMap(VirtualList):
    """One line per segment, largest first; the bar shows where its live blocks lie."""

    HEADS: ClassVar[int] = 2

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._picture: Picture | None = None
        self._painter: Painter | None = None
        self._top: list[tuple[int, int]] = []
        """Lines of segments with blocks in the way: the segment, and an allocation in it or -1 for itself."""
        self._rest: IntArray = np.zeros(0, np.int64)
        """The other segments, one line each."""
        self._first: IntArray = np.zeros(0, np.int64)
        self._inside: IntArray = np.zeros(0, np.int64)
        self._bytes: IntArray = np.zeros(0, np.int64)
        self._live: IntArray = np.zeros(0, np.int64)
        self.selected = -1
        """The allocation that is lit, or -1."""

    def show(self, painter: Painter, picture: Picture) -> None:
        """Show the segments of another moment."""
        self._painter, self._picture = painter, picture
        at = picture.segments.at
        known = np.flatnonzero(at.segment >= 0)
        owner = at.segment[known]
        known = known[np.argsort(owner, kind="stable")]
        owner = at.segment[known]
        self._inside, self._bytes = at.allocation[known], picture.segments.block_bytes[known]
        self._first = np.searchsorted(owner, np.arange(len(at.address) + 1))
        self._live = np.bincount(owner, weights=self._bytes, minlength=len(at.address)).astype(np.int64)
        order = np.argsort(-at.size, kind="stable")
        self._top = self._lines_in_the_way(order)
        held = {segment for segment, _ in self._top}
        self._rest = order[[int(number) not in held for number in order]] if held else order
        self.renew()

    def _lines_in_the_way(self, order: IntArray) -> list[tuple[int, int]]:
        if self._picture is None or not self._picture.segments.in_the_way:
            return []
        places = dict(zip(self._inside.tolist(), np.repeat(np.arange(len(order)), np.diff(self._first)).tolist(),
                          strict=True))  # fmt: skip
        rank = np.empty(len(order), np.int64)
        rank[order] = np.arange(len(order))
        found = [(places[each], each) for each in self._picture.segments.in_the_way if each in places]
        found.sort(key=lambda line: int(rank[line[0]]))
        lines: list[tuple[int, int]] = []
        for segment, group in groupby(found, key=lambda line: line[0]):
            lines += [(segment, -1), *group]
        return lines

    def _line_at(self, index: int) -> tuple[int, int]:
        """Segment and allocation (-1: none) of a line."""
        if index < len(self._top):
            return self._top[index]
        return int(self._rest[index - len(self._top)]), -1

    def light(self, allocation: int) -> None:
        """Light the block of an allocation and go to its line, or to its segment's."""
        self.selected = allocation
        found = np.flatnonzero(self._inside == allocation)
        if len(found):
            segment = int(np.searchsorted(self._first, found[0], side="right")) - 1
            own = [n for n, line in enumerate(self._top) if line == (segment, allocation)]
            its = own or [n for n, line in enumerate(self._top) if line[0] == segment]
            place = its[0] if its else len(self._top) + int(np.flatnonzero(self._rest == segment)[0])
            self.put_cursor(place, quiet=True)
        self.reveal()
        self.refresh()

    def count(self) -> int:
        return len(self._top) + len(self._rest)

    def header(self, width: int) -> Sequence[Span]:
        if self._picture is None:
            return []
        left = f" {'segment':<15} {'size':>10} {'live':>5}"
        right = f"{len(self._picture.segments.at.size):,} segments "
        return columns([(left, "heading")], [(right, "dim")], width)

    def second_header(self, width: int) -> Sequence[Span]:
        if self._picture is None:
            return []
        shown = self._picture.segments
        note: list[Span] = [(f" {shown.note}", "ok" if shown.is_exact else "warn")]
        if shown.failure is not None and shown.in_the_way:
            note += [("  ▲", "error"), (f" {_in_words(shown.failure)}", "")]
            return pad(note, width)
        free = int(shown.at.size.sum()) - int(self._live.sum())
        right: list[Span] = [(f"{format_bytes(free)} not live ", "dim")]
        return columns(note, right, width) if width_of([*note, *right]) < width else pad(note, width)

    def line(self, index: int, width: int, selected: bool) -> Sequence[Span]:
        if self._picture is None or self._painter is None:
            return []
        at = self._picture.segments.at
        number, allocation = self._line_at(index)
        if allocation >= 0:
            return self._block_line(allocation, width, selected)
        address, size = int(at.address[number]), int(at.size[number])
        part = self._live[number] / size if size else 0
        room = max(8, width - 36)
        text = f"{address:#x}"
        return [
            ("›" if selected else " ", "key"),
            (f"{text:<15} {format_bytes(size):>10} {part:>5.0%}  ", ""),
            *self._bar(number, address, size, room),
        ]

    def _block_line(self, allocation: int, width: int, selected: bool) -> Sequence[Span]:
        """A block in the way: its size, its code, and how old it was."""
        assert self._picture is not None
        assert self._painter is not None
        block = self._picture.segments.in_the_way[allocation]
        label = self._painter.label(int(self._painter.analysis.lives.stack[allocation]))
        age = "older than the history" if block.age_rows is None else f"{block.age_rows:,} events old"
        return pad(
            [
                ("›" if selected else " ", "key"),
                ("  ▲ in the way ", "error"),
                (f"{format_bytes(block.size):>11}  ", "bold"),
                (f"{label}, ", ""),
                (age, "dim"),
            ],
            width,
        )

    def _bar(self, number: int, address: int, size: int, room: int) -> list[Span]:
        """The segment in `room` cells: each cell shows the category of which it holds most."""
        if self._painter is None or self._picture is None or size <= 0:
            return []
        analysis = self._painter.analysis
        mono = self.app.theme.endswith("mono")
        inside = slice(self._first[number], self._first[number + 1])
        mine = self._inside[inside]
        starts = (analysis.lives.address[mine] - address) / size * room
        ends = starts + self._bytes[inside] / size * room
        cells, weight = cover(starts, ends, analysis.category[mine], room)
        for kind, which in (
            (_IN_THE_WAY, [one in self._picture.segments.in_the_way for one in mine.tolist()]),
            (_SELECTED, mine == self.selected),
        ):
            for begin, end in zip(starts[which].tolist(), ends[which].tolist(), strict=True):
                cells[int(begin) : max(int(begin) + 1, ceil(end - 1e-9))] = kind
        spans: list[Span] = []
        for value, covered in zip(cells.tolist(), weight.tolist(), strict=True):
            if value == _FREE:
                span = ("·", "free")
            elif value == _SELECTED:
                span = ("◆", "key")
            elif value == _IN_THE_WAY:
                span = ("▲", "error")
            else:
                each = Category(value)
                span = (GLYPHS[each] if mono else "█" if covered >= 0.5 else "▌", STYLES[each])
            if spans and spans[-1][1] == span[1]:
                spans[-1] = (spans[-1][0] + span[0], span[1])
            else:
                spans.append(span)
        return spans

    def allocation_at(self, index: int) -> int | None:
        """The allocation in line `index`: the block of its own, or the largest live one of the segment."""
        if self._painter is None or not 0 <= index < self.count():
            return None
        number, allocation = self._line_at(index)
        inside = slice(self._first[number], self._first[number + 1])
        mine = self._inside[inside]
        if allocation >= 0 or not len(mine):
            return allocation if allocation >= 0 else None
        return int(mine[np.argmax(self._bytes[inside])])


def _in_words(failure: Failure) -> str:
    """What the blocks in the way are, and what their absence would have done."""
    in_place = failure.found is not None and failure.found.way == "stretch"
    them, their = ("it", "its segment gives") if len(failure.blocks) == 1 else ("them", "their segments give")
    words = f"without {them} {format_bytes(failure.request_bytes)} would have fitted"
    words += ", in place" if in_place else f", in what {their} back"
    if failure.lacking_bytes is not None and failure.lacking_bytes > 0:
        words += f"; {format_bytes(failure.lacking_bytes)} too little even with perfect packing"
    return words


def cover(
    starts: NDArray[np.float64], ends: NDArray[np.float64], kinds: IntArray, room: int
) -> tuple[IntArray, NDArray[np.float64]]:
    """What each of `room` cells shows of blocks that lie side by side.

    Args:
        starts: (n,) where each block begins, in cells.
        ends: (n,) where it ends.
        kinds: (n,) category of each, 0 or more.
        room: number of cells.

    Returns:
        (room,) the category that covers most of each cell, -1 where none does; (room,) its share of the cell.
    """
    table = np.zeros((len(Category), room + 1))
    steps = np.zeros((len(Category), room + 2))
    first = np.clip(starts.astype(np.int64), 0, room)
    last = np.clip(ends.astype(np.int64), 0, room)
    same = first == last
    np.add.at(table, (kinds[same], first[same]), ends[same] - starts[same])
    kind, begin, end = kinds[~same], first[~same], last[~same]
    np.add.at(table, (kind, begin), begin + 1 - starts[~same])
    np.add.at(table, (kind, end), ends[~same] - end)
    np.add.at(steps, (kind, begin + 1), 1)
    np.subtract.at(steps, (kind, end), 1)
    table += np.cumsum(steps, axis=1)[:, : room + 1]
    best = table[:, :room].argmax(axis=0)
    share = table[best, np.arange(room)]
    return np.where(share > 1e-9, best, _FREE), share
