"""Fixes as a table with ticks, the peak before and after as bars, and the preview of what would change."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip, fit, pad, wrap
from oomscope.views import wording
from oomscope.views.fixes import Bar, Fixes, FixRow, PreviewLine

_FOLD = "#fold"
_RISK_STYLES = {"none": "ok", "exact": "ok", "rounding": "", "semantic": "warn", "topology": "warn"}


class FixList(LineList):
    """One line per fix, what does not apply folded away."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._fixes: Fixes | None = None
        self.chosen: list[str] = []
        self.shows_all = False

    def show(self, fixes: Fixes) -> None:
        if fixes != self._fixes:
            self._fixes = fixes
            self.chosen = [each for each in self.chosen if fixes.row(each)]
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width)[1]) + 1 if width > 0 else 2

    @property
    def current(self) -> FixRow | None:
        """The fix under the cursor."""
        return self._fixes.row(self.cursor_key) if self._fixes else None

    def toggle(self) -> str:
        """Tick or untick the fix under the cursor; a sentence when that cannot be."""
        row = self.current
        if row is None:
            self.fold()
            return ""
        if row.id in self.chosen:
            self.chosen.remove(row.id)
        elif not row.can_be_ticked:
            return f"{row.id} does not apply: {row.note()}"
        else:
            self.chosen.append(row.id)
        self.invalidate()
        return ""

    def choose(self, ids: Sequence[str]) -> None:
        self.chosen = list(ids)
        self.invalidate()

    def fold(self) -> None:
        self.shows_all = not self.shows_all
        self.invalidate()
        self.refresh(layout=True)

    # -- painting ----------------------------------------------------------------------------

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        fixes = self._fixes
        if fixes is None:
            return [], []
        wide = width >= 110
        shown = [row for row in fixes.rows if self.shows_all or row.applicable]
        rows = [self._line(row, fixes, width, wide) for row in shown]
        hidden = sum(not row.applicable for row in fixes.rows)
        if hidden:
            words = "do not apply here" if hidden != 1 else "does not apply here"
            verb = "hides" if self.shows_all else "shows"
            mark = "›" if self.cursor_key == _FOLD else " "
            rows.append(
                Row([(f"{mark}    {hidden} {words}; ", "dim"), ("x", "key"), (f" {verb} them", "dim")], _FOLD)
            )
        return [_head(wide)], rows

    def _line(self, row: FixRow, fixes: Fixes, width: int, wide: bool) -> Row:
        selected = row.id == self.cursor_key
        tick = "[x]" if row.id in self.chosen else "[ ]" if row.can_be_ticked else " – "
        spans: list[Span] = [
            ("› " if selected else "  ", "bold"),
            (tick, "key" if row.id in self.chosen else "dim" if not row.can_be_ticked else ""),
            (" " + fit(row.id, 19), "bold" if row.applicable and row.effective is not False else "dim"),
        ]
        note = row.note()
        if note or row.predicted is None:
            spans.append((f" {note}", "dim"))
            return Row(pad(spans, width), row.id)
        spans += _numbers(row, recommended=row.id in fixes.recommended)
        if wide:
            spans += [(f"{wording.effort(row.effort_s):>7}", "dim"), (f"  {row.title}", "")]
        return Row(pad(spans, width), row.id)


def _head(wide: bool) -> list[Span]:
    head = f"     {' fix':<20}{'saves GiB':>10}{'peak GiB':>12}  {'fits':<6}{'time':>7}  {'risk':<9}"
    if wide:
        head += f"{'effort':>7}  what it does"
    return [(head, "heading")]


_FITS = {
    "yes": ("✔ yes", "ok"),
    "tight": ("tight", "warn"),
    "no": ("✖ no", "error"),
    "unknown": ("?", "warn"),
}


def _numbers(row: FixRow, *, recommended: bool) -> list[Span]:
    found = row.predicted
    assert found is not None
    saving = "–" if row.saving_bytes is None else f"−{wording.gib(row.saving_bytes)}"
    fits = _FITS[found.verdict()]
    return [
        (f"{saving:>10}", "bold"),
        (f"{wording.gib(found.peak_bytes):>7} {found.interval():<5}", ""),
        (f" {fits[0]:<6}", fits[1]),
        (f"{wording.factor(found.time_factor):>7}", ""),
        (f"  {clip(row.risk, 8):<8}", _RISK_STYLES.get(row.risk, "warn")),
        ("★" if recommended else " ", "key"),
    ]


