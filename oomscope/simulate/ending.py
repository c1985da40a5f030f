"""Ends the process with its own exit status although torch's device threads never join.

After a backward pass on the simulated device, the autograd engine holds device threads that cannot be joined when
the process's static objects are destroyed, and the C++ runtime aborts. Everything before that point is Python's own
and stays as it is: uncaught exceptions, `atexit` handlers, finalisation, exit status. So only the last part is cut
short: glibc's `on_exit` hands the status to `_exit`, after all C streams were flushed.
"""

from __future__ import annotations

import ctypes


def end_before_static_destructors() -> None:
    """Register the ending; handlers run in reverse order, so the C streams are flushed first."""
    libc = ctypes.CDLL(None)
    libc.on_exit(ctypes.cast(libc._exit, ctypes.c_void_p), None)
    libc.__cxa_atexit(ctypes.cast(libc.fflush, ctypes.c_void_p), None, None)
