"""A list of styled lines with a cursor, on Textual's line API: the base of every table, tree and log here.

Rows are built once per change of data, width or theme; a strip is painted when its line is first shown and
kept until then. A list of a million rows costs what is visible.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.geometry import Region, Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from oomscope.tui import actions
from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.spans import Row, Span, plain, to_strip


class LineList(ScrollView, can_focus=True):
    """Rows with an optional fixed header; subclasses build them for a given width."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.LISTS)]
    DEFAULT_CSS = """
    LineList { height: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }
    """
    MARK = "›"

    class Moved(Message):
        """The cursor is on another line."""

        def __init__(self, lines: LineList, key: str) -> None:
            super().__init__()
            self.lines = lines
            self.key = key

        @property
        def control(self) -> LineList:
            return self.lines

    class Opened(Moved):
        """Enter or a double click on a line."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._header: list[Sequence[Span]] = []
        self._rows: list[Row] = []
        self._strips: dict[int, Strip] = {}
        self._built_width = -1
        self._palette: tuple[str, Palette] | None = None
        self.cursor_key = ""

    # -- what subclasses give ----------------------------------------------------------------

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        """Header lines and rows for `width` cells."""
        raise NotImplementedError

    # -- data and painting -------------------------------------------------------------------

    @property
    def palette(self) -> Palette:
        """Kept until the style changes: working out `rich_style` for every line costs more than painting it."""
        theme = self.app.theme
        if self._palette is None or self._palette[0] != theme:
            self._palette = (theme, palette(theme, self.rich_style))
            self._strips.clear()
        return self._palette[1]

    @property
    def rows(self) -> list[Row]:
        """The rows as last built."""
        self._ensure()
        return self._rows

    def invalidate(self) -> None:
        """The data changed: rebuild before the next paint."""
        self._built_width = -1
        self._strips.clear()
        self._ensure()
        self.refresh()

    def _ensure(self) -> None:
        width = self.scrollable_content_region.width
        if width == self._built_width or width <= 0:
            return
        self._built_width = width
        self._strips.clear()
        self._header, self._rows = self.build(width)
        self.virtual_size = Size(0, len(self._rows) + len(self._header))
        keys = [row.key for row in self._rows if row.key]
        if self.cursor_key not in keys:
            self.cursor_key = keys[0] if keys else ""
            self._header, self._rows = self.build(width)  # rows mark the cursor themselves

    def render_line(self, y: int) -> Strip:
        self._ensure()
        width = self.scrollable_content_region.width
        colours = self.palette
        line = y if y < len(self._header) else y + int(self.scroll_offset.y)
        strip = self._strips.get(line)
        if strip is None:
            strip = self._strips[line] = self._paint(line, width, colours)
        return strip

    def _paint(self, line: int, width: int, colours: Palette) -> Strip:
        if line < len(self._header):
            return to_strip(self._header[line], width, colours)
        index = line - len(self._header)
        if index >= len(self._rows):
            return Strip.blank(width, colours.base)
        row = self._rows[index]
        selected = bool(row.key) and row.key == self.cursor_key
        return to_strip(row.spans, width, colours, selected=selected and self.shows_cursor, fill=row.fill)

    @property
    def shows_cursor(self) -> bool:
        """Whether the cursor's line is lit: where the keyboard is. Elsewhere its mark alone shows the place."""
        return self.has_focus

    def on_focus(self) -> None:
        self._repaint()

    def on_blur(self) -> None:
        self._repaint()

    def _repaint(self) -> None:
        self._strips.clear()
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._palette = None
        self._strips.clear()

    def on_resize(self, event: events.Resize) -> None:
        self._ensure()

    def plain_text(self) -> str:
        """All rows as text, for `y`."""
        self._ensure()
        lines = [*self._header, *(row.spans for row in self._rows)]
        return "\n".join(plain(spans).rstrip() for spans in lines) + "\n"

    # -- the cursor --------------------------------------------------------------------------

    def _selectable(self) -> list[int]:
        self._ensure()
        return [index for index, row in enumerate(self._rows) if row.key]

    def select(self, key: str, *, quiet: bool = False) -> None:
        """Put the cursor on the row called `key`; `quiet` posts no message."""
        if key == self.cursor_key:
            return
        self.cursor_key = key
        self._built_width = -1
        self._strips.clear()
        self._ensure()
        self.refresh()
        self._show_cursor()
        if not quiet:
            self.post_message(self.Moved(self, key))

    def _show_cursor(self) -> None:
        index = next((i for i, row in enumerate(self._rows) if row.key == self.cursor_key), None)
        if index is None:
            return
        height = self.scrollable_content_region.height - len(self._header)
        top = int(self.scroll_offset.y)
        if index < top:
            self.scroll_to(y=index, animate=False)
        elif index >= top + height:
            self.scroll_to(y=index - height + 1, animate=False)

    def _step(self, delta: int) -> None:
        places = self._selectable()
        if not places:
            self.scroll_relative(y=delta, animate=False)
            return
        at = next((n for n, i in enumerate(places) if self._rows[i].key == self.cursor_key), 0)
        target = places[max(0, min(len(places) - 1, at + delta))]
        self.select(self._rows[target].key)

    def action_move(self, delta: int) -> None:
        self._step(delta)

    def action_page(self, direction: int) -> None:
        self._step(direction * max(1, self.scrollable_content_region.height - len(self._header) - 1))

    def action_edge(self, direction: int) -> None:
        if self._selectable():
            self._step(direction * len(self._rows))
        else:
            self.scroll_to(y=0 if direction < 0 else self.virtual_size.height, animate=False)

    def action_open(self) -> None:
        if self.cursor_key:
            self.post_message(self.Opened(self, self.cursor_key))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or offset.y < len(self._header):
            return
        index = offset.y - len(self._header) + int(self.scroll_offset.y)
        if index < len(self._rows) and self._rows[index].key:
            self.select(self._rows[index].key)
            if event.chain == 2:
                self.action_open()

    def region_of_cursor(self) -> Region:
        """Where the cursor's line is, in cells of this widget."""
        index = next((i for i, row in enumerate(self._rows) if row.key == self.cursor_key), 0)
        return Region(0, index + len(self._header) - int(self.scroll_offset.y), self.size.width, 1)


class TextLines(LineList):
    """A LineList that is simply given its rows."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._given: list[Row] = []
        self._given_header: list[Sequence[Span]] = []

    def show(self, rows: list[Row], header: list[Sequence[Span]] | None = None) -> None:
        self._given, self._given_header = rows, header or []
        self.invalidate()

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        return self._given_header, self._given
