"""What the collectors see of a launched job, beside its own records: `host/NODE.jsonl` of the attempt."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from oomscope.collect.recorder import HostRecorder
from oomscope.launch.processes import marked_processes

#: How often the job's processes are listed anew; workers come and go.
_LIST_S = 2.0


@contextlib.contextmanager
def host_readings(attempt_dir: Path, *, wanted: bool) -> Iterator[Callable[[], None]]:
    """Record the machine while the body runs.

    Yields a function to be called often: it keeps the list of the job's processes up to date. Nothing here can make a
    launch fail: without a writable folder there are no readings.

    Args:
        attempt_dir: of a real job. Its processes are known by their mark.
        wanted: False yields a function that does nothing (simulated devices, predictions).
    """
    recorder = None
    if wanted:
        with contextlib.suppress(OSError):
            recorder = HostRecorder(attempt_dir).start()
    if recorder is None:
        yield lambda: None
        return
    listed = -_LIST_S
    known: list[int] = []

    def look() -> None:
        nonlocal listed, known
        now = time.monotonic()
        if now - listed >= _LIST_S:
            listed = now
            pids = marked_processes(attempt_dir)
            # Ended ones stay on the list until their end was read.
            if set(pids) - set(known):
                known = sorted({*known, *pids})
                recorder.watch(known)

    try:
        yield look
        recorder.settle()
    finally:
        recorder.stop()
