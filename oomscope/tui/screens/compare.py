"""The Compare screen: attempts side by side, predicted beside reached, and whether the loss is the same."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.geometry import Size

from oomscope.errors import OomscopeError
from oomscope.store.session import Session
from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.widgets.fixlist import bar_spans
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip, fit, wrap
from oomscope.tui.widgets.timeline import Timeline, TimelineData
from oomscope.views import compare as view
from oomscope.views import wording
from oomscope.views.compare import AttemptRow, Comparison
from oomscope.views.fixes import Bar
from oomscope.views.frame import Frame
from oomscope.views.movers import Movers
from oomscope.views.movers import compare as compare_peaks
from oomscope.views.series import EMPTY
from oomscope.views.session import SessionModel

#: Charts side by side: the first attempt and the newest two.
_MAX_CHARTS = 3


class CompareTable(LineList):
    """One line per attempt, bars below, then the loss."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._comparison: Comparison | None = None
        self._movers: Movers | None = None
        self._other: OtherSession | None = None

    def show(self, comparison: Comparison, movers: Movers | None, other: OtherSession | None) -> None:
        """`other`: the marked session, whose attempts stand below those of the open one."""
        if (comparison, movers, other) != (self._comparison, self._movers, self._other):
            self._comparison, self._movers, self._other = comparison, movers, other
            self.invalidate()
            self.refresh(layout=True)

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width)[1]) + 1 if width > 0 else 1

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        found = self._comparison
        if found is None:
            return [], []
        wide = width >= 100
        head = f"  #  {'fixes':<{_FIXES}}{'ended':<15}{'steps':>6}{'predicted':>14}"
        head += f"{'reached':>9}  {'capacity':>9}"
        head += f"  {'numbers':<10}" if wide else ""
        rows = [_line(row, wide) for row in found.attempts]
        other = self._other
        if other is not None:
            rows.append(Row([(f" marked: {other.name}", "heading")]))
            rows += [_line(row, wide) for row in other.attempts]
        rows += [Row([("", "")]), Row([(" Peak of reserved memory, GiB", "heading")])]
        rows += _bars(found, other, width)
        rows += [Row([("", "")]), *_loss(found, width)]
        movers = other.movers if other is not None and other.movers is not None else self._movers
        if movers is not None:
            rows += [Row([("", "")]), *_mover_rows(movers)]
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
        (fit(fixes, _FIXES - 1) + " ", "bold" if row.fixes else "dim"),
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


@dataclass(frozen=True)
class OtherSession:
    """The session that the user marked."""

    name: str
    attempts: tuple[AttemptRow, ...]
    movers: Movers | None
    """From its newest attempt to the newest one of the open session."""


#: Parts of a peak that are listed, of categories and of modules each.
_MAX_MOVERS = 5


def _mover_rows(found: Movers) -> list[Row]:
    """What the two peaks consist of, the largest change first."""
    head = f" {'At the peak, GiB':<28}{clip(found.before, 13):>14}{clip(found.after, 13):>14}{'change':>10}"
    rows = [Row([(head, "heading")])]
    for movers in (found.categories, found.modules):
        for mover in movers[:_MAX_MOVERS]:
            if mover.change_bytes == 0 and mover is not movers[0]:
                continue
            change = wording.change(mover.change_bytes)
            style = "ok" if mover.change_bytes < 0 else "warn" if mover.change_bytes > 0 else "dim"
            rows.append(
                Row(
                    [
                        (f" {fit(mover.name, 27)} ", ""),
                        (
                            f"{wording.gib(mover.before_bytes, 2):>14}{wording.gib(mover.after_bytes, 2):>14}",
                            "",
                        ),
                        (f"{change:>10}", style),
                    ]
                )
            )
    return rows


def _bars(found: Comparison, other: OtherSession | None, width: int) -> list[Row]:
    marked = other.attempts if other is not None else ()
    capacity = max((row.capacity_bytes or 0 for row in (*found.attempts, *marked)), default=0) or None
    bars: list[tuple[Bar, str]] = []
    for row in (*found.attempts, *marked):
        name = f"attempt {row.number}" if row not in marked else f"marked {row.number}"
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


_WORD_STYLES = {"equal": "ok", "within": "ok", "differs": "warn"}


