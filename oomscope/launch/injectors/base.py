"""What an injector is, what it reports, and the wrapping without which injected code could end the job."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from oomscope.errors import AttachFailed


class InjectError(AttachFailed):
    """Injection failed for the reason `code`; the job goes on as before.

    `may_try_another`: nothing was started in the job, so another injector can be tried.
    """

    def __init__(
        self, code: str, message: str, *, hint: str | None = None, may_try_another: bool = False
    ) -> None:
        super().__init__(message, hint=hint)
        self.code = code
        self.may_try_another = may_try_another


@dataclass(slots=True)
class Report:
    """How an injection went.

    `state`: "ran" (the text was executed), "failed" (Python reported an error), "waiting" (it waits for the
    GIL or for the main thread) or "queued" (it will run, and this injector cannot see when).
    """

    injector: str
    state: str = "queued"
    thread: int = 0
    """Thread id that was stopped; 0 when none was."""
    thread_did: str = ""
    """What that thread was doing, as in "epoll_wait (gloo_tcp_loop)"."""
    stopped_us: float = 0.0
    """How long it was stopped."""
    total_ms: float = 0.0
    detail: str = ""
    signals: list[int] = field(default_factory=list)
    """Signals that arrived meanwhile and were sent again."""


class Injector(Protocol):
    """One way into a process."""

    name: str

    def unavailable(self, pid: int) -> str | None:
        """Why this way is closed for `pid`; None when it may work. Touches nothing."""
        ...

    def run(self, pid: int, source: str) -> Report:
        """Runs `source`.

        Raises:
            InjectError: it was not started.
        """
        ...


def wrapped(source: str, error_file: str) -> str:
    """`source` so that nothing can escape from it into the job.

    PyRun_SimpleString ends the process on SystemExit, and any other exception in a pending call makes the job
    fail with SystemError. An error is written to `error_file`; nothing is printed in the job.

    Raises:
        SyntaxError: `source` is not Python.
    """
    compile(source, "<oomscope>", "exec")
    return (
        "try:\n"
        f" exec(compile({source!r}, '<oomscope>', 'exec'), {{'__name__': '_oomscope_attach'}})\n"
        "except BaseException:\n"
        " try:\n"
        "  import traceback as _oomscope_traceback\n"
        f"  with open({error_file!r}, 'a') as _oomscope_file: "
        "_oomscope_file.write(_oomscope_traceback.format_exc())\n"
        "  del _oomscope_file, _oomscope_traceback\n"
        " except BaseException: pass\n"
    )
