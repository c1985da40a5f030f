"""The agent's one thread: it writes the queue, samples memory, and listens for requests."""

from __future__ import annotations

import select
import threading
import time
from typing import Any, Callable

from .guard import guarded

#: Seconds between two readings.
PERIOD_S = 0.5


class Sampler:
    """Runs `tick` every period, and `handle` whenever something can be read from one of `sources`.

    The thread is a daemon and holds no lock of the job.
    """

    def __init__(self, tick: Callable[[], None], period_s: float = PERIOD_S) -> None:
        self._tick = guarded("sampler")(tick)
        self._period = period_s
        self._sources: dict[Any, Callable[[], None]] = {}
        self._thread: threading.Thread | None = None
        self._stop = False

    def listen(self, source: Any, handle: Callable[[], None]) -> None:
        """Call `handle` when `source` (a socket or descriptor) is readable. Before `start` only."""
        self._sources[source] = handle

    def start(self) -> None:
        self._thread = threading.Thread(target=self._run, name="oomscope", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Ask the thread to end; it does so within one period and nobody waits for it."""
        self._stop = True

    @guarded("sampler thread")
    def _run(self) -> None:
        due = time.monotonic()
        while not self._stop:
            wait = max(0.0, due - time.monotonic())
            readable = self._wait(wait)
            for source in readable:
                self._sources[source]()
            if time.monotonic() >= due:
                due = time.monotonic() + self._period
                self._tick()

    def _wait(self, seconds: float) -> list[Any]:
        if not self._sources:
            time.sleep(seconds)
            return []
        try:
            return select.select(list(self._sources), [], [], seconds)[0]
        except (OSError, ValueError):  # closed while we waited: only readings are left
            self._sources = {}
            return []
