"""The Compare screen: attempts side by side, predicted beside reached, and whether the loss is the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType

from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.widgets.fixlist import bar_spans
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip, wrap
from oomscope.views import compare as view
from oomscope.views import wording
from oomscope.views.compare import AttemptRow, Comparison
from oomscope.views.fixes import Bar
from oomscope.views.frame import Frame


class CompareTable(LineList):
    """One line per attempt, bars below, then the loss."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._comparison: Comparison | None = None

    def show(self, comparison: Comparison) -> None:
        if comparison != self._comparison:
            self._comparison = comparison
            self.invalidate()

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        found = self._comparison
        if found is None:
            return [], []
        wide = width >= 100
        head = f"  #  {'fixes':<{_FIXES}}{'ended':<15}{'steps':>6}{'predicted':>14}"
        head += f"{'reached':>9}  {'capacity':>9}"
        head += f"  {'numbers':<10}" if wide else ""
        rows = [_line(row, wide) for row in found.attempts]
        rows += [Row([("", "")]), Row([(" Peak of reserved memory, GiB", "heading")])]
        rows += _bars(found, width)
        rows += [Row([("", "")]), *_loss(found, width)]
        return [[(head[:width], "heading")]], rows


#: Cells of the column that names an attempt's fixes.
_FIXES = 19


def _line(row: AttemptRow, wide: bool) -> Row:
    ended = row.outcome()
    style = "error" if row.oom else "ok" if row.exit_code == 0 else "dim"
    predicted = "–"
    if row.predicted is not None:
        predicted = f"{wording.gib(row.predicted.peak_bytes, 2)} {row.predicted.interval()}".rstrip()
    within = {True: (" ✔", "ok"), False: (" ✖", "warn"), None: ("  ", "")}[row.within()]
    fixes = " + ".join(row.fixes) or "none"
    spans: list[Span] = [
        (f"{row.number:>3}  ", "bold"),
        (f"{clip(fixes, _FIXES - 1):<{_FIXES}}", "bold" if row.fixes else "dim"),
        (f"{ended:<15.15}", style),
        (f"{row.steps:>6}", ""),
        (f"{predicted:>14}", "predicted" if row.predicted else "dim"),
        (f"{wording.gib(row.reached_bytes, 2):>9}", "bold"),
        within,
        (f"{wording.gib(row.capacity_bytes, 2):>9}", ""),
    ]
    if wide:
        spans.append((f"  {row.word if row.reached_bytes is not None else '':<10}", "dim"))
    return Row(spans)


def _bars(found: Comparison, width: int) -> list[Row]:
    capacity = max((row.capacity_bytes or 0 for row in found.attempts), default=0) or None
    bars: list[tuple[Bar, str]] = []
    for row in found.attempts:
        name = f"attempt {row.number}"
        if row.predicted is not None:
            p = row.predicted
            bars.append((Bar(name, p.peak_bytes, p.low_bytes, p.high_bytes, "predicted"), ""))
            name = ""
        if row.reached_bytes is not None:
            bars.append(
                (Bar(name, row.reached_bytes, row.reached_bytes, row.reached_bytes, "reached"), row.word)
            )
    every = [bar for bar, _ in bars]
    rows = [Row(bar_spans(bar, capacity, every, word, width)) for bar, word in bars]
    if not rows:
        rows.append(Row([(" no device memory in these attempts; peaks of host memory:", "dim")]))
        rows += [
            Row([(f"   attempt {row.number}  {wording.size(row.peak_rss_bytes)}", "")])
            for row in found.attempts
        ]
    return rows


def _loss(found: Comparison, width: int) -> list[Row]:
    if found.loss is None:
        text = "One attempt so far: after a rerun this screen compares the two by itself."
        return [Row([(f" {line}", "dim")]) for line in wrap(text, width - 2)]
    style = {"equal": "ok", "differs": "warn"}.get(found.loss.word, "dim")
    last = found.attempts[-1]
    rows = [Row([(" Loss  ", "heading"), (found.loss.word, style), (f": {found.loss.detail}", "dim")])]
    error = last.error_share()
    if error is not None and not last.running:
        word = {True: "inside", False: "outside", None: ""}[last.within()]
        rows.append(
            Row(
                [
                    (" Peak  ", "heading"),
                    (f"{last.word} {error:+.1%} from the prediction", "" if last.within() else "warn"),
                    (f", {word} its interval", "dim"),
                ]
            )
        )
    return rows


class CompareScreen(BaseScreen):
    """Did the fix do what was predicted?"""

    MODE = "compare"
    HELP = (
        "One line per attempt: the peak that was predicted before it started, with its interval, and the "
        "peak it reached. On a simulated device the reached peak is called simulated, on a real one "
        "measured. Losses are compared over the steps that both attempts finished; a simulated device "
        "computes no values, so there they prove nothing."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.COMPARE)]

    def compose_body(self) -> ComposeResult:
        yield CompareTable(id="attempts")

    def on_mount(self) -> None:
        self.query_one("#attempts").focus()

    def show_frame(self, frame: Frame) -> None:
        if frame.comparison is None:
            self.show_missing(
                "No attempt has started yet.", "Attempts are compared here as soon as there are some."
            )
            return
        self.show_missing()
        self.query_one(CompareTable).show(frame.comparison)

    def copy_text(self) -> str:
        found = self.host.frame.comparison if self.host.frame else None
        if found is None:
            return ""
        lines = [view.sentence(row) for row in found.attempts]
        if found.loss is not None:
            lines.append(f"loss: {found.loss.word}, {found.loss.detail}")
        return "\n".join(lines) + "\n"

    def command_text(self) -> str:
        return f"oomscope attach {self.host.frame.path}" if self.host.frame else ""

    def action_back(self) -> None:
        self.host.action_go("fixes")
