"""Segments at the cursor, each scaled to its bytes: live blocks by category, gaps, and the selected block."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.categories import Category
from oomscope.tui.widgets.categories import GLYPHS, STYLES
from oomscope.tui.widgets.spans import Span, columns
from oomscope.tui.widgets.virtual import VirtualList
from oomscope.units import format_bytes
from oomscope.views.snapshot_picture import Painter, Picture

_FREE = -1
_SELECTED = -2


class SegmentMap(VirtualList):
    """One line per segment, largest first; the bar shows where its live blocks lie."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._picture: Picture | None = None
        self._painter: Painter | None = None
        self._order: NDArray[np.int64] = np.zeros(0, np.int64)
        self._first: NDArray[np.int64] = np.zeros(0, np.int64)
        self._inside: NDArray[np.int64] = np.zeros(0, np.int64)
        self._live: NDArray[np.int64] = np.zeros(0, np.int64)
        self.selected = -1
        """The allocation that is lit, or -1."""

    def show(self, painter: Painter, picture: Picture) -> None:
        """Show the segments of another moment."""
        self._painter, self._picture = painter, picture
        at = picture.segments
        known = at.segment >= 0
        self._inside = at.allocation[known]
        owner = at.segment[known]
        self._first = np.searchsorted(owner, np.arange(len(at.address) + 1))
        sizes = painter.analysis.lives.size[self._inside]
        self._live = np.bincount(owner, weights=sizes, minlength=len(at.address)).astype(np.int64)
        self._order = np.argsort(-at.size, kind="stable")
        self.renew()

    def light(self, allocation: int) -> None:
        """Light the block of an allocation and go to its segment."""
        self.selected = allocation
        if self._picture is not None:
            at = self._picture.segments
            found = np.flatnonzero(at.allocation == allocation)
            if len(found) and at.segment[found[0]] >= 0:
                self.put_cursor(int(np.flatnonzero(self._order == at.segment[found[0]])[0]), quiet=True)
        self.reveal()
        self.refresh()

    def count(self) -> int:
        return len(self._order)

    def header(self, width: int) -> Sequence[Span]:
        if self._picture is None:
            return []
        at = self._picture.segments
        total = int(at.size.sum())
        free = total - int(self._live.sum())
        left = f" {'segment':<15} {'size':>10} {'live':>5}  blocks"
        right = f"{len(at.size):,} segments, {format_bytes(total)}, {format_bytes(free)} not live "
        return columns([(left, "heading")], [(right, "dim")], width)

    def line(self, index: int, width: int, selected: bool) -> Sequence[Span]:
        if self._picture is None or self._painter is None:
            return []
        at = self._picture.segments
        number = int(self._order[index])
        address, size = int(at.address[number]), int(at.size[number])
        part = self._live[number] / size if size else 0
        room = max(8, width - 36)
        text = f"{address:#x}"
        return [
            ("›" if selected else " ", "key"),
            (f"{text:<15} {format_bytes(size):>10} {part:>5.0%}  ", ""),
            *self._bar(number, address, size, room),
        ]

    def _bar(self, number: int, address: int, size: int, room: int) -> list[Span]:
        """The segment in `room` cells: each cell shows the category of which it holds most."""
        if self._painter is None or size <= 0:
            return []
        analysis = self._painter.analysis
        mono = self.app.theme.endswith("mono")
        mine = self._inside[self._first[number] : self._first[number + 1]]
        starts = (analysis.lives.address[mine] - address) / size * room
        ends = starts + analysis.lives.size[mine] / size * room
        cells = np.full(room, _FREE, np.int64)
        weight = np.zeros(room)
        for begin, end, one in zip(starts.tolist(), ends.tolist(), mine.tolist(), strict=True):
            kind = _SELECTED if one == self.selected else int(analysis.category[one])
            for cell in range(int(begin), min(room, int(end) + 1)):
                covered = min(end, cell + 1) - max(begin, cell)
                if covered > weight[cell] or kind == _SELECTED:
                    weight[cell], cells[cell] = (2.0 if kind == _SELECTED else covered), kind
        spans: list[Span] = []
        for value, covered in zip(cells.tolist(), weight.tolist(), strict=True):
            if value == _FREE:
                span = ("·", "free")
            elif value == _SELECTED:
                span = ("◆", "key")
            else:
                each = Category(value)
                span = (GLYPHS[each] if mono else "█" if covered >= 0.5 else "▌", STYLES[each])
            if spans and spans[-1][1] == span[1]:
                spans[-1] = (spans[-1][0] + span[0], span[1])
            else:
                spans.append(span)
        return spans

    def allocation_at(self, index: int) -> int | None:
        """The largest live allocation of the segment in line `index`."""
        if self._painter is None or not 0 <= index < len(self._order):
            return None
        number = int(self._order[index])
        mine = self._inside[self._first[number] : self._first[number + 1]]
        if not len(mine):
            return None
        return int(mine[np.argmax(self._painter.analysis.lives.size[mine])])
