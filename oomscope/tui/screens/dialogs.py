"""Dialogs: a confirmation that shows what will happen, and the question what becomes of the job.

The cursor starts on the choice that changes nothing; escape takes that choice too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar, Generic, TypeVar

from textual import events
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.containers import Vertical
from textual.geometry import Size
from textual.screen import ModalScreen

from oomscope.tui import actions
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, wrap
from oomscope.views.frame import Frame

Answer = TypeVar("Answer")


class _Body(LineList, can_focus=False):
    """What the dialog says; scrolls when it is longer than the screen."""

    DEFAULT_CSS = "_Body { height: auto; }"

    def __init__(self, body: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._body = body

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return max(1, min(len(self.build(width)[1]), self.app.size.height - 11))

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        return [], [Row([(line, style)]) for text, style in self._body for line in wrap(text, width, 2)]


class _Choices(LineList):
    """The choices, always in view."""

    DEFAULT_CSS = "_Choices { height: auto; margin-top: 1; }"

    def __init__(self, choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._choices = choices

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self._choices)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows = []
        longest = max(len(label) for _, label, _ in self._choices)
        for key, label, note in self._choices:
            lit = key == self.cursor_key or (not self.cursor_key and key == self._choices[0][0])
            mark = "›" if lit else " "
            rows.append(
                Row([(f"{mark} {key}  ", "key"), (f"{label:<{longest}}", "bold"), (f"  {note}", "dim")], key)
            )
        return [], rows


class Dialog(ModalScreen[Answer], Generic[Answer]):
    """A box in the middle of the screen with a title, a body and choices."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.DIALOG)]
    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > Vertical {
        width: 84; max-width: 98%; height: auto; max-height: 96%;
        border: round $primary; border-title-style: bold; padding: 1 2; background: $background;
    }
    """

    def __init__(
        self, title: str, body: Sequence[tuple[str, str]], choices: Sequence[tuple[str, str, str]]
    ) -> None:
        """`body`: (text, style); `choices`: (key, label, note), the harmless one first."""
        super().__init__()
        self._heading, self._body, self._choices = title, body, choices

    def compose(self) -> ComposeResult:
        with Vertical():
            if self._body:
                yield _Body(self._body)
            yield _Choices(self._choices)

    def on_mount(self) -> None:
        box = self.query_one(Vertical)
        box.border_title = self._heading
        box.border_subtitle = "enter chooses · esc changes nothing"
        self.query_one(_Choices).focus()

    def on_key(self, event: events.Key) -> None:
        if not self.is_current:  # a key that was typed in the moment in which the dialog was answered
            event.stop()
        elif any(event.key == choice for choice, _, _ in self._choices):
            event.stop()
            self.choose(event.key)
        elif event.key in ("pageup", "pagedown") and self._body:
            event.stop()
            self.query_one(_Body).action_page(-1 if event.key == "pageup" else 1)

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        message.stop()
        if self.is_current:
            self.choose(message.key)

    def choose(self, key: str) -> None:
        raise NotImplementedError

    def action_cancel(self) -> None:
        if self.is_current:
            self.dismiss(None)


class Confirm(Dialog[bool]):
    """Yes or no, after showing exactly what yes means."""

    def __init__(
        self, title: str, body: Sequence[str | tuple[str, str]], *, yes: str = "Yes", no: str = "No"
    ) -> None:
        lines = [(line, "") if isinstance(line, str) else line for line in body]
        super().__init__(title, lines, (("n", no, ""), ("y", yes, "")))

    def choose(self, key: str) -> None:
        self.dismiss(key == "y")


class Choose(Dialog[str]):
    """One of several ways, or none: the first choice changes nothing and gives None."""

    def choose(self, key: str) -> None:
        self.dismiss(None if key == self._choices[0][0] else key)


class SortDialog(Dialog[str]):
    """An order by its first letter; the cursor starts on the one in force."""

    def __init__(self, title: str, orders: Mapping[str, str], now: str) -> None:
        self._orders = list(orders)
        super().__init__(title, (), [(name[0], name, note) for name, note in orders.items()])
        self._now = now

    def on_mount(self) -> None:
        super().on_mount()
        self.query_one(_Choices).select(self._now[:1], quiet=True)

    def choose(self, key: str) -> None:
        self.dismiss(next(name for name in self._orders if name[0] == key))


_RUNNING = (
    ("l", "Leave it running", "the job goes on; only this viewer closes"),
    ("s", "Stop the job", "as Ctrl-C does, with time to save"),
    ("k", "Kill the job", "at once, nothing is saved"),
)
_ATTACHED = (("l", "Leave it running", "the job was not started from here; it goes on"),)
_WAITING = (
    ("l", "Leave it waiting", "open it again later to choose fixes"),
    ("s", "End the session", "no rerun; what was recorded is kept"),
)


class QuitDialog(Dialog[str]):
    """What becomes of the job when the viewer closes; by default it goes on."""

    def __init__(self, frame: Frame) -> None:
        ranks = len(frame.ranks)
        who = f"{ranks} rank{'s' if ranks != 1 else ''} running" if ranks else "The job is starting"
        waits = frame.state == "waiting"
        if waits:
            who = "The supervisor waits for a choice of fixes"
        super().__init__(
            "Leave the viewer",
            (
                (f"{who}, attempt {frame.attempt}.", ""),
                (f"Open it again with: oomscope attach {frame.target}", "dim"),
            ),
            _ATTACHED if frame.is_attached else _WAITING if waits else _RUNNING,
        )

    def choose(self, key: str) -> None:
        self.dismiss({"l": "leave", "s": "stop", "k": "kill"}[key])
