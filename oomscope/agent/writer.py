"""The agent's end of the channel: records in memory, one append-only file, one write() for many lines.

The training thread only appends to a queue (0.2 µs). The agent's thread writes twice a second; records that
must survive the process (OOM, exceptions, the end) are written at once by whoever made them. A full disk
costs records, never the job: what was lost is counted and said in a `gap` record once there is room again.
"""

from __future__ import annotations

import os
import threading
import time
from collections import deque
from typing import Any

from ..protocol.records import CRITICAL, GAP, encode

#: Records kept while nothing can be written.
MAX_QUEUE = 20_000
#: Bytes of records that one process may write; readings of a month fit.
MAX_FILE_BYTES = 512 << 20
#: How long a step may wait for its loss to arrive from the device before it is written without.
LOSS_PATIENCE_NS = 5_000_000_000


class PendingValue:
    """A number that is still on its way from a device.

    `value` is set by the training thread, never waited for.
    """

    __slots__ = ("ready", "value")

    def __init__(self) -> None:
        self.ready = False
        self.value: float | None = None


class Emitter:
    """Collects records; they reach the disk from the moment `open` was called."""

    def __init__(self, max_queue: int = MAX_QUEUE, max_bytes: int = MAX_FILE_BYTES) -> None:
        self.lost = 0
        self._queue: deque[tuple[int, dict[str, Any]]] = deque()
        self._max_queue = max_queue
        self._left = max_bytes
        self._lock = threading.Lock()
        self._descriptor = -1
        self._sequence = 0
        self._torn = False

    @property
    def is_open(self) -> bool:
        return self._descriptor >= 0

    def emit(self, record: dict[str, Any]) -> None:
        """Queue a record (it needs `k`); critical kinds are also written before this returns."""
        queue = self._queue
        if len(queue) >= self._max_queue:
            self.lost += 1
            return
        queue.append((time.time_ns(), record))
        if record["k"] in CRITICAL and self._descriptor >= 0:
            self.flush(force=True)

    def open(self, path: str, first: dict[str, Any]) -> None:
        """Create the file and write `first` before everything that is queued.

        Raises:
            OSError: it cannot be created; records go on being queued.
        """
        flags = (
            os.O_WRONLY
            | os.O_CREAT
            | os.O_APPEND
            | getattr(os, "O_CLOEXEC", 0)
            | getattr(os, "O_NOFOLLOW", 0)
        )
        self._descriptor = os.open(path, flags, 0o600)
        self._queue.appendleft((time.time_ns(), first))
        self.flush(force=True)

    def flush(self, *, force: bool = False, sync: bool = False) -> bool:
        """Write what is queued; False when something could not be written.

        Args:
            force: also write steps whose loss has not arrived.
            sync: ask the system to bring it to the disk (network file systems).
        """
        if self._descriptor < 0 or not self._lock.acquire(timeout=0.2):
            return False
        try:
            return self._write(force, sync)
        finally:
            self._lock.release()

    def _write(self, force: bool, sync: bool) -> bool:
        lines = self._take(force)
        if not lines:
            return True
        count = len(lines)
        if self._left <= 0:
            self.lost += count
            return False
        if self.lost:
            lines.insert(0, self._line(time.time_ns(), {"k": GAP, "lost": self.lost}))
        data = (b"\n" if self._torn else b"") + b"".join(lines)
        try:
            written = os.write(self._descriptor, data)
            if sync:
                os.fdatasync(self._descriptor)
        except OSError:
            self.lost += count
            return False
        self._left -= written
        if written == len(data):
            self._torn = False
            self.lost = 0
            return True
        # A full disk wrote a part. Only what did not fit whole is lost; the next record starts on a line of
        # its own.
        self._torn = True
        whole = data[:written].count(b"\n") - data[:1].count(b"\n")
        self.lost = max(0, len(lines) - whole) + (self.lost if whole == 0 else 0)
        return False

    def _take(self, force: bool) -> list[bytes]:
        lines = []
        queue = self._queue
        while queue:
            t, record = queue[0]
            loss = record.get("loss")
            if isinstance(loss, PendingValue):
                if not loss.ready and not force and time.time_ns() - t < LOSS_PATIENCE_NS:
                    break
                record = {**record, "loss": loss.value}
            queue.popleft()
            lines.append(self._line(t, record))
        return lines

    def _line(self, t: int, record: dict[str, Any]) -> bytes:
        line = encode({"t": t, "k": record["k"], "n": self._sequence, **record})
        self._sequence += 1
        return line

    def close(self) -> None:
        """Write what is left and close the file.

        Under the lock: a thread of ours that still wrote to the closed number would write into whatever file
        or socket the job opens next.
        """
        self.flush(force=True)
        if not self._lock.acquire(timeout=2.0):
            return  # a hung file system: an open descriptor harms nobody
        try:
            descriptor, self._descriptor = self._descriptor, -1
            if descriptor >= 0:
                os.close(descriptor)
        except OSError:
            return
        finally:
            self._lock.release()

    def after_fork(self) -> None:
        """In a forked child: forget the parent's file and queue.

        The lock may be held by a thread that is not here.
        """
        descriptor, self._descriptor = self._descriptor, -1
        self._lock = threading.Lock()
        self._queue = deque()
        self._sequence = 0
        self._torn = False
        self.lost = 0
        if descriptor >= 0:
            try:
                os.close(descriptor)
            except OSError:
                return
