"""The exception that ends the process, recorded by whichever hook sees it first.

The job's own output stays as it was.
"""

from __future__ import annotations

import os
import sys
import threading
import traceback
from types import TracebackType
from typing import Any, Callable

from .guard import guarded
from .recorder import MAX_FRAMES, Frame

#: Texts of device and host memory errors that are no `torch.OutOfMemoryError`. Source: CUDA, cuBLAS and libc
#: messages.
_OOM_TEXTS = (
    "out of memory",
    "CUBLAS_STATUS_ALLOC_FAILED",
    "CUDNN_STATUS_ALLOC_FAILED",
    "can't allocate memory",
    "Cannot allocate memory",
    "No executable batch size found",  # accelerate.utils.find_executable_batch_size, after the last retry
)


def is_out_of_memory(kind: type[BaseException], error: BaseException) -> bool:
    """Whether an exception says that device or host memory ran out, by its type, its text or its cause."""
    seen: set[int] = set()
    cause: BaseException | None = error
    while cause is not None and id(cause) not in seen:
        seen.add(id(cause))
        own = kind if cause is error else type(cause)
        text = str(cause)
        if (
            own.__name__ == "OutOfMemoryError"
            or issubclass(own, MemoryError)
            or any(t in text for t in _OOM_TEXTS)
        ):
            return True
        cause = cause.__cause__  # `raise … from error` only: what merely follows an error is another failure
    return False


def without_agent(trace: TracebackType | None, own: str) -> TracebackType | None:
    """The traceback without the agent's frames: what the script would have shown without us."""
    kept: list[TracebackType] = []
    while trace is not None:
        if not trace.tb_frame.f_code.co_filename.startswith(own):
            kept.append(trace)
        trace = trace.tb_next
    for each, following in zip(kept, [*kept[1:], None]):
        each.tb_next = following
    return kept[0] if kept else None


def _clean_chain(error: BaseException, own: str) -> None:
    """Take the agent's frames out of an exception and of all it came from."""
    seen: set[int] = set()
    left: list[BaseException | None] = [error]
    while left:
        each = left.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        if each.__traceback__ is not None:
            each.__traceback__ = without_agent(each.__traceback__, own)
        left += [each.__cause__, each.__context__]


class ExceptionProbe:
    """Hooks sys.excepthook, threading.excepthook and, at exit.

    Sys.last_value (a script may replace the hooks).

    Args:
        emit: takes the record.
        on_exception: called with the record after it is written.
        before: called first; returns False when this process shall stay silent.
    """

    def __init__(
        self,
        emit: Callable[[dict[str, Any]], None],
        *,
        own_folder: str,
        before: Callable[[], bool],
        on_exception: Callable[[dict[str, Any], BaseException], None],
    ) -> None:
        self._emit = emit
        self._own = own_folder
        self._before = before
        self._on_exception = on_exception
        self._seen: set[int] = set()
        self._previous = sys.excepthook
        self._previous_thread = threading.excepthook

    def install(self) -> None:
        """Hook in; the hooks that were there go on being called."""
        self._previous, self._previous_thread = sys.excepthook, threading.excepthook

        def excepthook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
            self._clean(error)
            self.saw(kind, error, error.__traceback__ or trace, main=True)
            self._previous(kind, error, error.__traceback__ or trace)

        def thread_excepthook(args: Any) -> None:
            if args.exc_value is not None and not issubclass(args.exc_type, SystemExit):
                self.saw(args.exc_type, args.exc_value, args.exc_traceback, main=False)
            self._previous_thread(args)

        self._hook, self._thread_hook = excepthook, thread_excepthook
        sys.excepthook = excepthook
        threading.excepthook = thread_excepthook

    def remove(self) -> None:
        """In a forked child: put the old hooks back unless somebody replaced ours."""
        if sys.excepthook is self._hook:
            sys.excepthook = self._previous
        if threading.excepthook is self._thread_hook:
            threading.excepthook = self._previous_thread

    @guarded("exceptions")
    def _clean(self, error: BaseException) -> None:
        _clean_chain(error, self._own)

    @guarded("exceptions")
    def at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if isinstance(error, BaseException):
            self.saw(type(error), error, getattr(sys, "last_traceback", None), main=True)

    @guarded("exceptions")
    def saw(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None, *, main: bool
    ) -> None:
        """Record an uncaught exception once. Ctrl-C is the user's wish, and no error."""
        if id(error) in self._seen or issubclass(kind, SystemExit):
            return
        if issubclass(kind, KeyboardInterrupt):
            self._seen.add(id(error))
            if main:
                self._emit({"k": "term", "signal": "SIGINT"})
            return
        if not self._before():
            return
        self._seen.add(id(error))
        frames = _frames(trace)
        record = {
            "k": "exception",
            "type": kind.__name__,
            "message": str(error)[:8000],
            "traceback": "".join(traceback.format_exception(kind, error, trace)).splitlines()[-200:],
            "is_oom": is_out_of_memory(kind, error),
            "frames": [each for each in frames if not each[0].startswith(self._own)],
            "main_thread": main,
        }
        self._emit(record)
        self._on_exception(record, error)


def _frames(trace: TracebackType | None) -> list[Frame]:
    """(file, line, function), innermost first."""
    frames = []
    while trace is not None:
        code = trace.tb_frame.f_code
        frames.append((code.co_filename, trace.tb_lineno, code.co_name))
        trace = trace.tb_next
    return frames[::-1][:MAX_FRAMES]


def write_torchelastic_error(record: dict[str, Any]) -> None:
    """Give torchrun the root cause.

    Without a decorator in the script it only says "To enable traceback see…".

    Format: torch.distributed.elastic.multiprocessing.errors.ErrorHandler.record_exception.
    """
    import json
    import time

    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path or os.path.exists(path):
        return
    message = {
        "message": {
            "message": f"{record['type']}: {record['message']}",
            "extraInfo": {"py_callstack": "\n".join(record["traceback"]), "timestamp": str(int(time.time()))},
        }
    }
    with open(path, "w") as stream:
        json.dump(message, stream)
