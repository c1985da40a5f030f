"""Live memory over the history, stacked by category under the reserved bytes.

As in the Live timeline a cell can show two colours, text on background: the layer that ends in the cell, and
the next one above that edge.
"""

from __future__ import annotations

from collections.abc import Sequence

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from oomscope.core.snapshot.categories import Category
from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.categories import GLYPHS, SHORT, STYLES
from oomscope.tui.widgets.spans import Span, columns, pad, to_strip, width_of
from oomscope.tui.widgets.timeline_area import EIGHTHS
from oomscope.units import GIB, MIB, format_bytes
from oomscope.views.snapshot_picture import Timeline

AXIS = 7
_RESERVED = len(Category)


class SnapshotTimeline(Widget, can_focus=True):
    """The chart; the screen moves its cursor and decides what range is shown."""

    ALLOW_SELECT = False
    """Dragging marks a range of the history; it does not select text."""
    DEFAULT_CSS = "SnapshotTimeline { width: 1fr; height: 1fr; min-height: 4; }"

    class Clicked(Message):
        """A column was clicked."""

        def __init__(self, column: int) -> None:
            super().__init__()
            self.column = column

    class Dragged(Message):
        """The mouse was pressed in one column and is held in another."""

        def __init__(self, start: int, column: int) -> None:
            super().__init__()
            self.start = start
            self.column = column

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, SnapshotTimeline.Dragged)

    class Zoomed(Message):
        """The wheel was turned with ctrl over a column: 1 for closer, -1 for farther."""

        def __init__(self, direction: int, column: int) -> None:
            super().__init__()
            self.direction = direction
            self.column = column

    class Resized(Message):
        """There is room for another number of columns."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._data: Timeline | None = None
        self._row = -1
        self._now = (0, 0)
        self._marks: tuple[int, ...] = ()
        self._events: tuple[int, ...] = ()
        self._steps: tuple[int, ...] = ()
        self._first = 0
        self._note = ""
        self._with_reserved = True
        self._strips: list[Strip] = []
        self._cells: tuple[object, list[tuple[str, list[tuple[str, Style]]]]] | None = None
        self._cells_data: Timeline | None = None
        self._look: object = None
        self._drag_from: int | None = None
        self._totals: dict[Category, int] = {}

    def show(
        self,
        data: Timeline | None,
        *,
        row: int,
        now: tuple[int, int],
        totals: dict[Category, int],
        marks: Sequence[int] = (),
        events: Sequence[int] = (),
        steps: Sequence[int] = (),
        first: int = 0,
        note: str = "",
        with_reserved: bool = True,
    ) -> None:
        """Show other data.

        Args:
            data: levels per column; None while nothing is known.
            row: row of the cursor.
            now: live and reserved bytes there; the column may show a higher row of its stretch.
            totals: live bytes of each category there.
            marks: rows that the user marked.
            events: rows of out-of-memory events.
            steps: rows at which steps begin.
            first: number of the first loaded row in the file.
            note: shown in place of the chart, such as why there is no history.
            with_reserved: whether the chart reaches up to the reserved bytes.
        """
        self._data, self._row, self._now, self._totals = data, row, now, totals
        self._marks, self._events = tuple(marks), tuple(events)
        self._steps, self._first, self._note, self._with_reserved = tuple(steps), first, note, with_reserved
        self._strips = []
        self.refresh()

    @property
    def room(self) -> int:
        """Columns that fit."""
        return max(4, self.size.width - AXIS)

    def column_of(self, row: int) -> int | None:
        """The column that shows `row`, None when it is out of range."""
        data = self._data
        if data is None or not len(data.rows):
            return None
        rows = data.rows
        if row < rows[0] and row >= 0 and rows[0] > 0 and row < rows[0] - 1:
            return None
        if row > rows[-1]:
            return len(rows) - 1
        return max(0, min(len(rows) - 1, int(rows.searchsorted(row, side="right")) - 1))

    def on_resize(self, event: events.Resize) -> None:
        self._strips = []
        self.post_message(self.Resized())

    # -- painting ----------------------------------------------------------------------------

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips = []

    def render_line(self, y: int) -> Strip:
        if y == 0 or not self._strips:  # once a repaint: finding the style costs more than a line
            look = (self.size, self.app.theme, self.rich_style)
            if not self._strips or look != self._look:
                self._look = look
                self._strips = self._build(palette(self.app.theme, self.rich_style))
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width, self.rich_style)

    def _build(self, colours: Palette) -> list[Strip]:
        width, height = self.size
        rows = height - 2
        data = self._data
        if data is None or rows < 1 or self._note:
            note = to_strip([(" " * AXIS, ""), (self._note, "dim")], width, colours)
            return [note, *[Strip.blank(width, colours.base)] * max(0, height - 1)]
        head = to_strip(self._head(data, width), width, colours)
        return [head, *self._area(data, rows, colours), to_strip(self._foot(data), width, colours)]

    def _head(self, data: Timeline, width: int) -> list[Span]:
        place = f"event {self._row + self._first:,}" if self._row >= 0 else "before the first event"
        live, reserved = self._now
        left: list[Span] = [(f" {place} ", "key"), (f"{format_bytes(live)} live", "bold")]
        left.append((f"  {format_bytes(reserved)} reserved", "dim"))
        if len(self._marks) == 2:
            a, b = sorted(self._marks)
            left.append((f"  marked {a + self._first:,} to {b + self._first:,}", "warn"))
        elif self._marks:
            left.append((f"  mark at {self._marks[0] + self._first:,}", "warn"))
        legend = self._legend(data, width - width_of(left) - 2)
        return columns(left, legend, width) if legend else pad(left, width)

    def _legend(self, data: Timeline, room: int) -> list[Span]:
        """Categories with their bytes at the cursor; where not all fit, the largest."""
        mono = self.app.theme.endswith("mono")
        shown = [each for each in Category if data.levels[each].any()]
        entries: dict[Category, list[Span]] = {}
        for labels in ({each: each.label for each in shown}, SHORT):
            for each in shown:
                size = f" {_axis(self._totals[each])}" if self._totals.get(each) else ""
                sign = (GLYPHS[each] if mono else "█", STYLES[each])
                entries[each] = [sign, (f" {labels[each]}{size}  ", "dim")]
            if sum(map(width_of, entries.values())) <= room:
                break
        fitting: set[Category] = set()
        for each in sorted(entries, key=lambda one: -self._totals.get(one, 0)):
            room -= width_of(entries[each])
            if room < 0:
                break
            fitting.add(each)
        return [span for each, spans in entries.items() if each in fitting for span in spans]

    def _area(self, data: Timeline, height: int, colours: Palette) -> list[Strip]:
        """The chart's lines: cells that were computed before, with cursor and marks laid over them."""
        lit = {self.column_of(row): "┃" for row in self._marks}
        lit[self.column_of(self._row)] = "│"
        cursor = colours.style("key")
        lines = []
        for label, cells in self._cells_of(data, height, colours):
            segments = [Segment(label, colours.style("dim"))]
            run: list[str] = []
            last: Style | None = None
            for x, (glyph, style) in enumerate(cells):
                if x in lit:
                    ground = None if glyph in " ·" else style.bgcolor if glyph in "▁▂▃" else style.color
                    glyph, style = lit[x], cursor + Style(bgcolor=ground)
                if style is not last:
                    if run:
                        segments.append(Segment("".join(run), last))
                    run, last = [], style
                run.append(glyph)
            segments.append(Segment("".join(run), last))
            lines.append(Strip(segments).adjust_cell_length(self.size.width, colours.base))
        return lines

    def _cells_of(
        self, data: Timeline, height: int, colours: Palette
    ) -> list[tuple[str, list[tuple[str, Style]]]]:
        """Label and cells of each line; kept until data, size or theme change, as most keys change none of them."""
        key = (id(data), height, self._with_reserved, colours)
        if self._cells is None or self._cells[0] != key:
            top = self._top(data)
            full = 8 * height
            edges = data.levels.cumsum(axis=0) * full // top
            tops = [row.tolist() for row in edges.clip(0, full)]
            if self._with_reserved:
                tops.append((data.reserved * full // top).clip(0, full).tolist())
            painters = [(STYLES[each], GLYPHS[each] if colours.mono else "█") for each in Category]
            painters.append(("faint", "·"))
            by_column = list(zip(*tops, strict=True))
            lines = []
            for y in range(height):
                low = (height - 1 - y) * 8
                lines.append(
                    (self._label(y, height, top), [_cell(each, low, painters, colours) for each in by_column])
                )
            self._cells = key, lines
            self._cells_data = data  # so that its id stays its own
        return self._cells[1]

    def _top(self, data: Timeline) -> int:
        highest = int(data.levels.sum(axis=0).max(initial=1))
        if self._with_reserved:
            highest = max(highest, int(data.reserved.max(initial=1)))
        return max(1, highest)

    def _label(self, y: int, height: int, top: int) -> str:
        if y == 0:
            return f"{_axis(top)}┤".rjust(AXIS)
        if height >= 7 and y == height // 2:
            return f"{_axis(top * (height - y) / height)}┤".rjust(AXIS)
        return "│".rjust(AXIS)

    def _foot(self, data: Timeline) -> list[Span]:
        line = ["─"] * len(data.rows)
        for rows, glyph in ((self._steps, "┴"), (self._events, "▲"), (self._marks, "┻"), ((self._row,), "┃")):
            shown = [row for row in rows if data.rows[0] - 1 <= row <= data.rows[-1] + 1]
            columns_of = data.rows.searchsorted(shown, side="right") - 1
            for column in set(columns_of.clip(0, len(line) - 1).tolist()):
                line[column] = glyph
        first = f"{int(data.rows[0]) + self._first:,} " if data.rows[0] >= 0 else ""
        last = f" {int(data.rows[-1]) + self._first:,}"
        self._number_steps(data, line)
        text = "".join(line)
        if len(text) > len(first) + len(last) + 8:
            text = first + text[len(first) : len(text) - len(last)] + last
        return [("└".rjust(AXIS), "faint"), (text, "dim")]

    def _number_steps(self, data: Timeline, line: list[str]) -> None:
        """Write numbers behind the marks of steps where there is room."""
        rows = data.rows
        for number, row in enumerate(self._steps, 1):
            if not rows[0] <= row <= rows[-1]:
                continue
            column = int(rows.searchsorted(row, side="right")) - 1
            text = str(number)
            end = column + 1 + len(text)
            if line[column] == "┴" and end < len(line) and set(line[column + 1 : end + 1]) == {"─"}:
                line[column + 1 : end] = text

    # -- mouse -------------------------------------------------------------------------------

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """A click puts the cursor; dragging from there marks a range."""
        column = self._column_below(event)
        if column is not None and event.button == 1:
            self._drag_from = column
            self.capture_mouse()
            self.post_message(self.Clicked(column))

    def on_mouse_move(self, event: events.MouseMove) -> None:
        column = self._column_below(event) if self._drag_from is not None else None
        if column is not None and self._drag_from is not None and column != self._drag_from:
            self.post_message(self.Dragged(self._drag_from, column))

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._drag_from is not None:
            self._drag_from = None
            self.release_mouse()

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        self._wheel(event, 1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        self._wheel(event, -1)

    def _wheel(self, event: events.MouseEvent, direction: int) -> None:
        column = self._column_below(event) if event.ctrl else None
        if column is not None:
            event.stop()
            self.post_message(self.Zoomed(direction, column))

    def _column_below(self, event: events.MouseEvent) -> int | None:
        """The column under the mouse, None beside them."""
        offset, data = event.get_content_offset(self), self._data
        if offset is None or data is None or not 0 <= offset.x - AXIS < len(data.rows):
            return None
        return int(offset.x - AXIS)

    def plain_text(self) -> str:
        """The chart as text, for copying."""
        return "\n".join("".join(segment.text for segment in strip).rstrip() for strip in self._strips) + "\n"


def _axis(value: float) -> str:
    if value >= 100 * GIB:
        return f"{value / GIB:.0f}G"
    if value >= GIB:
        return f"{value / GIB:.1f}G"
    return f"{value / MIB:.0f}M" if value >= MIB or not value else f"{value / 1024:.0f}K"


def _cell(
    tops: tuple[int, ...], low: int, painters: list[tuple[str, str]], colours: Palette
) -> tuple[str, Style]:
    """Glyph and style of one cell: the lowest layer that reaches into it, the next one behind."""
    if colours.mono:
        return _pattern(tops, low, painters, colours)
    for number, top in enumerate(tops):
        inside = top - low
        if inside <= 0:
            continue
        style, glyph = painters[number]
        if number == _RESERVED:
            return glyph if inside >= 4 else " ", colours.style(style)
        if inside >= 8:
            return glyph, colours.style(style)
        behind = _behind(tops, number, low)
        if behind is None:
            return EIGHTHS[inside], colours.style(style)
        return EIGHTHS[inside], colours.mixed(style, painters[behind][0])
    return " ", colours.base


def _pattern(
    tops: tuple[int, ...], low: int, painters: list[tuple[str, str]], colours: Palette
) -> tuple[str, Style]:
    """Glyph and style of the layer that fills most of a cell: patterns cannot share one."""
    best, most, bottom = None, max(0, low + 8 - tops[-1]), low
    for number, top in enumerate(tops):
        covered = min(top, low + 8) - bottom
        if covered > most:
            best, most = number, covered
        bottom = max(bottom, min(top, low + 8))
    if best is None:
        return " ", colours.base
    style, glyph = painters[best]
    return glyph, colours.style(style)


def _behind(tops: tuple[int, ...], number: int, low: int) -> int | None:
    """The layer that fills most of a cell above layer `number`; None when most of it is empty there."""
    best, most = None, max(0, low + 8 - max(tops[:_RESERVED]))
    for other in range(number + 1, _RESERVED):
        covered = min(tops[other], low + 8) - max(tops[other - 1], low)
        if covered > most:
            best, most = other, covered
    return best
