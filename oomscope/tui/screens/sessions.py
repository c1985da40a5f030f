"""The Sessions screen: what was recorded on this machine; open one, or delete it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar, cast

from rich.cells import cell_len
from textual import work
from textual.app import ComposeResult
from textual.binding import BindingType
from textual.message import Message
from textual.widgets import Input

from oomscope.errors import OomscopeError
from oomscope.store import archive, library
from oomscope.store.session import ENDED, Session
from oomscope.tui import actions
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.screens.dialogs import Choose, Confirm, SortDialog
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip, fit, wrap
from oomscope.views import sessions as view
from oomscope.views import wording
from oomscope.views.frame import Frame
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.sessions import SessionRow, SessionTable

if TYPE_CHECKING:
    from oomscope.tui.app import OomscopeApp

_STATE_STYLES = {"oom": "error", "failed": "error", "done": "ok", "running": "ok", "lost": "warn"}
#: Cells beside the script, the cause and the id: cursor, marks, age, state, tries, peak.
_FIXED = 4 + 6 + 2 + 11 + 6 + 9 + 2


class SessionList(LineList):
    """One line per session."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.table = SessionTable()
        self._now = 0.0
        self.words = ""
        self.order = "age"
        self.reverse = False

    def show(self, table: SessionTable, now: float) -> None:
        self.table, self._now = table, now
        self.invalidate()

    @property
    def current(self) -> SessionRow | None:
        return next((row for row in self.table.rows if str(row.path) == self.cursor_key), None)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        room = width - _FIXED
        longest = max((cell_len(row.script) for row in self.table.rows), default=0)
        script = min(max(7, longest + 1), 40, room - 14)
        cause = min(30, room - script)
        head = f"    {'age':>6}  {'state':<11}{fit('script', script)}{'tries':>6}{'peak GiB':>9}  "
        head += fit("cause", cause)
        wide = width - _FIXED - script - cause
        head += "  session" if wide >= 30 else ""
        shown = [row for row in self.table.rows if row.matches(self.words)]
        rows = [
            self._line(row, script, cause, wide)
            for row in view.ordered(shown, self.order, reverse=self.reverse)
        ]
        if not rows:
            rows = [Row([("   no session matches", "dim")])]
        if self.table.older:
            rows.append(Row([(f"   {wording.plural(self.table.older, 'older session')} not shown", "dim")]))
        if self.table.unreadable and not self.words:
            rows += [Row([("", "")]), Row([("   cannot be shown:", "warn")])]
            rows += [
                Row([(f"   {line}", "dim")]) for why in self.table.unreadable for line in wrap(why, width - 4)
            ]
        return [[(clip(head, width), "heading")]], rows

    def _line(self, row: SessionRow, script: int, cause: int, wide: int) -> Row:
        selected = str(row.path) == self.cursor_key
        is_marked = row.path == cast("OomscopeApp", self.app).marked
        marks = ("m" if is_marked else " ") + ("p" if row.is_pinned else " ")
        spans: list[Span] = [
            ("›" if selected else " ", "bold"),
            (f"{marks} ", "key"),
            (f"{view.age(self._now - row.created_s):>6}  ", "dim"),
            (f"{row.state:<11}", _STATE_STYLES.get(row.state, "")),
            (fit(row.script, script - 1) + " ", "bold"),
            (f"{row.attempts:>6}{wording.gib(row.peak_bytes):>9}  ", ""),
            (fit(_cause(row) or "–", cause), "" if row.verdict else "dim"),
        ]
        if wide >= 30:
            spans.append((f"  {clip(row.id, wide - 2)}", "dim"))
        return Row(spans, str(row.path))


def _cause(row: SessionRow) -> str:
    """The rule without the part that all of them have."""
    return row.verdict.removeprefix("oom.")


class SessionsRead(Message):
    """The list was read from disk."""

    def __init__(self, table: SessionTable) -> None:
        super().__init__()
        self.table = table


