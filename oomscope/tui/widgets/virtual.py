"""A list whose lines are made when they are shown: a hundred thousand rows open at once and scroll freely."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual import events
from textual.binding import BindingType
from textual.geometry import Size
from textual.message import Message
from textual.scroll_view import ScrollView
from textual.strip import Strip

from oomscope.tui import actions
from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.spans import Span, to_strip


class VirtualList(ScrollView, can_focus=True):
    """Rows by number, with a cursor; subclasses say how many there are and what is in one."""

    HEADS: ClassVar[int] = 1
    """Lines that stay on top."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.LISTS)]
    DEFAULT_CSS = """
    VirtualList { height: 1fr; scrollbar-size: 1 1; overflow-x: hidden; }
    """

    class Moved(Message):
        """The cursor is on another row."""

        def __init__(self, rows: VirtualList, index: int) -> None:
            super().__init__()
            self.rows = rows
            self.index = index

        @property
        def control(self) -> VirtualList:
            return self.rows

        def can_replace(self, message: Message) -> bool:
            return isinstance(message, VirtualList.Moved) and message.rows is self.rows

    class Opened(Moved):
        """Enter or a double click on a row."""

        def can_replace(self, message: Message) -> bool:
            return False

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self.cursor = 0

    # -- what subclasses give ----------------------------------------------------------------

    def count(self) -> int:
        """Number of rows."""
        raise NotImplementedError

    def header(self, width: int) -> Sequence[Span]:
        """The fixed first line."""
        raise NotImplementedError

    def second_header(self, width: int) -> Sequence[Span]:
        """The fixed second line of a list with two."""
        return []

    def line(self, index: int, width: int, selected: bool) -> Sequence[Span]:
        """Row `index` in `width` cells."""
        raise NotImplementedError

    # -- painting ----------------------------------------------------------------------------

    def renew(self) -> None:
        """The rows changed."""
        self.cursor = max(0, min(self.cursor, self.count() - 1))
        self.virtual_size = Size(0, self.count() + self.HEADS)
        self.refresh()

    def render_line(self, y: int) -> Strip:
        width = self.scrollable_content_region.width
        colours: Palette = palette(self.app.theme, self.rich_style)
        if y == 0:
            return to_strip(self.header(width), width, colours)
        if y < self.HEADS:
            return to_strip(self.second_header(width), width, colours)
        index = y - self.HEADS + int(self.scroll_offset.y)
        if index >= self.count():
            return Strip.blank(width, colours.base)
        selected = index == self.cursor
        lit = selected and self.has_focus
        return to_strip(self.line(index, width, selected), width, colours, selected=lit)

    # -- the cursor --------------------------------------------------------------------------

    def put_cursor(self, index: int, *, quiet: bool = False) -> None:
        """Move the cursor to a row; `quiet` tells nobody."""
        index = max(0, min(index, self.count() - 1))
        if index == self.cursor:
            return
        self.cursor = index
        self.reveal()
        self.refresh()
        if not quiet:
            self.post_message(self.Moved(self, index))

    def reveal(self) -> None:
        """Scroll so that the cursor's row is in view."""
        height = max(1, self.scrollable_content_region.height - self.HEADS)
        top = int(self.scroll_offset.y)
        if self.cursor < top:
            self.scroll_to(y=self.cursor, animate=False)
        elif self.cursor >= top + height:
            self.scroll_to(y=self.cursor - height + 1, animate=False)

    def action_move(self, delta: int) -> None:
        self.put_cursor(self.cursor + delta)

    def action_page(self, direction: int) -> None:
        self.put_cursor(
            self.cursor + direction * max(1, self.scrollable_content_region.height - self.HEADS - 1)
        )

    def action_edge(self, direction: int) -> None:
        self.put_cursor(0 if direction < 0 else self.count() - 1)

    def action_open(self) -> None:
        if self.count():
            self.post_message(self.Opened(self, self.cursor))

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        if offset is None or offset.y < self.HEADS:
            return
        index = offset.y - self.HEADS + int(self.scroll_offset.y)
        if index < self.count():
            self.put_cursor(index)
            if event.chain == 2:
                self.action_open()

    def plain_text(self, limit: int = 200) -> str:
        """The first rows as text, for copying."""
        from oomscope.tui.widgets.spans import plain

        width = 120
        lines = [
            self.header(width),
            *(self.line(index, width, False) for index in range(min(limit, self.count()))),
        ]
        return "\n".join(plain(spans).rstrip() for spans in lines) + "\n"
