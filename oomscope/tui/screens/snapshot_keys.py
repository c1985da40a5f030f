"""Keys of the Snapshot screen that change the moment, the range, or the order: state and no widgets but the chart."""

from __future__ import annotations

import numpy as np

from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.widgets.snapshot_timeline import SnapshotTimeline
from oomscope.views.snapshot_picture import GROUPS, ORDERS, Painter, Part, Picture, Wish

MIN_ROWS = 8
"""Fewest events that zooming in leaves in view."""


class SnapshotKeys(BaseScreen):
    """What is asked for (the wish), what was answered (the picture), and the actions that change the former."""

    def __init__(self) -> None:
        super().__init__()
        self._painter: Painter | None = None
        self._picture: Picture | None = None
        self._wish = Wish(-1)
        self._marks: list[int] = []

    def _change(self, **changes: object) -> None:
        """Change the wish and ask for its picture."""
        raise NotImplementedError

    def _show_timeline(self) -> None:
        """Show the chart again: cursor or marks have changed."""
        raise NotImplementedError

    # -- keys: time --------------------------------------------------------------------------

    def _go(self, row: int) -> None:
        """Move the moment, and the range with it if need be."""
        painter = self._painter
        if painter is None or not painter.analysis.history.is_usable:
            return
        last = painter.analysis.device.n_analysed - 1
        row = max(-1, min(last, row))
        start, stop = self._wish.start, self._wish.stop
        if not start - 1 <= row < stop:
            span = stop - start
            start = max(0, min(row - span // 2, last + 1 - span))
            stop = start + span
        self._change(row=row, start=start, stop=stop)

    def action_cursor(self, delta: int) -> None:
        data = self._picture.timeline if self._picture is not None else None
        column = self.query_one(SnapshotTimeline).column_of(self._wish.row)
        if data is None or column is None:
            self._go(self._wish.row + delta)
            return
        if self._wish.stop - self._wish.start <= len(data.rows):
            self._go(self._wish.row + delta)
            return
        target = column + delta
        if 0 <= target < len(data.rows):
            self._go(int(data.rows[target]))
        else:
            span = (self._wish.stop - self._wish.start) // len(data.rows)
            self._go(self._wish.row + delta * max(1, span))

    def action_zoom(self, factor: int) -> None:
        self._zoom(factor, self._wish.row)

    def _zoom(self, factor: int, row: int) -> None:
        """Half or twice as many events, around `row`."""
        painter = self._painter
        if painter is None or not painter.analysis.history.is_usable:
            return
        whole = painter.analysis.device.n_analysed
        span = self._wish.stop - self._wish.start
        span = max(min(MIN_ROWS, whole), span // 2) if factor > 0 else min(whole, span * 2)
        start = max(0, min(row - span // 2, whole - span))
        self._change(start=start, stop=start + span)

    def action_fit(self) -> None:
        if self._painter is None:
            return
        if (
            len(self._marks) == 2
            and self._wish.stop - self._wish.start != abs(self._marks[1] - self._marks[0]) + 1
        ):
            first, last = sorted(self._marks)
            first = max(0, first)
            self._change(start=first, stop=last + 1, row=max(first, min(last, self._wish.row)))
            return
        analysis = self._painter.analysis
        self._change(start=0, stop=analysis.device.n_analysed if analysis.history.is_usable else 0)

    def action_peak(self) -> None:
        if self._painter is not None:
            self._go(self._painter.analysis.peak[1])

    def action_event(self, delta: int) -> None:
        if self._painter is None:
            return
        analysis = self._painter.analysis
        places = sorted({*analysis.steps.rows.tolist(), *(oom.event_index - 1 for oom in analysis.ooms)})
        row = self._wish.row
        later = [place for place in places if (place > row if delta > 0 else place < row)]
        if later:
            self._go(later[0] if delta > 0 else later[-1])
        else:
            self.notify(
                "no step boundary or error there" if places else "no steps were found in this history"
            )

    def action_mark(self) -> None:
        if self._wish.row in self._marks:
            self._marks.remove(self._wish.row)
        else:
            self._marks = [*self._marks, self._wish.row][-2:]
        self._show_timeline()

    def action_to_mark(self) -> None:
        others = [row for row in self._marks if row != self._wish.row]
        if others:
            self._go(others[0])

    def _row_at(self, column: int) -> int | None:
        """The row that a column of the chart stands for."""
        if self._picture is None or column >= len(self._picture.timeline.rows):
            return None
        return int(self._picture.timeline.rows[column])

    def on_snapshot_timeline_clicked(self, message: SnapshotTimeline.Clicked) -> None:
        row = self._row_at(message.column)
        if row is not None:
            self._go(row)

    def on_snapshot_timeline_dragged(self, message: SnapshotTimeline.Dragged) -> None:
        start, row = self._row_at(message.start), self._row_at(message.column)
        if start is not None and row is not None:
            self._marks = [start, row]
            self._go(row)

    def on_snapshot_timeline_zoomed(self, message: SnapshotTimeline.Zoomed) -> None:
        row = self._row_at(message.column)
        if row is not None:
            self._zoom(message.direction, row)

    # -- keys: order and grouping -----------------------------------------------------------

    def action_sort(self) -> None:
        self._change(order=ORDERS[(ORDERS.index(self._wish.order) + 1) % len(ORDERS)])

    def action_reverse(self) -> None:
        self._change(reverse=not self._wish.reverse)

    def action_fold(self) -> None:
        self._change(folded=not self._wish.folded)

    def action_group(self) -> None:
        self._change(group=GROUPS[(GROUPS.index(self._wish.group) + 1) % len(GROUPS)])

    def action_part(self) -> None:
        """All, then each stream, then each pool."""
        if self._painter is None:
            return
        analysis = self._painter.analysis
        parts: list[Part] = []
        for kind, of_each in (("stream", analysis.lives.stream), ("pool", analysis.pool)):
            used = np.unique(of_each).tolist()
            parts += [(kind, number) for number in used if len(used) > 1]
        if not parts:
            self.notify("this device used one stream and one pool only")
            return
        order = [None, *parts]
        self._change(part=order[(order.index(self._wish.part) + 1) % len(order)])