class SessionsScreen(BaseScreen):
    """All recorded sessions of this machine."""

    MODE = "sessions"
    HELP = (
        "Every run that was recorded, newest first, with its last cause and highest reserved peak. enter "
        "opens one in this viewer; / shows only those with some text; o orders them. p pins one: sessions are "
        "kept for 14 days or 10 GiB, running and pinned ones always. m marks one, and Compare then shows its "
        "attempts beside those of the open session. E writes one into a file that opens on another machine."
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

    @work(thread=True, exclusive=True, exit_on_error=False, group="list")
    def read(self) -> None:
        self.post_message(SessionsRead(view.table(self._home())))

    def read_now(self) -> None:
        """Read the list on this thread."""
        self.on_sessions_read(SessionsRead(view.table(self._home())))

    def _home(self) -> Path | None:
        """The state folder that holds the shown session, else the default one."""
        model = self.host.model
        if model is not None and model.session.path.parent.name == "sessions":
            return model.session.path.parent.parent
        return None

    def on_sessions_read(self, message: SessionsRead) -> None:
        if not message.table.rows and not message.table.unreadable:
            self.show_missing("No session was recorded yet.", "Record one with: oomscope run train.py")
            return
        self.show_missing()
        self.query_one(SessionList).show(message.table, self.host.clock())
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
        rows = self.query_one(SessionList).table.rows
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
        """A read-only viewer deletes and pins nothing."""
        return not (self.host.readonly and action in ("delete", "pin"))

    def action_sort(self) -> None:
        listing = self.query_one(SessionList)

        def decided(order: str | None) -> None:
            if order:
                listing.order = order
                listing.invalidate()

        self.app.push_screen(SortDialog("Order sessions by", view.ORDERS, listing.order), decided)

    def action_reverse(self) -> None:
        listing = self.query_one(SessionList)
        listing.reverse = not listing.reverse
        listing.invalidate()

    def action_pin(self) -> None:
        row = self.query_one(SessionList).current
        if row is None:
            return
        try:
            session = Session.open(row.path)
            if row.is_pinned:
                session.unpin()
            else:
                session.pin()
        except (OomscopeError, OSError) as error:
            self.notify(f"cannot pin {row.id}: {error}", severity="error")
            return
        self.notify(
            f"{row.id} {'may be deleted by retention again' if row.is_pinned else 'is kept for good'}"
        )
        self.read()

    def action_mark(self) -> None:
        """Choose the session that Compare shows beside the open one."""
        listing = self.query_one(SessionList)
        row = listing.current
        if row is None:
            return
        model = self.host.model
        if model is not None and model.session.path == row.path:
            self.notify("this session is open: mark another one to compare it with")
            return
        self.host.marked = None if self.host.marked == row.path else row.path
        listing.invalidate()
        if self.host.marked:
            self.notify("5 compares the open session with it")

    def action_export(self) -> None:
        row = self.query_one(SessionList).current
        if row is None:
            return
        try:
            session = Session.open(row.path)
            small, large = archive.size(session, snapshots=False), archive.size(session)
        except (OomscopeError, OSError) as error:
            self.notify(f"cannot read {row.id}: {error}", severity="error")
            return
        body = (
            (f"{Path.cwd() / row.id}.tar.gz", "heading"),
            ("holds command lines, paths, what the job printed and its source lines. Unpacked, oomscope attach "
             "opens the folder.", ""),
        )  # fmt: skip
        choices = (
            ("n", "Write nothing", ""),
            ("w", "Without snapshots", f"{wording.size(small)} before compression"),
            ("s", "With snapshots", f"{wording.size(large)} before compression"),
        )

        def decided(choice: str | None) -> None:
            if choice:
                self.pack(session, choice == "s")

        self.app.push_screen(Choose("Export this session?", body, choices), decided)

    @work(thread=True, exit_on_error=False, group="export")
    def pack(self, session: Session, snapshots: bool) -> None:
        try:
            path = archive.pack(session, Path.cwd(), snapshots=snapshots)
        except OomscopeError as error:
            self.app.call_from_thread(self.notify, error.message, severity="error")
            return
        self.app.call_from_thread(self.notify, f"wrote {path}, {wording.size(path.stat().st_size)}")

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
