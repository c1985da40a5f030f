"""The Snapshot screen's file: reading it, and the keys about it: devices, neighbours, what-if, source, copying."""

from __future__ import annotations

from pathlib import Path

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.store.snapshots import Limits, Selection
from oomscope.tui.editor import edit
from oomscope.tui.screens.snapshot_keys import SnapshotKeys
from oomscope.tui.screens.snapshot_work import Loaded, LoadFailed, LoadProgress, Replays, load
from oomscope.tui.screens.whatif import WhatIfScreen
from oomscope.tui.widgets.allocations import Allocations
from oomscope.tui.widgets.icicle import Icicle
from oomscope.tui.widgets.segments import SegmentMap
from oomscope.tui.widgets.snapshot_timeline import SnapshotTimeline
from oomscope.tui.widgets.stackpane import StackPane


class SnapshotFile(SnapshotKeys):
    """The file that is shown, those beside it, and the actions about them."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[Path] = []
        self._path: Path | None = None
        self._analyses: list[DeviceAnalysis] = []
        self._loading: Path | None = None
        self._replays = Replays(
            self, lambda run: self.run_worker(run, thread=True, group="replay", exit_on_error=False)
        )

    def _use(self, analysis: DeviceAnalysis) -> None:
        """Show another device."""
        raise NotImplementedError

    # -- loading -----------------------------------------------------------------------------

    def _open(self, path: Path) -> None:
        self._loading = path
        self.show_missing(
            f"Reading {path.name} …", "esc leaves it; the file is read in a process of its own."
        )
        limits, selection = self.host_options()
        self.run_worker(
            lambda: load(self, path, limits, selection),
            thread=True,
            exclusive=True,
            group="load",
            exit_on_error=False,
        )

    def host_options(self) -> tuple[Limits, Selection]:
        """Limits and selection that the command line gave, if it did."""
        found = getattr(self.host, "snapshot_options", None)
        return found if found is not None else (Limits(), Selection())

    def on_load_progress(self, message: LoadProgress) -> None:
        if message.path == self._loading:
            done = int(message.fraction * 30)
            self.show_missing(
                f"Reading {message.path.name} …", f"{'█' * done}{'·' * (30 - done)} {message.text}"
            )

    def on_load_failed(self, message: LoadFailed) -> None:
        if message.path == self._loading:
            self._loading = None
            self._path = message.path
            self._painter = None
            self.show_missing(message.error.message, message.error.hint or "")
            self.refresh_frame()

    def on_loaded(self, message: Loaded) -> None:
        if message.path != self._loading:
            return
        self._loading, self._path = None, message.path
        self._replays.forget()
        self._analyses = message.analyses
        if not any(len(each.lives) for each in message.analyses):
            self._painter = None
            self.show_missing(f"{message.path.name} holds no memory: no segments, no history.")
            return
        busiest = max(message.analyses, key=lambda each: (len(each.device.events), each.totals.reserved))
        self.show_missing()
        self._use(busiest)

    # -- keys --------------------------------------------------------------------------------

    def action_device(self) -> None:
        used = [each for each in self._analyses if len(each.lives)]
        if self._painter is None or len(used) < 2:
            self.notify("this snapshot shows one device")
            return
        at = used.index(self._painter.analysis)
        self._use(used[(at + 1) % len(used)])

    def action_file(self, delta: int) -> None:
        if self.host.model is not None:
            self.host.action_rank(delta)
        elif len(self._files) > 1 and self._path in self._files:
            self._open(self._files[(self._files.index(self._path) + delta) % len(self._files)])

    def action_whatif(self) -> None:
        """The history replayed under other settings, in an overlay."""
        if self._path is None or self._painter is None or not len(self._painter.analysis.device.events):
            self.notify("this snapshot holds no history to replay")
            return
        self.app.push_screen(WhatIfScreen(self._path))

    def action_edit(self) -> None:
        frame = self.query_one(StackPane).frame
        if frame is None or not frame.file.endswith(".py"):
            self.notify("select a line of Python first")
        else:
            edit(self.app, frame.file, frame.line)

    # -- copying -----------------------------------------------------------------------------

    def copy_text(self) -> str:
        if self._painter is None:
            return ""
        focused = self.app.focused
        if isinstance(focused, (Icicle, Allocations, SegmentMap, StackPane, SnapshotTimeline)):
            return focused.plain_text()
        return self.query_one(Icicle).plain_text()

    def command_text(self) -> str:
        if self._path is None or self._painter is None:
            return ""
        if not self._painter.analysis.history.is_usable:
            return f"oomscope inspect {self._path}"
        row = self._wish.row + self._painter.analysis.device.skipped_events
        return f"oomscope inspect {self._path} --at event:{max(0, row)}"
