"""Where a rank was when it was told to end.

Although its main thread may sit in C++ and never return to Python.

A Python handler for SIGTERM would not run there, and would turn torchrun's shutdown of a tenth of a second
into thirty. The C handler of `faulthandler` writes the stacks of all threads and then passes the signal on:
the exit status stays as it was.
"""

from __future__ import annotations

import faulthandler
import os
import signal
from typing import IO

from .guard import guarded


class StackOnTerm:
    """Writes the stacks to a file when SIGTERM comes."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._file: IO[bytes] | None = None

    @guarded("sigterm")
    def install(self) -> None:
        """Arm it, from any thread, unless the script already handles the signal itself."""
        if signal.getsignal(signal.SIGTERM) is not signal.SIG_DFL:
            return
        descriptor = os.open(self._path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
        self._file = open(descriptor, "wb", buffering=0)  # noqa: SIM115  # faulthandler needs it open
        faulthandler.register(signal.SIGTERM, file=self._file, all_threads=True, chain=True)

    @guarded("sigterm")
    def remove(self) -> None:
        """Disarm (a forked worker shall die as it would have); at the end, take an empty file away."""
        file, self._file = self._file, None
        if file is None:
            return
        if signal.getsignal(signal.SIGTERM) in (signal.SIG_DFL, None):
            faulthandler.unregister(signal.SIGTERM)
        file.close()

    @guarded("sigterm")
    def tidy(self) -> None:
        """Remove the file when nothing was written to it."""
        if os.path.exists(self._path) and os.path.getsize(self._path) == 0:
            os.unlink(self._path)