class FixBars(LineList, can_focus=False):
    """Peaks before and after against the capacity."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._bars: tuple[Bar, ...] = ()
        self._note = ""
        self._capacity: int | None = None
        self._word = ""

    def show(self, bars: Sequence[Bar], note: str, capacity: int | None, word: str) -> None:
        """`word`: "measured" or "simulated", for the bars that were reached."""
        data = (tuple(bars), note, capacity, word)
        if data != (self._bars, self._note, self._capacity, self._word):
            self._bars, self._note, self._capacity, self._word = data
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, len(self._bars) + bool(self._note))

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows = [Row(bar_spans(bar, self._capacity, self._bars, self._word, width)) for bar in self._bars]
        if self._note:
            rows.append(Row([(f" {'after':<11} ", "dim"), (self._note, "dim")]))
        return [], rows


def _bar_label(bar: Bar, capacity: int | None, word: str) -> str:
    label = f" {wording.gib(bar.value_bytes):>6} GiB"
    if bar.kind == "predicted":
        label += f" predicted ±{wording.gib((bar.high_bytes - bar.low_bytes) / 2)}"
    elif bar.kind == "needed":
        label += " needed"
    else:
        label += f" {word}"
    if capacity is not None:
        over = bar.value_bytes - capacity
        label += f", {wording.gib(abs(over))} {'over' if over > 0 else 'below'}"
    return label


def bar_spans(bar: Bar, capacity: int | None, all_bars: Sequence[Bar], word: str, width: int) -> list[Span]:
    """One bar, its interval as a lighter part, the capacity as a line through it, and its number."""
    label = _bar_label(bar, capacity, word)
    longest = max(len(_bar_label(each, capacity, "simulated")) for each in all_bars)
    room = max(10, width - 13 - max(longest, len(label)) - 1)
    top = (
        max([capacity or 0, *(b.high_bytes for b in all_bars), *(b.value_bytes for b in all_bars)]) * 1.02
        or 1
    )
    low, high = round(bar.low_bytes / top * room), round(bar.high_bytes / top * room)
    if bar.kind != "predicted":
        low = high = round(bar.value_bytes / top * room)
    limit = round(capacity / top * room) if capacity is not None else -1
    solid = "predicted" if bar.kind == "predicted" else "allocated"
    cells: list[Span] = []
    for x in range(room):
        if x == limit:
            cells.append(("│", "bold"))
        elif x < low:
            cells.append(
                ("█" if bar.kind != "predicted" else "▓", solid if limit < 0 or x < limit else "over")
            )
        elif x < high:
            cells.append(("▒", "predicted"))
        else:
            cells.append((" ", ""))
    return [
        (f" {bar.label:<11} ", ""),
        *_joined(cells),
        (label, "dim" if bar.kind != "predicted" else "bold"),
    ]


def _joined(cells: Sequence[Span]) -> list[Span]:
    """Neighbouring cells of one style as one span."""
    out: list[Span] = []
    for text, style in cells:
        if out and out[-1][1] == style:
            out[-1] = (out[-1][0] + text, style)
        else:
            out.append((text, style))
    return out


_PREVIEW_STYLES = {"heading": "heading", "text": "", "added": "added", "removed": "removed", "hunk": "dim"}


class FixDetail(LineList):
    """What the fix under the cursor does, or exactly what the ticked ones change."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._row: FixRow | None = None
        self._preview: tuple[PreviewLine, ...] | None = None

    def show_fix(self, row: FixRow | None) -> None:
        self._set(row, None)

    def show_preview(self, lines: Sequence[PreviewLine]) -> None:
        self._set(None, tuple(lines))

    def _set(self, row: FixRow | None, lines: tuple[PreviewLine, ...] | None) -> None:
        if (row, lines) != (self._row, self._preview):
            self._row, self._preview = row, lines
            self.invalidate()
            self.scroll_to(y=0, animate=False)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        if self._preview is not None:
            return [], preview_rows(self._preview, width)
        row = self._row
        if row is None:
            return [], []
        lines: list[Row] = [Row([(line, "bold")]) for line in wrap(row.title, width)]
        facts = [
            ("note", row.note()),
            ("acts on", row.why),
            ("risk", _RISKS.get(row.risk, row.risk)),
            ("how", ", ".join(_HOWS.get(how, how) for how in row.how)),
        ]
        if row.predicted is not None:
            found = row.predicted
            interval = f"{wording.size(found.low_bytes)} to {wording.size(found.high_bytes)}"
            facts.append(("peak", f"{wording.size(found.peak_bytes)} predicted, {interval}"))
            facts.append(("next peak", found.next_phase))
            facts.append(("basis", found.basis))
        facts.append(("excludes", ", ".join(row.conflicts)))
        facts += [("verify", row.verify), ("undo", row.undo)]
        for name, value in facts:
            if value:
                parts = wrap(value, width - 12)
                lines.append(Row([(f"{name:<11} ", "dim"), (parts[0], "")]))
                lines += [Row([(" " * 12, ""), (part, "")]) for part in parts[1:]]
        return [], lines


_HOWS = {
    "env": "environment variable",
    "runtime": "inside the process, the script unchanged",
    "source": "change of the source",
    "argv": "option of the script",
    "launcher": "option of the launcher",
}
_RISKS = {
    "none": "none: the same computation",
    "exact": "exact: the same numbers, computed another way",
    "rounding": "rounding: numbers differ in the last digits",
    "semantic": "semantic: training behaves differently",
    "topology": "topology: the job is laid out differently over its devices",
}


def preview_rows(lines: Sequence[PreviewLine], width: int) -> list[Row]:
    """The preview as list rows; long lines wrap so that nothing stays unseen."""
    rows = []
    for line in lines:
        style = _PREVIEW_STYLES.get(line.kind, "")
        lead = "" if line.kind in ("heading", "hunk", "added", "removed") and line.text[:1] in "+-@" else "  "
        if line.kind == "heading":
            lead = ""
        elif line.kind == "added" and line.text[:1] != "+":
            lead = "+ "
        parts = wrap(line.text, max(10, width - len(lead)), 2)
        rows += [Row([(lead, style), (part, style)]) for part in parts]
    return rows
