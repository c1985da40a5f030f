"""Dialogs: a confirmation that shows what will happen, and the question what becomes of the job.

The cursor starts on the choice that changes nothing; escape takes that choice too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Generic, TypeVar

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


class _Choices(LineList):
    """The body of a dialog, its choices below."""

    DEFAULT_CSS = "_Choices { height: auto; max-height: 100%; }"

    def __init__(self, body: Sequence[tuple[str, str]], choices: Sequence[tuple[str, str, str]]) -> None:
        super().__init__()
        self._body, self._choices = body, choices

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return len(self.build(width)[1])

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        rows = [Row([(line, style)]) for text, style in self._body for line in wrap(text, width, 2)]
        rows.append(Row([("", "")]))
        for key, label, note in self._choices:
            lit = key == self.cursor_key or (not self.cursor_key and key == self._choices[0][0])
            mark = "›" if lit else " "
            rows.append(Row([(f"{mark} {key:<7} ", "key"), (label, "bold"), (f"  {note}", "dim")], key))
        return [], rows


class Dialog(ModalScreen[Answer], Generic[Answer]):
    """A box in the middle of the screen with a title, a body and choices."""

    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.DIALOG)]
    DEFAULT_CSS = """
    Dialog { align: center middle; background: $background 60%; }
    Dialog > Vertical {
        width: 76; max-width: 96%; height: auto; max-height: 90%;
        border: round $primary; border-title-style: bold; padding: 1 2; background: $background;
    }
    """

    def __init__(
        self, title: str, body: Sequence[tuple[str, str]], choices: Sequence[tuple[str, str, str]]
    ) -> None:
        """`body`: (text, style); `choices`: (key, label, note), the harmless one first."""
        super().__init__()
        self._title, self._body, self._choices = title, body, choices

    def compose(self) -> ComposeResult:
        with Vertical():
            yield _Choices(self._body, self._choices)

    def on_mount(self) -> None:
        box = self.query_one(Vertical)
        box.border_title = self._title
        box.border_subtitle = "enter chooses · esc changes nothing"
        self.query_one(_Choices).focus()

    def on_key(self, event: object) -> None:
        key = getattr(event, "key", "")
        if any(key == choice for choice, _, _ in self._choices):
            getattr(event, "stop", lambda: None)()
            self.choose(key)

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        message.stop()
        self.choose(message.key)

    def choose(self, key: str) -> None:
        raise NotImplementedError

    def action_cancel(self) -> None:
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


class QuitDialog(Dialog[str]):
    """What becomes of the job when the viewer closes; by default it goes on."""

    def __init__(self, frame: Frame) -> None:
        ranks = len(frame.ranks)
        who = f"{ranks} rank{'s' if ranks != 1 else ''} running" if ranks else "the job is starting"
        if frame.state == "waiting":
            who = "the supervisor waits for a choice of fixes"
        super().__init__(
            "Leave the viewer",
            (
                (f"{who}, attempt {frame.attempt}.", ""),
                (f"Open it again with: oomscope attach {frame.path.name}", "dim"),
            ),
            (
                ("l", "Leave it running", "the job goes on; only this viewer closes"),
                ("s", "Stop the job", "SIGTERM, time to save, then the viewer closes"),
                ("k", "Kill the job", "at once, nothing is saved"),
            ),
        )

    def choose(self, key: str) -> None:
        self.dismiss({"l": "leave", "s": "stop", "k": "kill"}[key])
