"""Keys of the Snapshot screen that are about the file: its devices, its neighbours, what-if, source, and copying."""

from __future__ import annotations

from pathlib import Path

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.tui.editor import edit
from oomscope.tui.screens.snapshot_keys import SnapshotKeys
from oomscope.tui.screens.whatif import WhatIfScreen
from oomscope.tui.widgets.allocations import Allocations
from oomscope.tui.widgets.icicle import Icicle
from oomscope.tui.widgets.segments import SegmentMap
from oomscope.tui.widgets.snapshot_timeline import SnapshotTimeline
from oomscope.tui.widgets.stackpane import StackPane


class SnapshotFileKeys(SnapshotKeys):
    """The file that is shown, those beside it, and the actions about them."""

    def __init__(self) -> None:
        super().__init__()
        self._files: list[Path] = []
        self._path: Path | None = None
        self._analyses: list[DeviceAnalysis] = []

    def _open(self, path: Path) -> None:
        """Read another file."""
        raise NotImplementedError

    def _use(self, analysis: DeviceAnalysis) -> None:
        """Show another device."""
        raise NotImplementedError

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
