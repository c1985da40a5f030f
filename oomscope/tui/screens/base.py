"""The frame of every screen: title, alert, content, footer, and a message for too small a terminal.

A screen gives `compose_body` and `show_frame`. The app calls `show_frame` with the newest `Frame` whenever
the session folder changed or the screen comes to the front; a screen never reads files itself.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, ClassVar, cast

from textual import events
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.screen import Screen

from oomscope.tui import actions
from oomscope.tui.widgets.frame import MINIMUM, AlertLine, FooterLine, Missing, TitleLine, TooSmall
from oomscope.views.headline import Alert, Headline

if TYPE_CHECKING:
    from oomscope.tui.app import OomscopeApp
    from oomscope.views.frame import Frame


#: A multiplexer takes up to a tenth of a second to settle after a change of size.
_REPAINT_S = 0.3


class BaseScreen(Screen[None]):
    """Title line, alert line, the screen's own content, footer.

    When the screen has nothing to show, `show_missing` replaces the content with what is missing and how to
    get it.
    """

    MODE: ClassVar[str] = ""
    """Name in `actions.TABS` and of the app's mode."""
    HELP: ClassVar[str] = ""
    """A paragraph for the help overlay: what the screen shows and how to read it."""
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]  # noqa: RUF012
    VERTICAL_BREAKPOINTS = [(0, "-short"), (32, "-tall")]  # noqa: RUF012
    DEFAULT_CSS = """
    BaseScreen { layers: base overlay; background: $background; color: $foreground; }
    BaseScreen #frame { height: 1fr; }
    BaseScreen #body { height: 1fr; }
    BaseScreen #missing { display: none; }
    BaseScreen.-missing #body { display: none; }
    BaseScreen.-missing #missing { display: block; }
    BaseScreen.-too-small #frame { display: none; }
    BaseScreen.-too-small TooSmall { display: block; }
    """

    def compose(self) -> ComposeResult:
        with Vertical(id="frame"):
            yield TitleLine()
            yield AlertLine()
            with Vertical(id="body"):
                yield from self.compose_body()
            yield Missing(id="missing")
            yield FooterLine()
        yield TooSmall()

    # -- what a screen gives -----------------------------------------------------------------

    def compose_body(self) -> ComposeResult:
        """The widgets between alert line and footer."""
        raise NotImplementedError

    def show_frame(self, frame: Frame) -> None:
        """Show `frame`; called on the UI thread, at most a few times a second."""
        raise NotImplementedError

    def copy_text(self) -> str:
        """What `y` copies: the screen's answer as plain text; empty when there is none."""
        return ""

    def command_text(self) -> str:
        """What `Y` copies: a command line that prints the same answer; empty when there is none."""
        return ""

    def headline(self, frame: Frame) -> Headline:
        """The title line; the session's own unless the screen is about something else."""
        return frame.headline

    def alert(self, frame: Frame) -> Alert | None:
        """The alert line; the session's own unless the screen answers it already."""
        return frame.alert

    def _answered(self, alert: Alert | None) -> Alert | None:
        """`alert` without a key that would lead to this very screen."""
        if alert is None or alert.key != actions.digit_of(self.MODE):
            return alert
        return replace(alert, key="", answer="")

    def _with_own_key(self, alert: Alert | None) -> Alert | None:
        """`alert` with the key that the user gave to its answer."""
        return alert and replace(alert, key=self.host.key_of(alert.key))

    def offers(self, action_id: str) -> bool:
        """Whether the footer shows this action now; its key says why not, where it does not."""
        return True

    # -- what a screen uses ------------------------------------------------------------------

    @property
    def host(self) -> OomscopeApp:
        """The app, with its own type."""
        return cast("OomscopeApp", self.app)

    def show_missing(self, what: str = "", how: str = "") -> None:
        """Replace the content by what is missing and how to get it; without arguments it comes back."""
        self.set_class(bool(what), "-missing")
        if what:
            self.query_one("#missing", Missing).show(what, how)

    def refresh_frame(self) -> None:
        """Show the app's current frame again, for example after a change of theme or selection."""
        frame = self.host.frame
        if frame is None:
            return
        with self.app.batch_update():
            self.query_one(TitleLine).show(self.headline(frame))
            self.query_one(AlertLine).show(self._with_own_key(self._answered(self.alert(frame))))
            self.show_frame(frame)
            self.refresh_footer()

    def refresh_footer(self) -> None:
        """Footer entries: the actions whose keys work now, by the priority in the action table."""
        entries = []
        seen = set()
        for key, active in self.active_bindings.items():
            action = actions.action_by_id(active.binding.id or "")
            if action is None or not action.footer or action.id in seen or not active.enabled:
                continue
            if not self.offers(action.id):
                continue
            if self.has_class("-missing") and (action.group != actions.EVERYWHERE or action.id == "app.copy"):
                continue
            seen.add(action.id)
            entries.append((key, action.label, action.footer))
        self.query_one(FooterLine).show(self.MODE, entries)

    # -- events ------------------------------------------------------------------------------

    def on_screen_resume(self, event: events.ScreenResume) -> None:
        self.refresh_frame()

    def on_click(self, event: events.Click) -> None:
        """The right button opens what this screen can do as a menu."""
        if event.button == 3:
            from oomscope.tui.screens.help import HelpScreen

            self.app.push_screen(HelpScreen(self, menu=True))

    def on_resize(self, event: events.Resize) -> None:
        columns, rows = MINIMUM
        self.set_class(event.size.width < columns or event.size.height < rows, "-too-small")
        # A terminal may clear itself after it has told us its new size: paint once more when it has come to rest.
        self.set_timer(_REPAINT_S, self.refresh)

    def action_back(self) -> None:
        self.host.action_go("live")
