"""The Sessions screen: what was recorded on this machine; open one, or delete it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import ClassVar

from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import Input

from oomscope.errors import OomscopeError
from oomscope.store import library
from oomscope.store.session import ENDED, Session
from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.dialogs import Confirm
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip
from oomscope.views import sessions as view
from oomscope.views import wording
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.sessions import SessionRow

_STATE_STYLES = {"oom": "error", "failed": "error", "done": "ok", "running": "ok", "lost": "warn"}


class SessionList(LineList):
    """One line per session."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.sessions: tuple[SessionRow, ...] = ()
        self._now = 0.0
        self.words = ""

    def show(self, sessions: Sequence[SessionRow], now: float) -> None:
        self.sessions, self._now = tuple(sessions), now
        self.invalidate()

    @property
    def current(self) -> SessionRow | None:
        return next((row for row in self.sessions if str(row.path) == self.cursor_key), None)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        wide = width >= 110
        head = f"   {'age':>6}  {'state':<11}{'script':<24}{'tries':>6}{'peak GiB':>9}  {'cause':<28}"
        head += "  session" if wide else ""
        rows = [self._line(row, width, wide) for row in self.sessions if row.matches(self.words)]
        if not rows:
            rows = [Row([("   no session matches", "dim")])]
        return [[(head[:width], "heading")]], rows

    def _line(self, row: SessionRow, width: int, wide: bool) -> Row:
        selected = str(row.path) == self.cursor_key
        spans: list[Span] = [
            ("›" if selected else " ", "bold"),
            (f"  {view.age(self._now - row.created_s):>6}  ", "dim"),
            (f"{row.state:<11}", _STATE_STYLES.get(row.state, "")),
            (f"{clip(row.script, 23):<24}", "bold"),
            (f"{row.attempts:>6}{wording.gib(row.peak_bytes):>9}  ", ""),
            (f"{clip(row.verdict or '–', 28):<28}", "" if row.verdict else "dim"),
        ]
        if wide:
            spans.append((f"  {row.id}", "dim"))
        return Row(spans, str(row.path))


class SessionsRead(Message):
    """The list was read from disk."""

    def __init__(self, rows: list[SessionRow]) -> None:
        super().__init__()
        self.rows = rows


class SessionsScreen(BaseScreen):
    """All recorded sessions of this machine."""

    MODE = "sessions"
    HELP = (
        "Every run that was recorded, newest first, with its last cause and highest reserved peak. enter "
        "opens one in this viewer; / shows only those with some text. Sessions are kept for 14 days or 10 "
        "GiB, running and pinned ones always."
    )
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.SESSIONS)]
    DEFAULT_CSS = """
    SessionsScreen Input { display: none; height: 1; border: none; padding: 0 1; background: $panel; }
    SessionsScreen.-filter Input { display: block; }
    """

    def compose_body(self) -> ComposeResult:
        yield SessionList(id="sessions")
        yield Input(placeholder="words to look for", compact=True)

    def on_mount(self) -> None:
        self.query_one("#sessions").focus()
        self.show_missing("Reading the list of sessions.", "")

    def on_screen_resume(self, event: object) -> None:
        super().on_screen_resume(event)  # type: ignore[arg-type]
        self.read()

    @work(thread=True, exclusive=True, exit_on_error=False)
    def read(self) -> None:
        self.post_message(SessionsRead(view.rows(self._home())))

    def read_now(self) -> None:
        """Read the list on this thread."""
        self.on_sessions_read(SessionsRead(view.rows(self._home())))

    def _home(self) -> Path | None:
        """The state folder that holds the shown session, else the default one."""
        model = self.host.model
        if model is not None and model.session.path.parent.name == "sessions":
            return model.session.path.parent.parent
        return None

    def on_sessions_read(self, message: SessionsRead) -> None:
        if not message.rows:
            self.show_missing("No session was recorded yet.", "Record one with: oomscope run train.py")
            return
        self.show_missing()
        self.query_one(SessionList).show(message.rows, self.host.clock())
        self.refresh_frame()

    def show_frame(self, frame: Frame) -> None:
        listing = self.query_one(SessionList)
        if not listing.cursor_key:
            listing.select(str(frame.path), quiet=True)

    def headline(self, frame: Frame) -> Headline:
        return Headline("≡", "info", "SESSIONS", (Fact(f"open: {frame.path.name}", 5),))

    def alert(self, frame: Frame) -> Alert | None:
        if frame.is_active:
            return frame.alert
        rows = self.query_one(SessionList).sessions
        ended = sum(bool(row.verdict) for row in rows)
        return (
            Alert("info", f"{wording.plural(len(rows), 'session')}, {ended} with a cause found")
            if rows
            else None
        )

    def copy_text(self) -> str:
        return self.query_one(SessionList).plain_text()

    def command_text(self) -> str:
        return "oomscope sessions"

    def on_line_list_opened(self, message: LineList.Opened) -> None:
        row = self.query_one(SessionList).current
        if row is None:
            return
        try:
            self.host.open_session(Session.open(row.path))
        except OomscopeError as error:
            self.notify(error.message, severity="error")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """A read-only viewer deletes nothing."""
        return not (self.host.readonly and action == "delete")

    def action_delete(self) -> None:
        row = self.query_one(SessionList).current
        if row is None:
            return
        if row.state not in ENDED:
            self.notify(f"{row.id} is still {row.state}", severity="warning")
            return
        model = self.host.model
        if model is not None and model.session.path == row.path:
            self.notify("this session is open here; open another one first", severity="warning")
            return

        def decided(yes: bool | None) -> None:
            if yes:
                if not library.delete(row.path):
                    self.notify(f"cannot delete {row.id}", severity="error")
                self.read()

        body = (f"{row.path}", "with its records, logs, snapshots and predictions. This cannot be undone.")
        self.app.push_screen(Confirm("Delete this session?", body, yes="Delete it", no="Keep it"), decided)

    def action_filter(self) -> None:
        self.add_class("-filter")
        self.query_one(Input).focus()

    def on_input_changed(self, event: Input.Changed) -> None:
        listing = self.query_one(SessionList)
        listing.words = event.value
        listing.invalidate()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        self.query_one("#sessions").focus()

    def action_back(self) -> None:
        if self.has_class("-filter"):
            self.remove_class("-filter")
            self.query_one(Input).value = ""
            self.query_one("#sessions").focus()
        else:
            super().action_back()