def _loss(found: Comparison, width: int) -> list[Row]:
    """The proof, line by line; before there is one, the losses alone."""
    if found.loss is None:
        text = "One attempt so far: after a rerun this screen compares the two by itself."
        return [Row([(f" {line}", "dim")]) for line in wrap(text, width - 2)]
    rows = []
    last = found.attempts[-1]
    error = last.error_share()
    if error is not None and not last.running:
        word = {True: "inside", False: "outside", None: ""}[last.within()]
        said = f"{last.word} {error:+.1%} from the prediction".replace("-", "−")
        rows.append(_fact("Peak", said, "ok" if last.within() else "warn", f"{word} its interval"))
    proof = found.proof
    if proof is None:
        rows.append(
            _fact("Loss", found.loss.word, _WORD_STYLES.get(found.loss.word, "dim"), found.loss.detail)
        )
        return rows
    rows += [_fact(c.name, c.word, _WORD_STYLES.get(c.word, "dim"), c.detail) for c in proof.checks]
    if proof.speed():
        rows.append(_fact("Speed", proof.speed(), "", ""))
    rows += [_fact("Not applied", each, "warn", "") for each in proof.not_applied]
    verdict, style = ("the fix did what it should", "ok") if proof.is_accepted else ("not accepted", "warn")
    rows.append(_fact("Proof", verdict, style, proof.why_not))
    return rows


def _fact(name: str, word: str, style: str, detail: str) -> Row:
    return Row([(f" {name:<14}", "heading"), (word, style), (f"  {detail}" if detail else "", "dim")])


class CompareScreen(BaseScreen):
    """Did the fix do what was predicted?"""

    MODE = "compare"
    HELP = (
        "One line per attempt: the peak that was predicted before it started, with its interval, and the "
        "peak it reached. On a simulated device the reached peak is called simulated, on a real one "
        "measured. Losses are compared over the steps that both attempts finished; a simulated device "
        "computes no values, so there they prove nothing. Below stands what the two peaks consist of. A session "
        "that is marked on the Sessions screen (m) stands beside this one."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.COMPARE)]

    DEFAULT_CSS = """
    CompareScreen CompareTable { height: auto; max-height: 100%; }
    CompareScreen #charts { height: 1fr; display: none; }
    CompareScreen.-tall.-charts #charts { display: block; }
    CompareScreen.-tall.-charts #attempts { border-bottom: solid $line; }
    """

    def compose_body(self) -> ComposeResult:
        yield CompareTable(id="attempts")
        with Horizontal(id="charts"):
            for number in range(_MAX_CHARTS):
                yield Timeline(id=f"chart-{number}")

    def __init__(self) -> None:
        super().__init__()
        self._read: tuple[Path, Frame] | None = None

    def on_mount(self) -> None:
        self.query_one("#attempts").focus()

    def show_frame(self, frame: Frame) -> None:
        if frame.comparison is None:
            self.show_missing(
                "No attempt has started yet.", "Attempts are compared here as soon as there are some."
            )
            return
        self.show_missing()
        self.query_one(CompareTable).show(frame.comparison, frame.movers, self._other(frame))
        self._show_charts(frame, frame.comparison)

    def _other(self, frame: Frame) -> OtherSession | None:
        """The marked session, read once each time that another one is marked."""
        marked = self.host.marked
        if marked is None or marked == frame.path:
            return None
        if self._read is None or self._read[0] != marked:
            try:
                self._read = (marked, SessionModel(Session.open(marked)).poll())
            except (OomscopeError, OSError) as error:
                self.host.marked = None
                self.notify(f"cannot read the marked session: {error}", severity="error")
                return None
        other = self._read[1]
        if other.comparison is None:
            return None
        movers = None
        if other.composition is not None and frame.composition is not None:
            movers = compare_peaks("marked", other.composition, "open", frame.composition)
        return OtherSession(other.path.name, other.comparison.attempts, movers)

    def _show_charts(self, frame: Frame, comparison: Comparison) -> None:
        """The first attempt and the newest ones over their steps, on one scale."""
        rows = comparison.attempts
        shown = [*rows[:1], *rows[1:][-(_MAX_CHARTS - 1) :]]
        charts = [(row, frame.attempt_histories.get(row.number, EMPTY)) for row in shown]
        self.set_class(any(history.peak for _, history in charts), "-charts")
        for number in range(_MAX_CHARTS):
            chart = self.query_one(f"#chart-{number}", Timeline)
            chart.display = number < len(charts)
            if chart.display:
                row, history = charts[number]
                fixes = f" with {' + '.join(row.fixes)}" if row.fixes else ""
                chart.show(
                    TimelineData(
                        f"attempt {row.number}{fixes}",
                        f"attempt {row.number}",
                        history=history,
                        capacity_bytes=row.capacity_bytes,
                        limit_word="capacity",
                        unit_note=row.word,
                        empty="no finished step yet" if row.running else "ended before a step had finished",
                    )
                )

    def copy_text(self) -> str:
        found = self.host.frame.comparison if self.host.frame else None
        if found is None:
            return ""
        lines = [view.sentence(row) for row in found.attempts]
        if found.loss is not None:
            lines.append(f"loss: {found.loss.word}, {found.loss.detail}")
        if found.proof is not None:
            lines.append(
                "proof: "
                + ("accepted" if found.proof.is_accepted else f"not accepted, {found.proof.why_not}")
            )
        return "\n".join(lines) + "\n"

    def command_text(self) -> str:
        return self.host.attach_command()

    def action_back(self) -> None:
        self.host.action_go("fixes")
