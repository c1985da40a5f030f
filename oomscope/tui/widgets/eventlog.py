"""What happened in the session: the whole list, or its last lines where there is little room."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, wrap
from oomscope.views.events import EventLine

_GLYPHS = {"error": ("▲", "error"), "warn": ("!", "warn"), "ok": ("✔", "ok"), "info": ("·", "dim")}


def _lines(event: EventLine, width: int) -> list[Row]:
    glyph, style = _GLYPHS.get(event.severity, ("·", "dim"))
    where = "" if event.rank is None else f"rank {event.rank}: "
    when = f"step {event.step}" if event.step is not None else event.clock()
    lead = f"{when:<9.9}"
    texts = wrap(where + event.text, max(10, width - len(lead) - 3))
    first: list[Span] = [(f"{lead} ", "dim"), (f"{glyph} ", style), (texts[0], "")]
    rest = [Row([(" " * (len(lead) + 3), ""), (line, "")]) for line in texts[1:]]
    return [Row(first), *rest]


class EventLog(LineList):
    """All events, the newest at the bottom and in view."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._events: tuple[EventLine, ...] = ()

    def show(self, events: Sequence[EventLine]) -> None:
        if tuple(events) == self._events:
            return
        self._events = tuple(events)
        at_end = self.scroll_offset.y >= self.max_scroll_y - 1
        self.invalidate()
        if at_end:
            self.scroll_end(animate=False)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        if not self._events:
            return [], [Row([("nothing yet", "dim")])]
        return [], [line for event in self._events for line in _lines(event, width)]


class ProgressLines(LineList, can_focus=False):
    """The last few events, where there is no room for the whole list."""

    COUNT = 4

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._events: tuple[EventLine, ...] = ()

    def show(self, events: Sequence[EventLine]) -> None:
        newest = tuple(events)[-self.COUNT :]
        if newest != self._events:
            self._events = newest
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._events))

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        return [], [Row(_lines(event, width)[0].spans) for event in self._events]
