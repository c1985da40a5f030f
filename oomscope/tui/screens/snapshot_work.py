"""Work of the Snapshot screen that must not hold up a key: loading a file, and making pictures of it."""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable
from pathlib import Path

from textual.message import Message
from textual.message_pump import MessagePump

from oomscope.core.snapshot.analysis import DeviceAnalysis, analyse
from oomscope.errors import OomscopeError
from oomscope.store.snapshots import Limits, Selection, load_snapshot
from oomscope.views.snapshot_exact import FAILED, ExactReplay
from oomscope.views.snapshot_picture import Painter, Picture, Wish

logger = logging.getLogger(__name__)


class Loaded(Message):
    """A file was read and analysed."""

    def __init__(self, path: Path, analyses: list[DeviceAnalysis]) -> None:
        super().__init__()
        self.path = path
        self.analyses = analyses


class LoadFailed(Message):
    """A file could not be read."""

    def __init__(self, path: Path, error: OomscopeError) -> None:
        super().__init__()
        self.path = path
        self.error = error


class LoadProgress(Message):
    """How far reading has come."""

    def __init__(self, path: Path, fraction: float, text: str) -> None:
        super().__init__()
        self.path = path
        self.fraction = fraction
        self.text = text

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, LoadProgress)


class PictureReady(Message):
    """A wish was answered."""

    def __init__(self, painter: Painter, picture: Picture) -> None:
        super().__init__()
        self.painter = painter
        self.picture = picture

    def can_replace(self, message: Message) -> bool:
        return isinstance(message, PictureReady)


class Replayed(Message):
    """A device's history was replayed; `exact` is None when that failed."""

    def __init__(self, analysis: DeviceAnalysis, exact: ExactReplay | None) -> None:
        super().__init__()
        self.analysis = analysis
        self.exact = exact


def load(target: MessagePump, path: Path, limits: Limits, selection: Selection) -> None:
    """Read `path` and tell `target`; runs in a thread."""

    def progress(fraction: float, text: str) -> None:
        target.post_message(LoadProgress(path, fraction, text))

    try:
        snapshot = load_snapshot(path, limits=limits, selection=selection, on_progress=progress)
    except OomscopeError as error:
        target.post_message(LoadFailed(path, error))
        return
    analyses = analyse(snapshot)
    for analysis in analyses:
        if len(analysis.lives):
            # Everything that the first picture needs, so that no key waits for it later.
            analysis.category, analysis.history, analysis.peak, analysis.focus, analysis.totals  # noqa: B018
    target.post_message(Loaded(path, analyses))


class PictureMaker:
    """One picture at a time; of the wishes that come meanwhile only the last one is made."""

    def __init__(self, target: MessagePump, start: Callable[[Callable[[], None]], object]) -> None:
        """`start` runs a function in a thread."""
        self._target = target
        self._start = start
        self._next: tuple[Painter, Wish] | None = None
        self._busy = False

    @property
    def is_idle(self) -> bool:
        return not self._busy

    def ask(self, painter: Painter, wish: Wish) -> None:
        """Make a picture soon; called on the UI thread."""
        self._next = painter, wish
        if not self._busy:
            self._busy = True
            self._start(self._run)

    def _run(self) -> None:
        while self._next is not None:
            painter, wish = self._next
            self._next = None
            self._target.post_message(PictureReady(painter, painter.picture(wish)))
        self._busy = False


class Replays:
    """Replays of the devices of one file: each made once, in a thread, in seconds for a million rows."""

    def __init__(self, target: MessagePump, start: Callable[[Callable[[], None]], object]) -> None:
        """`start` runs a function in a thread."""
        self._target = target
        self._start = start
        self._done: dict[DeviceAnalysis, ExactReplay | None] = {}
        self._running: set[DeviceAnalysis] = set()

    def forget(self) -> None:
        """Another file is shown."""
        gc.unfreeze()
        self._done.clear()
        self._running.clear()

    def is_running(self, analysis: DeviceAnalysis) -> bool:
        return analysis in self._running

    def want(self, painter: Painter) -> None:
        """Give `painter` its replay if there is one, else begin to make it; called on the UI thread."""
        analysis = painter.analysis
        if analysis in self._done:
            painter.exact = self._done[analysis]
            painter.without = FAILED
        elif analysis not in self._running:
            self._running.add(analysis)
            self._start(lambda: self._run(analysis))

    def _run(self, analysis: DeviceAnalysis) -> None:
        # Millions of objects that stay: a full collection over them would hold up a key for a tenth of a second.
        exact: ExactReplay | None = None
        gc.disable()
        try:
            exact = ExactReplay(analysis)
        except Exception:  # worker boundary: a file can say anything; requested sizes stay
            logger.warning("the replay failed", exc_info=True)
        finally:
            gc.freeze()
            gc.enable()
        self._target.post_message(Replayed(analysis, exact))

    def take(self, message: Replayed, painter: Painter | None) -> bool:
        """A replay is ready; True when it is the one of `painter`."""
        if message.analysis not in self._running:
            return False
        self._running.discard(message.analysis)
        self._done[message.analysis] = message.exact
        if painter is None or painter.analysis is not message.analysis:
            return False
        self.want(painter)
        return True
