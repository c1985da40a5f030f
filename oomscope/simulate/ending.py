"""Ends the process with its own exit status although torch's device threads never join.

Backward passes on a CUDA device run in threads of the autograd engine that live as long as the process. Two
things
would go wrong at its end:

* A device thread that still waits for the interpreter lock, to drop what it used in the last pass, is
  killed by Python's finalisation, and the C++ runtime aborts. So the lock is given away for a moment
  before.
* The threads cannot be joined when static objects are destroyed. So glibc's `on_exit` hands the status to
  `_exit` before that, after all C streams were flushed.

Everything else stays Python's own: uncaught exceptions, `atexit` handlers, finalisation, exit status.
"""

from __future__ import annotations

import ctypes
import time

_MOMENT_S = 0.02
"""Four times Python's switch interval."""


def end_before_static_destructors() -> None:
    """Register the ending; handlers run in reverse order, so the C streams are flushed first."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)


def let_device_threads_finish() -> None:
    """Give the interpreter lock away, so that waiting device threads get it."""
    time.sleep(_MOMENT_S)
