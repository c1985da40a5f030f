"""The viewer: screens over one session folder, kept up to date by a polling thread.

The viewer reads files and writes requests; it owns nothing of the job. Leaving it leaves the job as it is,
unless the user says otherwise.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, ClassVar

from textual.app import App, SystemCommand
from textual.binding import BindingType
from textual.message import Message
from textual.screen import Screen
from textual.worker import get_current_worker

from oomscope.errors import OomscopeError
from oomscope.store.session import Session
from oomscope.tui import actions, themes
from oomscope.tui.ascii import AsciiFilter, wants_ascii
from oomscope.tui.screens.base import BaseScreen
from oomscope.tui.settings import Settings, load
from oomscope.views.session import SessionModel

if TYPE_CHECKING:
    from oomscope.views.frame import Frame

logger = logging.getLogger(__name__)

#: Polls a second while the session can still change; the agents themselves write twice a second.
POLL_HZ = 4.0
#: Polls a second of a session that has ended: only another viewer's rerun could change it.
IDLE_HZ = 0.5


class FrameReady(Message):
    """A new picture of the session; an older one still in the queue is dropped."""

    def __init__(self, frame: Frame, model: SessionModel) -> None:
        super().__init__()
        self.frame = frame
        self.model = model

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, FrameReady)


class PollFailed(Message):
    """A poll raised: told to the user, tried again later."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.text = text


