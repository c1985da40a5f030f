"""The memory of one rank over its steps: three filled layers under the card's limit, with a cursor and marks.

A cell can show two colours, text on background. The layers are nested (low <= peak <= reserved), so in the
cell where one ends, the next one that reaches above that edge is the background: no layer is dropped and no
gap opens.
"""

from __future__ import annotations

from dataclasses import dataclass

from rich.segment import Segment
from rich.style import Style
from textual import events
from textual.geometry import Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget

from oomscope.tui.themes import Palette, palette
from oomscope.tui.widgets.spans import Span, clip, columns, pad, to_strip, width_of
from oomscope.units import GIB
from oomscope.views import wording
from oomscope.views.series import EMPTY, Columns, History, cut

_EIGHTHS = " ▁▂▃▄▅▆▇█"
_LAYERS = ("low", "peak", "reserved")
_STYLES = {"low": "baseline", "peak": "allocated", "reserved": "inactive"}
#: Whole-cell patterns for a screen without colours.
_PATTERNS = {"low": "█", "peak": "▓", "reserved": "░"}
_AXIS = 7
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
                self._data.history, max(1, self.size.width - _AXIS), window=self.window, end=self._end
            )
        return self._cut

    # -- painting ----------------------------------------------------------------------------

    def _build(self, size: Size, colours: Palette) -> list[Strip]:
        width, height = size
        self._cut = None
        room, rows = width - _AXIS, height - 2
        if room < 4 or rows < 1:
            return [Strip.blank(width, colours.base)] * height
        shown = self.shown
        head = to_strip(self._head(width), width, colours)
        if not shown.peak:
            note = to_strip([(" " * _AXIS, ""), (self._data.empty, "dim")], width, colours)
            blank = Strip.blank(width, colours.base)
            return [head, note, *[blank] * (height - 2)]
        top = self._top(shown)
        body = _Area(self, shown, top, room, rows, colours).strips()
        return [head, *body, to_strip(self._foot(shown, room), width, colours)]

    def _head(self, width: int) -> list[Span]:
        data = self._data
        if self.cursor_step is not None and self.shown.peak:
            left: list[Span] = [(f" {data.name}  ", "bold"), *self._readout()]
        else:
            left = [(f" {data.title}", "bold")]
        if self._compact or self.cursor_step is not None:
            return pad(left, width)
        brief = width < 100
        legend: list[Span] = []
        mono = self.app.theme.endswith("mono")
        for name, label in zip(_LAYERS, data.layer_names, strict=True):
            if name == "reserved" and not data.history.reserved:
                continue
            glyph = _PATTERNS[name] if mono else "█"
            legend += [
                (glyph if name not in self.hidden else " ", _STYLES[name]),
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
        parts: list[Span] = [
            (f"step {step}", "key"),
            (f" low {wording.gib(history.low[bucket], 2)} peak {wording.gib(history.peak[bucket], 2)}", ""),
        ]
        if history.reserved:
            parts.append((f" resv {wording.gib(history.reserved[bucket], 2)} GiB", ""))
        if self._mark is not None and self._mark != step:
            other = history.bucket_of(self._mark)
            change = history.low[bucket] - history.low[other]
            parts.append((f"  low {change / GIB:+.2f} since step {self._mark}".replace("-", "−"), "warn"))
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
        return [("└".rjust(_AXIS), "faint"), (clip(text, room), "dim")]

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

    def on_click(self, event: events.Click) -> None:
        offset = event.get_content_offset(self)
        shown = self.shown
        if offset is not None and shown.peak and 0 <= offset.x - _AXIS < len(shown.peak):
            self.put_cursor(shown.step_at(offset.x - _AXIS))

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


class _Area:
    """Paints the columns of one build."""

    def __init__(
        self, owner: Timeline, shown: Columns, top: int, room: int, rows: int, colours: Palette
    ) -> None:
        self._rows, self._room, self._colours, self._top = rows, room, colours, top
        self._used = len(shown.peak)
        scale = rows * 8 / top
        names = [n for n in _LAYERS if n not in owner.hidden and (n != "reserved" or shown.reserved)]
        self._names = names
        # A value above zero is never drawn as nothing.
        self._tops = [
            [max(1 if v > 0 else 0, round(v * scale)) for v in getattr(shown, name)] for name in names
        ]
        capacity = owner._data.capacity_bytes
        self._limit = None if capacity is None or capacity > top else min(rows * 8 - 1, int(capacity * scale))
        self._limit_word = owner._data.limit_word
        cursor = owner.cursor_step
        self._cursor = shown.column_of(cursor) if cursor is not None else None
        self._tick_of = self._ticks()

    def strips(self) -> list[Strip]:
        return [self._row(y) for y in range(self._rows)]

    def _ticks(self) -> dict[int, str]:
        """Row to the label of the round number that lies in it."""
        rows, top = self._rows, self._top
        step = _round_step(top * 3 / max(3, rows))
        digits = 0 if step >= GIB else 1 if step >= GIB // 10 else 2
        ticks = {rows - 1: "0G"}
        value = step
        while value < top:
            row = rows - 1 - int(value / top * rows)
            if row not in ticks and row != rows - 2:
                ticks[row] = f"{value / GIB:.{digits}f}G"
            value += step
        return ticks

    def _label(self, y: int) -> str:
        tick = self._tick_of.get(y)
        return ("│" if tick is None else f"{tick}┤").rjust(_AXIS)

    def _row(self, y: int) -> Strip:
        floor = (self._rows - 1 - y) * 8
        colours, mono = self._colours, self._colours.mono
        faint, free = colours.style("faint"), colours.base
        segments = [Segment(self._label(y), faint)]
        limit_here = self._limit is not None and floor <= self._limit < floor + 8
        run: list[str] = []
        last: Style | None = None
        for x in range(self._used):
            glyph, style = ("─", colours.style("other")) if limit_here else (" ", free)
            found = self._cell(x, floor, mono)
            if x == self._cursor:
                glyph, style = self._cursor_cell(x, floor)
            elif found is not None:
                glyph, style = found
            if style is not last:
                if run and last is not None:
                    segments.append(Segment("".join(run), last))
                run, last = [], style
            run.append(glyph)
        if run and last is not None:
            segments.append(Segment("".join(run), last))
        rest = self._room - self._used
        if rest > 0:
            fill = "─" * rest if limit_here else " " * rest
            segments.append(Segment(fill, colours.style("other") if limit_here else free))
        strip = Strip(segments, _AXIS + self._room)
        return self._with_limit_word(strip, floor) if limit_here else strip

    def _cell(self, x: int, floor: int, mono: bool) -> tuple[str, Style] | None:
        """Glyph and style of the lowest layer that reaches into this cell, the next one behind it."""
        names, tops = self._names, self._tops
        for i, name in enumerate(names):
            height = tops[i][x] - floor
            if height <= 0:
                continue
            style = self._colours.style(_STYLES[name])
            if mono:
                # Whole cells only; a layer that covers less than half of the cell leaves it to the next one.
                if height < 4 and any(tops[j][x] - floor >= 4 for j in range(i + 1, len(names))):
                    continue
                return (_PATTERNS[name] if height >= 4 or floor == 0 else " "), style
            if height >= 8:
                return "█", style
            for j in range(i + 1, len(names)):
                if tops[j][x] - floor > height:
                    return _EIGHTHS[height], self._colours.mixed(_STYLES[name], _STYLES[names[j]])
            return _EIGHTHS[height], style
        return None

    def _cursor_cell(self, x: int, floor: int) -> tuple[str, Style]:
        """A line over whatever layer fills the middle of the cell."""
        behind = next(
            (name for name, tops in zip(self._names, self._tops, strict=True) if tops[x] - floor >= 4), None
        )
        if behind is None or self._colours.mono:
            return "│", self._colours.style("bold")
        return "│", self._colours.mixed("bold", _STYLES[behind])

    def _with_limit_word(self, strip: Strip, floor: int) -> Strip:
        """The word for the limit, written into its line where no layer is."""
        word = f" {self._limit_word} "
        start = _AXIS + 3
        columns_taken = range(3, 3 + len(word))
        if self._room < len(word) + 8 or any(
            x < self._used and any(tops[x] > floor for tops in self._tops) for x in columns_taken
        ):
            return strip
        middle = Strip([Segment(word, self._colours.style("dim"))], len(word))
        return Strip.join([strip.crop(0, start), middle, strip.crop(start + len(word))])


def _round_step(least: float) -> int:
    """The smallest of 1, 2, 5, 10, 20 … (times 0.01 GiB) that is at least `least` bytes."""
    step = GIB // 100
    factors = (2, 2.5, 2)
    turn = 0
    while step < least:
        step = round(step * factors[turn % 3])
        turn += 1
    return step
