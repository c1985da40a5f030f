"""The Live screen: every rank in one table, one rank over time, and what happened."""

from __future__ import annotations

from typing import Any, ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Container, Horizontal, Vertical
from textual.css.query import NoMatches

from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.dialogs import SortDialog
from oomscope.tui.widgets.composition import CompositionBars
from oomscope.tui.widgets.eventlog import EventLog, ProgressLines
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.phasebars import PhaseBars
from oomscope.tui.widgets.ranktable import RankTable
from oomscope.tui.widgets.timeline import Timeline, TimelineData
from oomscope.views import wording
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert
from oomscope.views.ranks import ORDERS, RankRow

_VIEWS = ("selected", "all", "phases", "events")
#: More small charts than this would be too small to read; the table shows the rest.
_MAX_MULTIPLES = 16


class LiveScreen(BaseScreen):
    """All ranks as they run."""

    MODE = "live"
    HELP = (
        "One line per rank: what PyTorch has allocated and what its caching allocator keeps reserved, the "
        "highest allocated peak, the share of reserved memory that even the last step's peak did not use "
        "(idle), and the change per step of what a step never goes below. The chart shows the selected rank: "
        "dark is what stays over the whole step, light is the peak inside the step, amber is what the "
        "allocator keeps beyond it. A rising dark area is a leak; a wide amber one is fragmentation. A job "
        "without a GPU shows host memory instead."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.LIVE, actions.TIMELINE)]
    DEFAULT_CSS = """
    LiveScreen #upper { height: auto; }
    LiveScreen #progress { height: auto; max-height: 6; display: none; }
    LiveScreen.-working #progress { display: block; }
    LiveScreen #lower { height: 1fr; }
    LiveScreen #charts { width: 1fr; height: 1fr; }
    LiveScreen #grid { layout: grid; grid-size: 2; display: none; height: 1fr; }
    LiveScreen.-wide #grid { grid-size: 4; }
    LiveScreen PhaseBars, LiveScreen CompositionBars { display: none; }
    LiveScreen.-all #grid { display: block; }
    LiveScreen.-all #timeline, LiveScreen.-phases #timeline { display: none; }
    LiveScreen.-phases.-has-phases PhaseBars, LiveScreen.-made-up CompositionBars { display: block; }
    LiveScreen.-made-up PhaseBars { height: auto; padding-bottom: 1; }
    LiveScreen.-phases CompositionBars { height: 1fr; }
    LiveScreen #events { width: 48; height: 1fr; }
    LiveScreen.-narrow #events, LiveScreen.-short #events { display: none; }
    LiveScreen.-events #charts, LiveScreen.-events #progress { display: none; }
    LiveScreen.-events #events { display: block; width: 1fr; }
    LiveScreen.-wide.-tall #progress { display: none; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._view = 0

    def compose_body(self) -> ComposeResult:
        with Vertical(id="upper", classes="pane"):
            yield RankTable(id="ranks")
        yield ProgressLines(id="progress")
        with Horizontal(id="lower"):
            with Vertical(id="charts", classes="pane"):
                yield Timeline(id="timeline")
                yield Container(id="grid")
                yield PhaseBars()
                yield CompositionBars()
            with Vertical(id="events", classes="pane"):
                yield EventLog()

    def on_mount(self) -> None:
        self.query_one("#upper").border_title = "Ranks"
        self.query_one("#events").border_title = "Events"
        self.query_one("#ranks").focus()
        self.show_missing("Reading the session.", "")

    # -- showing -----------------------------------------------------------------------------

    def show_frame(self, frame: Frame) -> None:
        self.show_missing()
        working = frame.state in ("diagnosing", "predicting", "waiting", "stopping")
        self.set_class(working, "-working")
        table = self.query_one(RankTable)
        table.limit = max(3, min(16, self.size.height - 12))
        table.show(frame.ranks)
        table.point_at(self.host.rank)
        self.query_one(ProgressLines).show(frame.events)
        self.query_one(EventLog).show(frame.events)
        row = frame.row(self.host.rank)
        view = _VIEWS[self._view]
        peaks = frame.phase_peaks.get(self.host.rank, {})
        made_up = frame.composition if frame.diagnosis_attempt == frame.attempt else None
        if view == "selected" and not frame.history(self.host.rank).peak and (peaks or made_up):
            # The first step has not ended: its phases and what filled them are all there is to see.
            view = "phases"
        for name in _VIEWS:
            self.set_class(name == view, f"-{name}")
        self.set_class(view == "phases" and made_up is not None, "-made-up")
        self.set_class(bool(peaks) or made_up is None, "-has-phases")
        if view == "selected":
            self.query_one("#timeline", Timeline).show(timeline_data(frame, row))
        elif view == "all":
            self._show_multiples(frame)
        elif view == "phases":
            self.query_one(PhaseBars).show(row, peaks)
            self.query_one(CompositionBars).show(made_up, frame.device_word)

    def _show_multiples(self, frame: Frame) -> None:
        grid = self.query_one("#grid", Container)
        rows = frame.ranks[:_MAX_MULTIPLES]
        wanted = {f"small-{row.rank}" for row in rows}
        have = {child.id for child in grid.children}
        if wanted != have:
            grid.remove_children()
            grid.mount(*(Timeline(id=f"small-{row.rank}", compact=True) for row in rows))
            self.call_after_refresh(self.refresh_frame)
            return
        for row in rows:
            try:
                chart = grid.query_one(f"#small-{row.rank}", Timeline)
            except NoMatches:
                continue
            chart.show(timeline_data(frame, row, short=True))

    def alert(self, frame: Frame) -> Alert | None:
        if self.host.paused:
            return Alert("warn", "paused: the job goes on, this picture stands still", "space", "resume")
        return frame.alert

    def copy_text(self) -> str:
        frame = self.host.frame
        if frame is None:
            return ""
        return "\n".join(row.sentence() for row in frame.ranks) + "\n"

    def command_text(self) -> str:
        return self.host.attach_command()

    # -- events and actions ------------------------------------------------------------------

    def on_line_list_moved(self, message: LineList.Moved) -> None:
        rank = self.query_one(RankTable).rank_of(message.key) if message.lines.id == "ranks" else None
        if rank is not None:
            self.host.show_rank(rank)

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        if message.lines.id == "ranks" and not self.query_one(RankTable).fold():
            frame = self.host.frame
            row = frame.row(int(message.key)) if frame else None
            self.host.action_go("oom" if row is not None and row.state == "oom" else "snapshot")

    @property
    def _timeline(self) -> Timeline:
        return self.query_one("#timeline", Timeline)

    def action_pause(self) -> None:
        self.host.paused = not self.host.paused
        self.refresh_frame()

    def action_view(self) -> None:
        self._view = (self._view + 1) % len(_VIEWS)
        self.refresh_frame()

    def action_sort(self) -> None:
        table = self.query_one(RankTable)

        def decided(order: str | None) -> None:
            if order:
                table.order = order
                table.renew()

        self.app.push_screen(SortDialog("Order ranks by", ORDERS, table.shown_order), decided)

    def action_reverse(self) -> None:
        table = self.query_one(RankTable)
        table.reverse = not table.reverse
        table.renew()

    def action_nodes(self) -> None:
        table = self.query_one(RankTable)
        table.grouped = not table.grouped
        table.renew()
        table.point_at(self.host.rank)

    def action_fold(self) -> None:
        if not self.query_one(RankTable).fold():
            self.notify("b groups the ranks by node first")

    def action_cursor(self, delta: int) -> None:
        self._timeline.move_cursor(delta)

    def action_zoom(self, direction: int) -> None:
        self._timeline.zoom(direction)

    def action_fit(self) -> None:
        self._timeline.fit()

    def action_window(self) -> None:
        self._timeline.cycle_window()
        window = self._timeline.window
        self.notify("all steps" if window is None else f"last {window} steps")

    def action_peak(self) -> None:
        self._timeline.go_to_peak()

    def action_event(self, direction: int) -> None:
        self._timeline.go_to_event(direction)

    def action_mark(self) -> None:
        self._timeline.mark()

    def action_to_mark(self) -> None:
        self._timeline.go_to_mark()

    def action_layer(self, name: str) -> None:
        self._timeline.toggle_layer(name)

    def action_back(self) -> None:
        self._timeline.put_cursor(None)
        self._timeline.fit()


def timeline_data(frame: Frame, row: RankRow | None, *, short: bool = False) -> TimelineData:
    """The chart of one rank."""
    if row is None:
        return TimelineData("no rank yet")
    name = f"rank {row.rank}"
    shared: dict[str, Any] = {
        "name": name,
        "history": frame.history(row.rank),
        "events": tuple(
            (e.step, e.severity) for e in frame.events if e.step is not None and e.rank == row.rank
        ),
    }
    if not row.on_device:
        size = wording.size(row.used_bytes)
        return TimelineData(
            name if short else f"{name}  resident {size}",
            short_title=f"{name}  {size}",
            capacity_bytes=row.capacity_bytes,
            limit_word="memory of this machine",
            unit_note="" if short else "host memory, measured",
            layer_names=("resident", "step peak", "reserved"),
            **shared,
        )
    used, reserved = wording.gib(row.used_bytes), wording.gib(row.reserved_bytes)
    numbers = f"{used} allocated, {reserved} reserved of {wording.gib(row.capacity_bytes)} GiB"
    return TimelineData(
        name if short else f"{name}  {numbers}",
        short_title=f"{name}  {used}/{reserved} GiB",
        capacity_bytes=row.usable_bytes,
        limit_word="capacity" if row.other_bytes == 0 else "usable limit",
        unit_note="" if short else wording.kind_of_number(row.simulated),
        **shared,
    )
