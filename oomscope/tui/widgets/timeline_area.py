"""The filled areas of a timeline: three nested layers, the limit, the axis and the cursor, line by line.

A cell can show two colours, text on background. The layers are nested (low <= peak <= reserved), so in the
cell where one ends, the next one that reaches above that edge is the background: no layer is dropped and no
gap opens.
"""

from __future__ import annotations

from collections.abc import Collection

from rich.segment import Segment
from rich.style import Style
from textual.strip import Strip

from oomscope.tui.themes import Palette
from oomscope.units import GIB
from oomscope.views.series import Columns

EIGHTHS = " ▁▂▃▄▅▆▇█"
LAYERS = ("low", "peak", "reserved")
STYLES = {"low": "baseline", "peak": "allocated", "reserved": "inactive"}
#: Whole-cell patterns for a screen without colours.
PATTERNS = {"low": "█", "peak": "▓", "reserved": "░"}
#: Cells of the axis on the left.
AXIS = 7


class Area:
    """Paints the columns of one build."""

    def __init__(
        self,
        shown: Columns,
        *,
        top: int,
        room: int,
        rows: int,
        colours: Palette,
        hidden: Collection[str] = (),
        capacity: int | None = None,
        limit_word: str = "",
        cursor: int | None = None,
    ) -> None:
        """The columns `shown` in `room` cells by `rows` lines.

        Args:
            shown: the columns.
            top: bytes at the upper edge.
            room: cells of a line.
            rows: lines.
            colours: of the theme.
            hidden: names of layers that are not drawn.
            capacity: bytes at which a line is drawn, with `limit_word` in it.
            limit_word: what the line is.
            cursor: the step with a line through it.
        """
        self._rows, self._room, self._colours, self._top = rows, room, colours, top
        self._used = len(shown.peak)
        scale = rows * 8 / top
        names = [n for n in LAYERS if n not in hidden and (n != "reserved" or shown.reserved)]
        self._names = names
        # A value above zero is never drawn as nothing.
        self._tops = [
            [max(1 if v > 0 else 0, round(v * scale)) for v in getattr(shown, name)] for name in names
        ]
        self._limit = None if capacity is None or capacity > top else min(rows * 8 - 1, int(capacity * scale))
        self._limit_word = limit_word
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
        return ("│" if tick is None else f"{tick}┤").rjust(AXIS)

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
        strip = Strip(segments, AXIS + self._room)
        return self._with_limit_word(strip, floor) if limit_here else strip

    def _cell(self, x: int, floor: int, mono: bool) -> tuple[str, Style] | None:
        """Glyph and style of the lowest layer that reaches into this cell, the next one behind it."""
        names, tops = self._names, self._tops
        for i, name in enumerate(names):
            height = tops[i][x] - floor
            if height <= 0:
                continue
            style = self._colours.style(STYLES[name])
            if mono:
                # Whole cells only; a layer that covers less than half of the cell leaves it to the next one.
                if height < 4 and any(tops[j][x] - floor >= 4 for j in range(i + 1, len(names))):
                    continue
                return (PATTERNS[name] if height >= 4 or floor == 0 else " "), style
            if height >= 8:
                return "█", style
            for j in range(i + 1, len(names)):
                if tops[j][x] - floor > height:
                    return EIGHTHS[height], self._colours.mixed(STYLES[name], STYLES[names[j]])
            return EIGHTHS[height], style
        return None

    def _cursor_cell(self, x: int, floor: int) -> tuple[str, Style]:
        """A line over whatever layer fills the middle of the cell."""
        behind = next(
            (name for name, tops in zip(self._names, self._tops, strict=True) if tops[x] - floor >= 4), None
        )
        if behind is None or self._colours.mono:
            return "│", self._colours.style("bold")
        return "│", self._colours.mixed("bold", STYLES[behind])

    def _with_limit_word(self, strip: Strip, floor: int) -> Strip:
        """The word for the limit, written into its line where no layer is."""
        word = f" {self._limit_word} "
        start = AXIS + 3
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
