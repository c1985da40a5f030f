"""The log overlay: what the job's processes printed, one stream at a time, following its end."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from rich.cells import chop_cells
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.screen import ModalScreen
from textual.widgets import Input

from oomscope.tui import actions
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip
from oomscope.views import logs

if TYPE_CHECKING:
    from oomscope.tui.app import OomscopeApp

_ALARMS = ("Error", "error:", "ERROR", "Traceback", "out of memory")


class LogLines(LineList):
    """The last lines of one log; a long one takes several rows."""

    def __init__(self) -> None:
        super().__init__()
        self._lines: list[str] = []
        self.words = ""
        self.wraps = True
        self._rows_of: dict[tuple[str, int], list[str]] = {}
        """Line and width to its parts: when a line is added the others are not broken again."""
        self._starts: list[int] = []
        """The first row of each line."""

    def show(self, lines: list[str]) -> None:
        if lines != self._lines:
            self._lines = lines
            self.invalidate()

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        if not self._lines:
            return [], [Row([("this stream is empty so far", "dim")])]
        before, self._rows_of = self._rows_of, {}
        rows: list[Row] = []
        self._starts = []
        for line in self._lines:
            self._starts.append(len(rows))
            parts = before.get((line, width)) if self.wraps else [clip(line, width)]
            if parts is None:
                parts = chop_cells(line, width) or [""]
            if self.wraps:
                self._rows_of[line, width] = parts
            style = self._style(line)
            rows += [Row([(part, style)]) for part in parts]
        return [], rows

    def _style(self, line: str) -> str:
        if self.words and self.words.lower() in line.lower():
            return "key"
        return "warn" if any(word in line for word in _ALARMS) else ""

    def find(self, direction: int) -> bool:
        """Scroll to the next line with the searched text, in `direction`; False when there is none."""
        here = int(self.scroll_offset.y)
        hits = [
            row
            for row, line in zip(self._starts, self._lines, strict=False)
            if self.words.lower() in line.lower()
        ]
        hits = (
            [row for row in hits if row > here] if direction > 0 else [r for r in reversed(hits) if r < here]
        )
        if hits:
            self.scroll_to(y=hits[0], animate=False)
        return bool(hits)

    def plain_text(self) -> str:
        return "\n".join(self._lines) + "\n"


class LogScreen(ModalScreen[None]):
    """Covers the screen with one log."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.LOG)]
    DEFAULT_CSS = """
    LogScreen { background: $background; }
    LogScreen > Vertical { border: round $line; border-title-style: bold; border-title-color: $foreground;
        border-subtitle-color: $foreground; padding: 0 1; background: $background;
    }
    LogScreen Input { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    LogScreen.-search Input { display: block; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._at = 0
        self._following = True
        self._seen: tuple[Path, int] | None = None

    def compose(self) -> ComposeResult:
        with Vertical():
            yield LogLines()
            yield Input(placeholder="text to find", compact=True)

    def on_mount(self) -> None:
        self.query_one(LogLines).focus()
        self.reload()
        self.set_interval(0.5, self.reload)

    @property
    def _streams(self) -> list[logs.Stream]:
        model = cast("OomscopeApp", self.app).model
        return logs.streams(model.session.path) if model is not None else []

    def reload(self) -> None:
        """Read the end of the stream again when it has grown."""
        streams = self._streams
        lines = self.query_one(LogLines)
        box = self.query_one(Vertical)
        if not streams:
            box.border_title = "Log"
            lines.show([])
            return
        stream = streams[self._at % len(streams)]
        box.border_title = f"{stream.name}  ({self._at % len(streams) + 1} of {len(streams)})"
        follow = "following" if self._following else "standing still"
        box.border_subtitle = f"{follow} · tab other stream · f follow · w wrap · / find · esc close"
        try:
            stamp = (stream.path, stream.path.stat().st_size)
            if stamp == self._seen:
                return
            self._seen = stamp
            found, cut = logs.tail(stream.path)
        except OSError as error:
            lines.show([f"cannot read {stream.path}: {error.strerror}"])
            return
        lines.show([*(["… earlier lines are in the file"] if cut else []), *found])
        if self._following:
            lines.call_after_refresh(lines.scroll_end, animate=False)

    def action_source(self) -> None:
        self._at += 1
        self._seen = None
        self.reload()

    def action_wrap(self) -> None:
        lines = self.query_one(LogLines)
        lines.wraps = not lines.wraps
        lines.invalidate()
        if self._following:
            lines.call_after_refresh(lines.scroll_end, animate=False)

    def action_follow(self) -> None:
        self._following = not self._following
        self._seen = None
        self.reload()

    def action_search(self) -> None:
        self.add_class("-search")
        self.query_one(Input).focus()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        lines = self.query_one(LogLines)
        lines.words = event.value
        self._following = False
        lines.invalidate()
        lines.focus()
        if event.value and not lines.find(-1) and not lines.find(1):
            self.notify(f"no line with {event.value!r}")

    def action_search_next(self, direction: int) -> None:
        if self.query_one(LogLines).words and not self.query_one(LogLines).find(direction):
            self.notify("no more matches")

    def action_back(self) -> None:
        self.dismiss(None)
