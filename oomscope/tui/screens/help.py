"""The help overlay: what the screen below shows, and every key that works there.

Typing searches, enter runs the entry under the cursor.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, NamedTuple

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.dom import DOMNode
from textual.screen import ModalScreen
from textual.widgets import Input

from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, wrap


class Entry(NamedTuple):
    """One key that works on the screen below."""

    group: str
    keys: str
    label: str
    tooltip: str
    action: str
    node: DOMNode


class HelpList(LineList):
    """The paragraph about the screen, then its keys by group."""

    def __init__(self, text: str, entries: Sequence[Entry]) -> None:
        super().__init__()
        self._text, self._entries = text, entries
        self.words = ""

    def matching(self) -> list[Entry]:
        """Entries that contain every word searched for."""
        words = self.words.lower().split()
        return [
            entry
            for entry in self._entries
            if all(w in f"{entry.group} {entry.keys} {entry.label} {entry.tooltip}".lower() for w in words)
        ]

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows: list[Row] = []
        if not self.words and self._text:
            rows += [Row([(line, "dim")]) for line in wrap(self._text, width)]
        group = ""
        found = self.matching()
        for entry in found:
            if entry.group != group:
                group = entry.group
                rows += [Row([("", "")]), Row([(group, "heading")])]
            key = f"{entry.action}@{entry.keys}"
            mark = "›" if key == self.cursor_key else " "
            label = 20 if width >= 90 else 15
            lines = wrap(entry.tooltip, max(20, width - label - 17))
            rows.append(
                Row(
                    [
                        (f"{mark} {entry.keys:<13.13}", "key"),
                        (f"{entry.label:<{label}.{label}} ", "bold"),
                        (lines[0], ""),
                    ],
                    key,
                )
            )
            rows += [Row([(" " * (label + 16), ""), (line, "")]) for line in lines[1:]]
        if not found:
            rows.append(Row([("no key does that here", "dim")]))
        return [], rows

    @property
    def shows_cursor(self) -> bool:
        """Always: the keyboard stays in the search field while arrows move the cursor here."""
        return True

    def current(self) -> Entry | None:
        return next((e for e in self._entries if f"{e.action}@{e.keys}" == self.cursor_key), None)


class HelpScreen(ModalScreen[None]):
    """Searchable keys of one screen."""

    BINDINGS: ClassVar[list[BindingType]] = [("escape,f1,ctrl+c", "close", "Close")]
    DEFAULT_CSS = """
    HelpScreen { align: center middle; background: $background 60%; }
    HelpScreen > Vertical {
        width: 110; max-width: 98%; height: 94%; border: round $primary; border-title-style: bold;
        padding: 0 1; background: $background;
    }
    HelpScreen Input { height: 1; border: none; padding: 0; background: $background; margin-bottom: 1; }
    """

    def __init__(self, below: BaseScreen, *, menu: bool = False) -> None:
        """`menu`: only what the screen itself can do, without its description; for the right mouse button."""
        super().__init__()
        self._below, self._menu = below, menu
        self._entries = entries_of(below)
        if menu:
            others = (actions.EVERYWHERE, actions.LISTS)
            self._entries = [entry for entry in self._entries if entry.group not in others] or self._entries

    def compose(self) -> ComposeResult:
        with Vertical():
            yield Input(placeholder="type to search the keys of this screen", compact=True)
            yield HelpList("" if self._menu else self._below.HELP, self._entries)

    def on_mount(self) -> None:
        box = self.query_one(Vertical)
        label = next((full for mode, full, _ in actions.TABS if mode == self._below.MODE), "oomscope")
        box.border_title = f"{'Menu' if self._menu else 'Help'}: {label}"
        box.border_subtitle = "↑↓ choose · enter runs it · esc closes"
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        listing = self.query_one(HelpList)
        listing.words = event.value
        listing.invalidate()
        listing.scroll_to(y=0, animate=False)

    def on_key(self, event: events.Key) -> None:
        """Arrows move the list while the keyboard stays in the search field."""
        listing = self.query_one(HelpList)
        if event.key in ("up", "down"):
            event.stop()
            listing.action_move(-1 if event.key == "up" else 1)
        elif event.key in ("pageup", "pagedown"):
            event.stop()
            listing.action_page(-1 if event.key == "pageup" else 1)

    async def on_input_submitted(self, event: Input.Submitted) -> None:
        await self._run()

    async def on_line_list_opened(self, message: LineList.Opened) -> None:
        await self._run()

    async def _run(self) -> None:
        entry = self.query_one(HelpList).current()
        self.dismiss(None)
        if entry is not None:
            self.app.call_later(self.app.run_action, entry.action, entry.node)

    def action_close(self) -> None:
        self.dismiss(None)


def entries_of(screen: BaseScreen) -> list[Entry]:
    """Every key that works on `screen` now, the screen's own groups first."""
    known = {action.id: action for action in actions.all_actions()}
    found: dict[str, Entry] = {}
    bound = screen.active_bindings
    for active in bound.values():
        action = known.get(active.binding.id or "")
        if action is None or not active.enabled or action.id in found:
            continue
        # A key that means something else here, to another of our actions, is not this one's.
        own = [
            actions.key_name(key)
            for key in screen.host.settings.keymap.get(action.id, action.keys).split(",")
            if key not in bound or bound[key].binding.id in (action.id, None)
        ]
        found[action.id] = Entry(
            action.group, " ".join(own), action.label, action.tooltip, action.action, active.node
        )
    order = {action.id: number for number, action in enumerate(actions.all_actions())}
    last = (actions.LISTS, actions.EVERYWHERE)
    return sorted(
        found.values(),
        key=lambda e: (last.index(e.group) + 1 if e.group in last else 0, order.get(_id_of(e, found), 0)),
    )


def _id_of(entry: Entry, found: dict[str, Entry]) -> str:
    return next(key for key, value in found.items() if value is entry)