class OomscopeApp(App[str], inherit_bindings=False):
    """All screens of one session; `run()` returns "leave", "stop" or "kill"."""

    TITLE = "oomscope"
    CSS_PATH = "styles/app.tcss"
    ENABLE_COMMAND_PALETTE = True
    BINDINGS: ClassVar[list[BindingType]] = [*actions.bindings(actions.EVERYWHERE)]

    def __init__(
        self,
        session: Session | None = None,
        *,
        model: SessionModel | None = None,
        snapshot: Path | None = None,
        start: str = "live",
        readonly: bool = False,
        hz: float = POLL_HZ,
        clock: Callable[[], float] = time.time,
        on_quit: Callable[[str], None] | None = None,
        settings: Settings | None = None,
    ) -> None:
        """A viewer.

        Args:
            session: the session to show; None for a snapshot alone.
            model: in place of one made for `session`.
            snapshot: a snapshot file for the Snapshot screen.
            start: name of the first screen.
            readonly: without the actions that change the job.
            hz: polls a second; 0 never polls by itself (tests call `poll_now`).
            clock: seconds since the epoch, for ages.
            on_quit: called with "leave", "stop" or "kill" before the screens close.
            settings: theme and keys of the user's own.
        """
        self.settings = settings or Settings()
        self.is_mono = bool(os.environ.get("NO_COLOR")) or os.environ.get("TERM") == "dumb"
        super().__init__(ansi_color=True if self.is_mono else None)
        if wants_ascii():
            self._filters.append(AsciiFilter())
        for theme in themes.THEMES:
            self.register_theme(theme)
        self.theme = themes.MONO if self.is_mono else self.settings.theme or self._themes[0]
        if model is None and session is not None:
            model = SessionModel(session)
        self.model = model
        self.snapshot_path = snapshot
        self.frame: Frame | None = None
        self.rank = -1
        """The rank that is looked at; `,` and `.` change it. Starts with the one the alert is about."""
        self.paused = False
        self.marked: Path | None = None
        """A session beside which Compare shows the open one."""
        self.readonly = readonly
        self.clock = clock
        self._hz = hz
        self._start = start
        self._on_quit = on_quit
        self._told = ""
        """The last polling error that was shown: it comes again with every poll."""

    def key_of(self, default: str) -> str:
        """The key that stands in place of `default`, the first key of an action, in the user's keymap."""
        action = next((a for a in actions.all_actions() if a.keys.split(",")[0] == default), None)
        return self.settings.keymap.get(action.id, default).split(",")[0] if action else default

    # -- screens -----------------------------------------------------------------------------

    def on_mount(self) -> None:
        from oomscope.tui.screens import all_screens

        self.set_keymap({**self.settings.keymap})
        for problem in self.settings.problems:
            self.notify(problem, title="settings", severity="warning", timeout=12)
        for screen in all_screens():
            self.add_mode(screen.MODE, screen)
        self.switch_mode(self._start)
        if not self.is_headless:
            self._leave_on_signals()
        if self.model is not None and self._hz > 0:
            self.run_worker(self._poll_loop, thread=True, exclusive=True, group="poll", exit_on_error=False)

    def _leave_on_signals(self) -> None:
        """A terminated viewer gives the terminal back as it found it; the job goes on."""
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGHUP):
            with contextlib.suppress(NotImplementedError, RuntimeError, ValueError):
                loop.add_signal_handler(number, self._leave, "leave")

    def get_theme_variable_defaults(self) -> dict[str, str]:
        return {"line": "#3A4249"}

    @property
    def view(self) -> BaseScreen | None:
        """The screen of the current mode, below any dialog."""
        return next((s for s in reversed(self.screen_stack) if isinstance(s, BaseScreen)), None)

    def action_go(self, mode: str) -> None:
        while len(self.screen_stack) > 1:
            self.pop_screen()
        self.switch_mode(mode)

    # -- polling -----------------------------------------------------------------------------

    def _poll_loop(self) -> None:
        worker = get_current_worker()
        while not worker.is_cancelled:
            model = self.model
            started = time.monotonic()
            active = True
            if model is not None and not self.paused:
                try:
                    frame = model.poll()
                    active = frame.is_active
                    self.post_message(FrameReady(frame, model))
                except (OomscopeError, OSError) as error:
                    self.post_message(PollFailed(str(error)))
                except Exception as error:  # worker boundary: the viewer goes on, and says so
                    logger.warning("poll failed", exc_info=True)
                    self.post_message(PollFailed(f"internal error: {type(error).__name__}: {error}"))
            pause = 1 / (self._hz if active else min(self._hz, IDLE_HZ)) - (time.monotonic() - started)
            while pause > 0 and not worker.is_cancelled and self.model is model:
                time.sleep(min(pause, 0.1))
                pause -= 0.1

    def poll_now(self) -> None:
        """Poll once on the calling thread, which must be the UI's."""
        if self.model is not None:
            self._take(self.model.poll())

    def on_frame_ready(self, message: FrameReady) -> None:
        if message.model is self.model and not self.paused:
            self._take(message.frame)

    def on_poll_failed(self, message: PollFailed) -> None:
        if message.text != self._told:
            self._told = message.text
            self.notify(message.text, title="cannot read the session", severity="warning")

    def _take(self, frame: Frame) -> None:
        self.frame = frame
        if frame.ranks and frame.row(self.rank) is None:
            urgent = frame.alert.rank if frame.alert else None
            self.rank = urgent if urgent is not None else frame.ranks[0].rank
        if self.view is not None and self.view.is_mounted:
            self.view.refresh_frame()

    def open_session(self, session: Session) -> None:
        """Show another session from now on."""
        self.model = SessionModel(session)
        self.frame = None
        self.rank = -1
        self.paused = False
        self.poll_now()
        self.action_go("live")

    # -- actions that work everywhere --------------------------------------------------------

    def action_rank(self, delta: int) -> None:
        if self.frame is None or not self.frame.ranks:
            return
        known = [row.rank for row in self.frame.ranks]
        at = known.index(self.rank) if self.rank in known else 0
        self.show_rank(known[(at + delta) % len(known)])

    def show_rank(self, rank: int) -> None:
        """Make `rank` the one that is looked at."""
        if rank != self.rank:
            self.rank = rank
            if self.view is not None:
                self.view.refresh_frame()

    def action_copy(self) -> None:
        self._copy(self.view.copy_text() if self.view else "", "nothing to copy here yet")

    def action_copy_command(self) -> None:
        self._copy(self.view.command_text() if self.view else "", "no command prints this screen")

    def _copy(self, text: str, otherwise: str) -> None:
        if not text:
            self.notify(otherwise)
            return
        self.copy_to_clipboard(text)
        lines = text.count("\n") + (not text.endswith("\n"))
        self.notify(f"copied {lines} line{'s' if lines != 1 else ''}")

    def action_next_theme(self) -> None:
        if self.is_mono:
            self.notify("NO_COLOR is set: no other theme")
            return
        known = self._themes
        at = known.index(self.theme) if self.theme in known else 0
        self.theme = known[(at + 1) % len(known)]

    @property
    def _themes(self) -> tuple[str, ...]:
        return themes.cycle(self.console.color_system)

    def action_picture(self) -> None:
        try:
            path = self.save_screenshot(path=str(Path.cwd()))
        except OSError as error:
            self.notify(f"cannot write the picture: {error}", severity="error")
            return
        self.notify(f"wrote {path}")

    def action_help(self) -> None:
        from oomscope.tui.screens.help import HelpScreen

        if self.view is not None and not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.view))

    def action_log_view(self) -> None:
        from oomscope.tui.screens.log import LogScreen

        if self.model is None:
            self.notify("a snapshot alone has no log")
        elif not isinstance(self.screen, LogScreen):
            self.push_screen(LogScreen())

    def action_jump(self) -> None:
        from oomscope.tui.screens.jump import JumpScreen

        if self.view is not None and self.screen is self.view:
            self.push_screen(JumpScreen(self.view))

    def get_system_commands(self, screen: Screen[object]) -> Iterable[SystemCommand]:
        """The palette holds what has a key here, under the same names as in the help."""
        from oomscope.tui.screens.help import entries_of

        if self.view is None:
            return
        for entry in entries_of(self.view):
            run = partial(self.run_action, entry.action, entry.node)
            yield SystemCommand(f"{entry.group}: {entry.label}", f"{entry.tooltip}  ({entry.keys})", run)

    # -- requests to the supervisor ----------------------------------------------------------

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hide what changes the job from a read-only viewer, and stopping a job that is not ours to stop."""
        if action == "stop_job" and self.frame is not None and self.frame.is_attached:
            return False
        return not (self.readonly and action in ("dump", "stop_job"))

    def ask(self, do: str, said: str, **details: object) -> bool:
        """Send a request and say so; False when it could not be sent."""
        if self.model is None or self.readonly:
            self.notify("this viewer only reads", severity="warning")
            return False
        try:
            self.model.ask(do, **details)  # type: ignore[arg-type]
        except OSError as error:
            self.notify(f"cannot write into the session folder: {error.strerror}", severity="error")
            return False
        self.notify(said)
        return True

    def action_dump(self, who: str) -> None:
        if self.frame is None or not self.frame.is_active:
            self.notify("no job is running: there is nothing to take a snapshot of")
        elif who == "rank":
            self.ask("dump", f"asked rank {self.rank} for a snapshot", rank=self.rank)
        else:
            self.ask("dump", "asked every rank for a snapshot")

    def action_stop_job(self) -> None:
        from oomscope.tui.screens.dialogs import Confirm

        if self.frame is None or not self.frame.is_active:
            self.notify("no job is running")
            return

        def decided(yes: bool | None) -> None:
            if yes:
                self.ask("stop", "asked the supervisor to stop the job")

        body = (
            "The job gets an interrupt, as Ctrl-C gives it, and time to save.",
            "What was recorded so far is kept.",
        )
        self.push_screen(Confirm("Stop the job?", body, yes="Stop it", no="Let it run"), decided)

    def action_leave(self) -> None:
        """Leave at once when nothing runs; otherwise ask what shall become of the job."""
        from oomscope.tui.screens.dialogs import QuitDialog

        if self.model is None or self.frame is None or not self.frame.is_active or self.readonly:
            self._leave("leave")
            return

        def decided(choice: str | None) -> None:
            if choice:
                self._leave(choice)

        self.push_screen(QuitDialog(self.frame), decided)

    def _leave(self, choice: str) -> None:
        if choice in ("stop", "kill") and not self.ask(choice, "asked the supervisor"):
            return
        if self._on_quit is not None:
            self._on_quit(choice)
        self.exit(choice)

    def attach_command(self) -> str:
        """The command line that opens this session again."""
        return f"oomscope attach {self.frame.target}" if self.frame else ""


def run_app(
    session_path: str | os.PathLike[str],
    *,
    on_quit: Callable[[str], None] | None = None,
    readonly: bool = False,
    start: str = "live",
) -> str:
    """Show the session until the user leaves.

    Returns:
        "leave", "stop" or "kill": what the user chose for the job. The request has been written already.

    Raises:
        SessionError: not a session folder.
    """
    app = OomscopeApp(
        Session.open(session_path), on_quit=on_quit, readonly=readonly, start=start, settings=load()
    )
    return app.run() or "leave"


def run_snapshot_app(snapshot: str | os.PathLike[str]) -> None:
    """Show one snapshot file without a session."""
    OomscopeApp(snapshot=Path(snapshot), start="snapshot", settings=load()).run()
