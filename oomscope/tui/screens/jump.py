"""Jump mode: a letter on every pane; pressing it moves the keyboard there."""

from __future__ import annotations

from string import ascii_lowercase

from textual import events
from textual.app import ComposeResult
from textual.screen import ModalScreen
from textual.widget import Widget
from textual.widgets import Label

from oomscope.tui.screens.base import BaseScreen


class JumpScreen(ModalScreen[None]):
    """Letters over the focusable panes of the screen below."""

    DEFAULT_CSS = """
    JumpScreen { background: $background 40%; layers: letters; } JumpScreen Label { layer: letters; position:
    absolute; width: 5; padding: 0 1; background: $accent; color: $background; text-style: bold; }
    JumpScreen:ansi Label { text-style: bold reverse; }
    """

    def __init__(self, below: BaseScreen) -> None:
        super().__init__()
        panes: list[Widget] = [
            widget for widget in below.focus_chain if widget.region.area and widget.display
        ]
        self._panes = dict(zip(ascii_lowercase, panes, strict=False))

    def compose(self) -> ComposeResult:
        for letter, pane in self._panes.items():
            label = Label(f" {letter} ")
            label.styles.offset = (pane.region.x + 1, pane.region.y)
            yield label

    def on_key(self, event: events.Key) -> None:
        event.stop()
        pane = self._panes.get(event.key)
        self.dismiss(None)
        if pane is not None:
            self.app.call_later(pane.focus)
