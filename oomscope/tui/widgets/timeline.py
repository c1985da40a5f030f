"""The memory of one rank over its steps: three filled layers under the card's limit, with a cursor and marks."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.spans import Span, clip, columns, pad, to_strip, width_of
from oomscope.tui.widgets.timeline_area import AXIS, LAYERS, PATTERNS, STYLES, Area
from oomscope.units import GIB
from oomscope.views import wording
from oomscope.views.series import EMPTY, Columns, History, cut

_WINDOWS = (None, 50, 500)


@dataclass(frozen=True)
class TimelineData:
    """What a timeline shows. Sizes in bytes."""

    title: str
    name: str = ""
    """The short form of the title, for when the cursor's numbers need the room."""
    short_title: str = ""
    """For a narrow chart."""
    history: History = EMPTY
    capacity_bytes: int | None = None
    """The top of the chart when it is known and near; drawn as a line."""
    limit_word: str = "limit"
    events: tuple[tuple[int, str], ...] = ()
    """(step, severity), shown as marks below the chart."""
    unit_note: str = ""
    """"simulated", "measured" or "host memory"."""
    empty: str = "no finished step yet"
    """In place of the chart while there is nothing to draw."""
    layer_names: tuple[str, str, str] = ("step low", "step peak", "reserved")


