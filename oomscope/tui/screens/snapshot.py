"""The Snapshot screen: four linked views of one cursor, which is a moment and an allocation."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import ClassVar

from textual import events, on
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Horizontal
from textual.widgets import Input

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.history import sentence
from oomscope.tui.actions import make_bindings
from oomscope.tui.screens.snapshot_actions import SCREEN_ACTIONS
from oomscope.tui.screens.snapshot_file import SnapshotFile
from oomscope.tui.screens.snapshot_work import PictureMaker, PictureReady, Replayed
from oomscope.tui.widgets.allocations import Allocations
from oomscope.tui.widgets.frame import AlertLine, TitleLine
from oomscope.tui.widgets.icicle import Icicle
from oomscope.tui.widgets.segments import SegmentMap
from oomscope.tui.widgets.snapshot_timeline import SnapshotTimeline
from oomscope.tui.widgets.spans import Span, width_of
from oomscope.tui.widgets.stackpane import StackPane
from oomscope.tui.widgets.viewline import ViewLine
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert, Headline
from oomscope.views.snapshot_files import label_of, newest_of_rank, offered, session_files
from oomscope.views.snapshot_headline import snapshot_alert, snapshot_headline
from oomscope.views.snapshot_picture import Painter, Picture, part_label

VIEWS = ("icicle", "allocations", "segments", "stack")
_NAMES = {"icicle": "Icicle", "allocations": "Allocations", "segments": "Segments", "stack": "Stack"}
ALL_AT = (130, 36)
"""Columns and rows from which all views are shown at once."""


class SnapshotScreen(SnapshotFile):
    """Timeline, icicle, allocations and segments of one memory snapshot."""

    MODE = "snapshot"
    HELP = (
        "What was in memory at one moment. The chart shows live bytes by category over the history, with the reserved "
        "bytes behind; the moment is moved with ← → (shift: ten columns), p goes to the peak. The icicle divides the "
        "live memory by calls, outermost on top; the allocations and segments are those of the same moment. What is "
        "selected in one view is selected in the others."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*make_bindings(SCREEN_ACTIONS)]
    DEFAULT_CSS = """
    SnapshotScreen #timeline { height: 7; }
    SnapshotScreen.-tall #timeline { height: 28%; }
    SnapshotScreen #upper, SnapshotScreen #lower { height: 1fr; }
    SnapshotScreen #filter { display: none; height: 1; border: none; padding: 0 1; dock: bottom; }
    SnapshotScreen #filter.-open { display: block; }
    SnapshotScreen #icicle, SnapshotScreen #stack, SnapshotScreen #allocations, SnapshotScreen #segments {
    display: none; }
    SnapshotScreen #upper, SnapshotScreen #lower { display: none; }
    SnapshotScreen.-view-icicle #icicle, SnapshotScreen.-view-stack #stack { display: block; }
    SnapshotScreen.-view-icicle #upper, SnapshotScreen.-view-stack #upper { display: block; }
    SnapshotScreen.-view-allocations #allocations, SnapshotScreen.-view-segments #segments { display: block; }
    SnapshotScreen.-view-allocations #lower, SnapshotScreen.-view-segments #lower { display: block; }
    SnapshotScreen.-all #upper, SnapshotScreen.-all #lower { display: block; }
    SnapshotScreen.-all #icicle, SnapshotScreen.-all #stack { display: block; }
    SnapshotScreen.-all #allocations, SnapshotScreen.-all #segments { display: block; }
    SnapshotScreen.-all #icicle, SnapshotScreen.-all #allocations { width: 3fr; }
    SnapshotScreen.-all #stack, SnapshotScreen.-all #segments { width: 2fr; }
    """

    def __init__(self) -> None:
        super().__init__()
        self._view = "icicle"
        self._with_reserved = True
        self._needle_before = ""
        """The filter that was there when its box was opened."""
        self._chosen = ""
        """The view in which something was selected last: "icicle" or "allocations"."""
        self._maker = PictureMaker(
            self, lambda run: self.run_worker(run, thread=True, group="picture", exit_on_error=False)
        )

    # -- frame -------------------------------------------------------------------------------

    def compose_body(self) -> ComposeResult:
        yield ViewLine()
        yield SnapshotTimeline(id="timeline")
        with Horizontal(id="upper"):
            yield Icicle(id="icicle", classes="pane")
            yield StackPane(id="stack", classes="pane")
        with Horizontal(id="lower"):
            yield Allocations(id="allocations", classes="pane")
            yield SegmentMap(id="segments", classes="pane")
        yield Input(placeholder="code or category", id="filter")

    def on_mount(self) -> None:
        for name in VIEWS:
            self.query_one(f"#{name}").border_title = _NAMES[name]
        self._mark_view()
        if self.host.snapshot_path is not None:
            self._files = offered(self.host.snapshot_path)
            if self._files:
                self._open(self._files[0])
                return
        if self.host.frame is None:
            self.show_missing("No snapshot is open.", "oomscope open FILE.pickle opens one.")

    def on_resize(self, event: events.Resize) -> None:
        super().on_resize(event)
        self.set_class(event.size.width >= ALL_AT[0] and event.size.height >= ALL_AT[1], "-all")
        self._mark_view()

    def show_frame(self, frame: Frame) -> None:
        model = self.host.model
        if model is None:
            return
        self._files = session_files(model.session)
        wanted = newest_of_rank(self._files, self.host.rank)
        if wanted is None:
            rank = f" of rank {self.host.rank}" if self._files else " in this session"
            self.show_missing(
                f"No memory snapshot{rank} yet.",
                "One is written by itself when a rank runs out of memory; press s to ask every rank for one now. "
                "A snapshot file of your own opens with: oomscope open FILE.pickle",
            )
            return
        if wanted not in (self._path, self._loading):
            self._open(wanted)
        elif self._path == wanted and self._loading is None:
            self.show_missing()

    def refresh_frame(self) -> None:
        if self.host.frame is not None:
            super().refresh_frame()
            return
        self.query_one(TitleLine).show(self._headline())
        self.query_one(AlertLine).show(self._alert())
        self.refresh_footer()

    def headline(self, frame: Frame) -> Headline:
        return self._headline()

    def alert(self, frame: Frame) -> Alert | None:
        return self._alert() if self._painter is not None else frame.alert

    def _headline(self) -> Headline:
        name = (self._path or self._loading or Path("no file")).name
        return snapshot_headline(name, self._painter.analysis if self._painter is not None else None)

    def _alert(self) -> Alert | None:
        if self._painter is None:
            return None
        here = self._picture.segments.failure if self._picture is not None else None
        exact = self._painter.exact
        return snapshot_alert(self._painter.analysis, here or (exact.last_failure if exact else None))

    @property
    def is_busy(self) -> bool:
        """Whether a file is being read or replayed, or the last wish is not answered yet."""
        painter, picture = self._painter, self._picture
        if self._loading is not None or painter is None:
            return self._loading is not None
        answered = picture is not None and picture.wish == self._wish and self._maker.is_idle
        is_newest = picture is not None and picture.segments.replay is painter.exact
        return not (answered and is_newest) or self._replays.is_running(painter.analysis)

    # -- pictures ----------------------------------------------------------------------------

    def _use(self, analysis: DeviceAnalysis) -> None:
        """Show one device from its most telling moment on."""
        self._painter = Painter(analysis)
        self._marks = []
        stop = analysis.device.n_analysed if analysis.history.is_usable else 0
        self._wish = replace(self._wish, row=analysis.focus.row, start=0, stop=stop, stacks=None, part=None)
        self.refresh_frame()
        self.call_after_refresh(self._ask)
        if self.app.focused is None:
            self.query_one(f"#{self._view}").focus()

    def _ask(self) -> None:
        """Ask for the picture of the current wish."""
        if self._painter is None:
            return
        self._wish = replace(self._wish, width=self.query_one(SnapshotTimeline).room)
        self._show_timeline()
        self._show_view_line()
        self._maker.ask(self._painter, self._wish)

    def on_picture_ready(self, message: PictureReady) -> None:
        if message.painter is not self._painter:
            return
        is_new = (
            self._picture is None or self._picture.segments.failure is not message.picture.segments.failure
        )
        self._picture = message.picture
        self._replays.want(message.painter)
        with self.app.batch_update():
            self.query_one(Icicle).show(message.picture.tree)
            self.query_one(Allocations).show(message.painter, message.picture)
            self.query_one(SegmentMap).show(message.painter, message.picture)
            if is_new:
                self._show_failure(message.picture)
            self._show_timeline()
            self._show_view_line()
            self._show_selection()

    def on_replayed(self, message: Replayed) -> None:
        if self._replays.take(message, self._painter):
            self._ask()

    def _show_failure(self, picture: Picture) -> None:
        """Another failed request is looked at, or none: say so, and go to what stood in its way."""
        self.query_one(AlertLine).show(self._alert())
        if picture.segments.in_the_way and not self._chosen:
            largest = next(iter(picture.segments.in_the_way))
            self.query_one(Allocations).select_allocation(largest, quiet=True)

    def _show_timeline(self) -> None:
        painter = self._painter
        if painter is None:
            return
        analysis = painter.analysis
        self.query_one(SnapshotTimeline).show(
            self._picture.timeline if self._picture is not None else None,
            row=self._wish.row,
            now=(analysis.live.at(self._wish.row), analysis.reserved.at(self._wish.row)),
            totals=self._picture.totals if self._picture is not None else {},
            marks=self._marks,
            events=[oom.event_index for oom in analysis.ooms],
            steps=analysis.steps.rows.tolist(),
            first=analysis.device.skipped_events,
            note="" if analysis.history.is_usable else sentence(analysis.history),
            with_reserved=self._with_reserved,
        )

    def _show_view_line(self) -> None:
        wish, painter = self._wish, self._painter
        left: list[Span] = [(" ", "bar")]
        left += [
            (f"[{_NAMES[name]}]", "bar-key") if name == self._view else (f" {_NAMES[name]} ", "bar")
            for name in VIEWS
        ]
        right: list[Span] = []
        if wish.needle:
            right.append((f"/{wish.needle}  ", "bar-warn"))
        if wish.stacks is not None:
            right.append(("only selected  ", "bar-warn"))
        if painter is not None and len(self._analyses) > 1:
            right.append((f"device {painter.analysis.device.device}  ", "bar"))
        if wish.part is not None and painter is not None:
            right.append((f"{part_label(painter.analysis.snapshot, wish.part)}  ", "bar-warn"))
        if painter is not None and 0 < wish.stop - wish.start < painter.analysis.device.n_analysed:
            first = painter.analysis.device.skipped_events
            right.append((f"events {wish.start + first:,} to {wish.stop + first:,}  ", "bar-warn"))
        if len(self._files) > 1 and self._path is not None:
            right.append((f"‹ {label_of(self._path)} ›  ", "bar"))
        right.append((f"by {wish.group}  sort {wish.order} ", "bar-dim"))
        while len(right) > 1 and width_of([*left, *right]) > self.size.width:
            right.pop()  # the views and what narrows them come first
        self.query_one(ViewLine).show(left, right)

    # -- selection ---------------------------------------------------------------------------

    def _show_selection(self) -> None:
        painter = self._painter
        allocation = self.query_one(Allocations).allocation
        if painter is None:
            return
        if self._chosen == "icicle":
            self.query_one(StackPane).show_node(self.query_one(Icicle).selected)
        elif allocation is not None:
            self.query_one(StackPane).show_allocation(painter, allocation)
        self.query_one(SegmentMap).light(allocation if allocation is not None else -1)

    @on(Allocations.Moved, "#allocations")
    def _allocation_moved(self) -> None:
        self._chosen = "allocations"
        self._show_selection()

    @on(Allocations.Opened, "#allocations")
    def _allocation_opened(self) -> None:
        self._show_only("stack")

    @on(SegmentMap.Moved, "#segments")
    def _segment_moved(self, message: SegmentMap.Moved) -> None:
        largest = self.query_one(SegmentMap).allocation_at(message.index)
        if largest is not None and self.query_one(Allocations).select_allocation(largest):
            self._chosen = "allocations"

    @on(Icicle.Selected)
    def _box_selected(self) -> None:
        self._chosen = "icicle"
        self._show_selection()
        if self._wish.stacks is not None:
            self._change(stacks=self._selected_stacks())

    def on_descendant_focus(self, event: events.DescendantFocus) -> None:
        name = getattr(event.widget, "id", None)
        if name in VIEWS and name != self._view:
            self._show_only(name, focus=False)

    def _show_only(self, name: str, *, focus: bool = True) -> None:
        self._view = name
        self._mark_view()
        self._show_view_line()
        if focus:
            self.call_after_refresh(lambda: self.query_one(f"#{name}").focus())

    def _mark_view(self) -> None:
        """Tell the layout which view is shown. Styles are matched once, and not at all when all views are shown."""
        if self.has_class("-all"):
            return
        for each in VIEWS:
            self.set_class(each == self._view, f"-view-{each}", update=False)
        self.update_node_styles()

    def _change(self, **changes: object) -> None:
        self._wish = replace(self._wish, **changes)  # type: ignore[arg-type]
        self._ask()

    def _selected_stacks(self) -> frozenset[int] | None:
        if self._chosen == "icicle":
            return frozenset(self.query_one(Icicle).selected.stacks_below())
        allocation = self.query_one(Allocations).allocation
        if allocation is None or self._painter is None:
            return None
        return frozenset({int(self._painter.analysis.lives.stack[allocation])})

    def on_snapshot_timeline_resized(self) -> None:
        self._ask()

    # -- keys: what is shown -----------------------------------------------------------------

    def action_view(self) -> None:
        self._show_only(VIEWS[(VIEWS.index(self._view) + 1) % len(VIEWS)])

    def action_reserved(self) -> None:
        self._with_reserved = not self._with_reserved
        self._show_timeline()

    def action_only(self) -> None:
        self._change(stacks=None if self._wish.stacks is not None else self._selected_stacks())

    def action_filter(self) -> None:
        box = self.query_one("#filter", Input)
        box.add_class("-open")
        box.value = self._needle_before = self._wish.needle
        box.focus()

    def on_input_changed(self, message: Input.Changed) -> None:
        """What is typed is looked for at once; enter keeps it, esc goes back to what was there."""
        if message.input.has_class("-open"):
            self._change(needle=message.value.strip())

    def on_input_submitted(self, message: Input.Submitted) -> None:
        self._close_filter()
        self._change(needle=message.value.strip())

    def _close_filter(self) -> bool:
        box = self.query_one("#filter", Input)
        was_open = box.has_class("-open")
        box.remove_class("-open")
        if was_open:
            self.query_one("#allocations" if self.has_class("-all") else f"#{self._view}").focus()
        return was_open

    def action_back(self) -> None:
        if self._close_filter():
            self._change(needle=self._needle_before)
            return
        if self.query_one(Icicle).zoom_out():
            return
        if self._wish.needle or self._wish.stacks is not None or self._wish.part is not None:
            self._change(needle="", stacks=None, part=None)
        elif self._marks:
            self._marks = []
            self._show_timeline()
        elif self._view == "stack" and not self.has_class("-all"):
            self._show_only("allocations")
        elif self.host.model is not None:
            self.host.action_go("oom")
