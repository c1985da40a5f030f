"""The Snapshot screen: what was in memory, block by block."""

from __future__ import annotations

from typing import ClassVar

from textual.app import ComposeResult
from textual.binding import BindingType
from textual.widgets import Static

from oomscope.tui.actions import make_bindings
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.snapshot_actions import SNAPSHOT_ACTIONS
from oomscope.views.frame import Frame


class SnapshotScreen(BaseScreen):
    """Linked views of one memory snapshot."""

    MODE = "snapshot"
    HELP = "What was in memory at one moment: over time, by allocating code, by segment, and block by block."
    BINDINGS: ClassVar[list[BindingType]] = [*make_bindings(SNAPSHOT_ACTIONS)]

    def compose_body(self) -> ComposeResult:
        yield Static()

    def on_mount(self) -> None:
        if self.host.frame is None:
            self.show_missing("No snapshot is open.", "oomscope open FILE.pickle opens one.")

    def show_frame(self, frame: Frame) -> None:
        self.show_missing(
            "No memory snapshot in this session yet.",
            "One is written by itself when a rank runs out of memory; press s to ask every rank for one now. "
            "A snapshot file of your own opens with: oomscope open FILE.pickle",
        )