class Timeline(Widget):
    """Filled areas over steps, a time cursor, zoom, marks and layers that can be hidden."""

    ALLOW_SELECT = False
    """Dragging reads a range of steps; it does not select text."""
    DEFAULT_CSS = "Timeline { width: 1fr; height: 1fr; min-height: 3; }"

    class Moved(Message):
        """The time cursor is at another step, or was put away (None)."""

        def __init__(self, step: int | None) -> None:
            super().__init__()
            self.step = step

    def __init__(self, *, id: str | None = None, compact: bool = False) -> None:
        super().__init__(id=id)
        self._data = TimelineData("")
        self._compact = compact
        self._strips: list[Strip] = []
        self._look: object = None
        self._cut: Columns | None = None
        self.window: int | None = None
        self._end: int | None = None
        self.cursor_step: int | None = None
        self._mark: int | None = None
        self._drag_from: int | None = None
        self.hidden: set[str] = set()

    # -- data --------------------------------------------------------------------------------

    def show(self, data: TimelineData) -> None:
        if data != self._data:
            self._data = data
            self.invalidate()

    def invalidate(self) -> None:
        self._strips = []
        self.refresh()

    def notify_style_update(self) -> None:
        super().notify_style_update()
        self._strips = []

    def render_line(self, y: int) -> Strip:
        look = (self.size, self.app.theme)
        if not self._strips or look != self._look:
            self._look = look
            self._strips = self._build(self.size, palette(self.app.theme, self.rich_style))
        return self._strips[y] if y < len(self._strips) else Strip.blank(self.size.width)

    @property
    def shown(self) -> Columns:
        """The columns in view."""
        if self._cut is None:
            self._cut = cut(
                self._data.history, max(1, self.size.width - AXIS), window=self.window, end=self._end
            )
        return self._cut

    # -- painting ----------------------------------------------------------------------------

    def _build(self, size: Size, colours: Palette) -> list[Strip]:
        width, height = size
        self._cut = None
        room, rows = width - AXIS, height - 2
        if room < 4 or rows < 1:
            return [Strip.blank(width, colours.base)] * height
        shown = self.shown
        head = to_strip(self._head(width), width, colours)
        if not shown.peak:
            note = to_strip([(" " * AXIS, ""), (self._data.empty, "dim")], width, colours)
            blank = Strip.blank(width, colours.base)
            return [head, note, *[blank] * (height - 2)]
        top = self._top(shown)
        body = Area(
            shown,
            top=top,
            room=room,
            rows=rows,
            colours=colours,
            hidden=self.hidden,
            capacity=self._data.capacity_bytes,
            limit_word=self._data.limit_word,
            cursor=self.cursor_step,
        ).strips()
        return [head, *body, to_strip(self._foot(shown, room), width, colours)]

    def _head(self, width: int) -> list[Span]:
        data = self._data
        if self.cursor_step is not None and self.shown.peak:
            left: list[Span] = [(f" {data.name}  ", "bold"), *self._readout()]
        else:
            left = [(f" {data.title}", "bold")]
        if self._compact or self.cursor_step is not None or not self.shown.peak:
            return pad(left, width)
        brief = width < 100
        legend: list[Span] = []
        mono = self.app.theme.endswith("mono")
        for name, label in zip(LAYERS, data.layer_names, strict=True):
            if name == "reserved" and not data.history.reserved:
                continue
            glyph = PATTERNS[name] if mono else "█"
            legend += [
                (glyph if name not in self.hidden else " ", STYLES[name]),
                (f" {label.removeprefix('step ') if brief else label}  ", "dim"),
            ]
        note: Span = (f"  {data.unit_note}" if data.unit_note else "", "dim")
        if width_of([*left, note, *legend]) < width:
            left.append(note)
        elif width_of([*left, *legend]) >= width:
            left = [(f" {data.short_title or data.name}", "bold")]
        return columns(left, legend, width)

    def _readout(self) -> list[Span]:
        step = self.cursor_step or 0
        history = self._data.history
        bucket = history.bucket_of(step)
        parts: list[Span] = [(f"step {step}", "key"), (f"  low {wording.gib(history.low[bucket], 2)}", "")]
        if self._mark is not None and self._mark != step:
            change = history.low[bucket] - history.low[history.bucket_of(self._mark)]
            parts.append((f" ({change / GIB:+.2f} since step {self._mark})".replace("-", "−"), "warn"))
        parts.append((f"  peak {wording.gib(history.peak[bucket], 2)}", ""))
        if history.reserved:
            parts.append((f"  resv {wording.gib(history.reserved[bucket], 2)}", ""))
        parts.append((" GiB", ""))
        return parts

    def _top(self, shown: Columns) -> int:
        """Top of the chart: the card's capacity, unless all is so far below that it would be a flat line."""
        highest = max(max(shown.peak), max(shown.reserved, default=0), 1)
        capacity = self._data.capacity_bytes
        if capacity is not None and highest > capacity * 0.2:
            return max(capacity, highest)
        return int(highest * 1.15)

    def _foot(self, shown: Columns, room: int) -> list[Span]:
        used = len(shown.peak)
        line = ["─"] * used
        for step, _ in self._data.events:
            column = shown.column_of(step)
            if column is not None:
                line[column] = "▲"
        for place, glyph in ((self._mark, "┴"), (self.cursor_step, "┃")):
            column = shown.column_of(place) if place is not None else None
            if column is not None:
                line[column] = glyph
        first, last = f"step {shown.first_step} ", f" {shown.last_step}"
        text = "".join(line)
        if used > len(first) + len(last) + 4:
            text = first + text[len(first) : used - len(last)] + last
        return [("└".rjust(AXIS), "faint"), (clip(text, room), "dim")]

    # -- keys, called by the screen's actions ------------------------------------------------

    def move_cursor(self, delta: int) -> None:
        """Move by `delta` columns; the first move puts the cursor on the newest step."""
        shown = self.shown
        if not shown.peak:
            return
        if self.cursor_step is None:
            self.put_cursor(shown.last_step)
            return
        column = shown.column_of(self.cursor_step)
        if column is None:
            self.put_cursor(shown.last_step)
            return
        per_move = max(1, round(shown.steps_per_column)) * delta
        self.put_cursor(max(shown.first_step, min(shown.last_step, self.cursor_step + per_move)))

    def put_cursor(self, step: int | None) -> None:
        if step != self.cursor_step:
            self.cursor_step = step
            self.invalidate()
            self.post_message(self.Moved(step))

    def zoom(self, direction: int) -> None:
        """Halve or double the number of steps in view, around the cursor when there is one."""
        shown = self.shown
        if not shown.peak:
            return
        now = shown.last_step - shown.first_step + 1
        total = self._data.history.last_step - self._data.history.first_step + 1
        wanted = max(4, now // 2 if direction > 0 else now * 2)
        if wanted >= total:
            self.fit()
            return
        middle = self.cursor_step if self.cursor_step is not None else shown.last_step - wanted // 2
        end = min(self._data.history.last_step, middle + wanted // 2)
        self.window = wanted
        self._end = None if end >= self._data.history.last_step else end
        self.invalidate()

    def fit(self) -> None:
        """All steps, following the newest."""
        self.window, self._end = None, None
        self.invalidate()

    def cycle_window(self) -> None:
        """All steps, the last 50, the last 500."""
        at = _WINDOWS.index(self.window) if self.window in _WINDOWS else 0
        self.window, self._end = _WINDOWS[(at + 1) % len(_WINDOWS)], None
        self.invalidate()

    def go_to_peak(self) -> None:
        """Cursor on the highest peak in view."""
        history, shown = self._data.history, self.shown
        if not shown.peak:
            return
        first, last = history.bucket_of(shown.first_step), history.bucket_of(shown.last_step)
        bucket = max(range(first, last + 1), key=lambda i: history.peak[i])
        self.put_cursor(history.first_step + bucket * history.span)

    def go_to_event(self, direction: int) -> None:
        steps = sorted({step for step, _ in self._data.events})
        here = self.cursor_step if self.cursor_step is not None else self._data.history.last_step + 1
        later = [s for s in steps if s > here] if direction > 0 else [s for s in reversed(steps) if s < here]
        if later:
            self.put_cursor(later[0])

    def mark(self) -> None:
        self._mark = self.cursor_step if self.cursor_step != self._mark else None
        self.invalidate()

    def go_to_mark(self) -> None:
        if self._mark is not None:
            self.put_cursor(self._mark)

    def toggle_layer(self, name: str) -> None:
        self.hidden ^= {name}
        self.invalidate()

    def on_mouse_down(self, event: events.MouseDown) -> None:
        """A click puts the cursor; dragging from there marks where it began and reads the change."""
        step = self._step_below(event)
        if step is not None and event.button == 1:
            self._drag_from = step
            self.capture_mouse()
            self.put_cursor(step)

    def on_mouse_move(self, event: events.MouseMove) -> None:
        step = self._step_below(event) if self._drag_from is not None else None
        if step is not None and step != self.cursor_step:
            self._mark = self._drag_from
            self.put_cursor(step)

    def on_mouse_up(self, event: events.MouseUp) -> None:
        if self._drag_from is not None:
            self._drag_from = None
            self.release_mouse()

    def _step_below(self, event: events.MouseEvent) -> int | None:
        """The step under the mouse, None beside the columns."""
        offset, shown = event.get_content_offset(self), self.shown
        if offset is None or not 0 <= offset.x - AXIS < len(shown.peak):
            return None
        return shown.step_at(offset.x - AXIS)

    def on_mouse_scroll_up(self, event: events.MouseScrollUp) -> None:
        if event.ctrl:
            event.stop()
            self.zoom(1)

    def on_mouse_scroll_down(self, event: events.MouseScrollDown) -> None:
        if event.ctrl:
            event.stop()
            self.zoom(-1)

    def plain_text(self) -> str:
        """The chart as text, for `y`."""
        return "\n".join("".join(s.text for s in strip).rstrip() for strip in self._strips) + "\n"
