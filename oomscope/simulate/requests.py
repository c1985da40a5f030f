"""Writes every request that a prediction run makes of its allocator, for replay under other settings.

Events are three 64-bit integers in native byte order: address, bytes (0: the block is free again, -1: the script gave
cached memory back), stream. The reader is `oomscope.core.fixes.requests`.
"""

from __future__ import annotations

import atexit
import os
from array import array
from typing import Any, Callable

#: Integers kept in memory before they are written: 3 MiB.
_BUFFER = 3 << 17


class RequestLog:
    """The requests of one device of one process."""

    def __init__(self, folder: str, device: int) -> None:
        rank = os.environ.get("RANK", "0")
        self.path = os.path.join(folder, f"requests-r{rank}-d{device}.bin")
        self._events = array("q")

    def row(self, row: Any) -> None:
        """One row of the allocator's history."""
        action = row.action
        if action == "alloc":
            self._events.extend((row.addr, row.size, row.stream))
        elif action == "free_completed":
            self._events.extend((row.addr, 0, 0))
        if len(self._events) >= _BUFFER:
            self.flush()

    def emptied(self) -> None:
        """The script gave cached memory back."""
        self._events.extend((0, -1, 0))

    def flush(self) -> None:
        """Append what is in memory to the file; a full disk ends the log, not the job."""
        events, self._events = self._events, array("q")
        try:
            with open(self.path, "ab") as file:
                events.tofile(file)
        except OSError:
            self.row = self._nothing  # type: ignore[method-assign]

    def _nothing(self, row: Any) -> None:
        return


def request_log(folder: str | None, device: int) -> RequestLog | None:
    """The log of `device`, written to the end by the time the process ends; None without a folder."""
    if not folder:
        return None
    log = RequestLog(folder, device)
    atexit.register(log.flush)
    return log


def tracer(log: RequestLog | None, trace: Callable[[Any], None]) -> Callable[[Any], None]:
    """`trace`, preceded by the log when there is one."""
    if log is None:
        return trace

    def both(row: Any) -> None:
        log.row(row)
        trace(row)

    return both
