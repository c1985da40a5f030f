"""The first injector: start a thread in the process that takes the GIL and runs the text. x86-64 Linux.

The stopped thread is one that waits in a system call where it holds neither the C library's malloc lock nor
the loader lock, so that pthread_create is safe in it; all other threads, the training thread first, go on.
Only when there is no such thread, or the process may not have memory that is writable and executable, a
pending call is queued on the main thread instead.
"""

from __future__ import annotations

import contextlib
import os
import platform
import signal
import struct
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass

from oomscope.launch.injectors.base import InjectError, Report
from oomscope.launch.injectors.elf import Memory, Symbols, resolve
from oomscope.launch.injectors.ptrace import StoppedThread

#: System calls in which a thread holds none of the C library's locks (x86-64 numbers, asm/unistd_64.h).
SAFE_SYSCALLS = {
    0: "read", 7: "poll", 23: "select", 35: "nanosleep", 43: "accept", 45: "recvfrom", 47: "recvmsg",
    61: "wait4", 202: "futex", 230: "clock_nanosleep", 232: "epoll_wait", 270: "pselect6", 271: "ppoll",
    281: "epoll_pwait", 288: "accept4",
}  # fmt: skip
_FUTEX, _MMAP = 202, 9

# What the new thread runs, position-independent. rdi = context: +0 PyGILState_Ensure, +8
# PyRun_SimpleString[Flags],
# +16 PyGILState_Release, +24 text, +32 state, +40 pthread_self, +48 pthread_detach.
#   endbr64; push rbx; mov rbx,rdi; sub rsp,16
#   call [rbx+40]; mov rdi,rax; call [rbx+48]          detach: nobody joins it
#   mov qword [rbx+32],1; call [rbx]; mov [rsp],eax    1: started, waits for the GIL
#   mov qword [rbx+32],2; mov rdi,[rbx+24]; xor esi,esi; call [rbx+8]      2: has it
#   movsxd rax,eax; add rax,16; mov [rbx+32],rax       16: ran, 15: Python reported an error
#   mov edi,[rsp]; call [rbx+16]; add rsp,16; xor eax,eax; pop rbx; ret
_STUB = bytes.fromhex(
    "f30f1efa534889fb4883ec10ff53284889c7ff533048c7432001000000ff1389042448c7432002000000488b7b"
    "1831f6ff53084863c04883c010488943208b3c24ff53104883c41031c05bc3"
)
_STATE_OFFSET, _THREAD_ID_OFFSET, _STUB_OFFSET, _TEXT_OFFSET = 32, 64, 128, 256
_STATE_HAS_GIL, _STATE_ERROR, _STATE_RAN = 2, 15, 16

_READ_WRITE, _READ_WRITE_EXECUTE = 3, 7
_PRIVATE_ANONYMOUS = 0x22
_FIRST_ERROR = 0xFFFFFFFFFFFFF000  # results of mmap above are -errno

_ATTEMPTS = 20
_LOOK_FOR_THREAD_S = 0.1
#: Signals of the terminal that must not end us while a thread of the job is stopped.
_DEFER = {signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT, signal.SIGALRM}


@dataclass(frozen=True, slots=True)
class _Candidate:
    thread: int
    name: str
    syscall: int


class PtraceInjector:
    """See the module.

    Args:
        mode: "auto", "thread" or "pending"; the last two are for tests.
        wait_s: how long to watch the started thread for the GIL.
    """

    name = "ptrace"

    def __init__(self, mode: str = "auto", wait_s: float = 2.0) -> None:
        self._mode = mode
        self._wait_s = wait_s

    def unavailable(self, pid: int) -> str | None:
        if sys.platform != "linux" or platform.machine() != "x86_64":
            return f"works on x86-64 Linux only, not on {platform.machine()} {sys.platform}"
        try:
            with open(f"/proc/{pid}/mem", "rb"):
                return None
        except OSError as error:
            return f"the memory of process {pid} cannot be opened ({error.strerror})"

    def run(self, pid: int, source: str) -> Report:
        started = time.perf_counter()
        payload = source.encode() + b"\0"
        symbols = resolve(pid)
        report = Report(self.name)
        with _deferred_signals(), Memory(pid, writable=True) as memory:
            page = self._start(pid, symbols, memory, payload, report)
            if report.state == "waiting":
                self._watch(memory, page, report)
        report.total_ms = 1e3 * (time.perf_counter() - started)
        return report

    def _start(self, pid: int, symbols: Symbols, memory: Memory, payload: bytes, report: Report) -> int:
        pending = self._mode == "pending"
        for attempt in range(_ATTEMPTS):
            candidate = None if pending else _pick_thread(pid)
            if candidate is None and self._mode == "thread":
                raise InjectError("no_thread", f"no thread of process {pid} waits in a safe system call")
            try:
                return self._inject(pid, candidate, symbols, memory, payload, report)
            except _Moved as moved:
                pending = pending or (moved.use_pending and self._mode == "auto")
            except ProcessLookupError as error:
                if attempt == _ATTEMPTS - 1 or not os.path.exists(f"/proc/{pid}"):
                    raise InjectError("gone", f"process {pid} ended while it was attached to") from error
        raise InjectError(
            "busy", f"no thread of process {pid} held still in {_ATTEMPTS} tries", may_try_another=True
        )

    def _inject(
        self,
        pid: int,
        candidate: _Candidate | None,
        symbols: Symbols,
        memory: Memory,
        payload: bytes,
        report: Report,
    ) -> int:
        """One try: stop a thread, place text and stub, start them. Returns the address of the placed page."""
        thread = candidate.thread if candidate is not None else pid
        # A pending call must be queued by the main thread: only then does CPython 3.11 notice it.
        stopped = StoppedThread(pid, thread, symbols.restore_rt, memory)
        with stopped:
            if candidate is not None and stopped.syscall not in SAFE_SYSCALLS:
                raise _Moved
            page = _map(stopped, symbols, len(payload), executable=candidate is not None)
            memory.write(page + _TEXT_OFFSET, payload)
            run = symbols.address.get("PyRun_SimpleStringFlags") or symbols.address["PyRun_SimpleString"]
            if candidate is None:
                stopped.call(symbols.address["Py_AddPendingCall"], run, page + _TEXT_OFFSET)
                report.state, report.detail = "queued", "runs when the main thread executes Python bytecode"
            else:
                memory.write(page, _context(symbols, run, page))
                memory.write(page + _STUB_OFFSET, _STUB)
                stopped.finish_with(
                    symbols.address["pthread_create"], page + _THREAD_ID_OFFSET, 0, page + _STUB_OFFSET, page
                )
                report.state = "waiting"
        report.thread = thread
        report.thread_did = (
            f"{SAFE_SYSCALLS[candidate.syscall]} ({candidate.name})"
            if candidate is not None
            else "main thread"
        )
        report.stopped_us, report.signals = stopped.stopped_us, stopped.signals
        return page

    def _watch(self, memory: Memory, page: int, report: Report) -> None:
        """Follows the state word of the started thread."""
        deadline = time.monotonic() + self._wait_s
        state = 0
        while time.monotonic() < deadline:
            try:
                (state,) = memory.unpack(page + _STATE_OFFSET, "<Q")
            except InjectError as error:
                raise InjectError("gone", "the process ended while it was attached to") from error
            if state >= _STATE_ERROR:
                report.state = "ran" if state == _STATE_RAN else "failed"
                return
            time.sleep(0.0005)
        if state == _STATE_HAS_GIL:
            report.detail = "the agent runs, and is not done yet"
        else:
            report.detail = (
                f"the agent has been waiting for the GIL for {self._wait_s:.0f} s: "
                "some thread of the job holds it in C code"
            )


class _Moved(Exception):  # noqa: N818  # a turn of the loop, not an error
    """The thread left its system call, or this way is closed and a pending call shall be tried."""

    def __init__(self, *, use_pending: bool = False) -> None:
        super().__init__()
        self.use_pending = use_pending


def _map(stopped: StoppedThread, symbols: Symbols, payload: int, *, executable: bool) -> int:
    size = (payload + 2 * _TEXT_OFFSET + 4095) & ~4095
    protection = _READ_WRITE_EXECUTE if executable else _READ_WRITE
    result = stopped.call(
        symbols.address["mmap"], 0, size, protection, _PRIVATE_ANONYMOUS, -1, 0, result_of=_MMAP
    )
    page = (result if result is not None else -1) & 0xFFFFFFFFFFFFFFFF
    if page > _FIRST_ERROR:
        if executable:  # PR_SET_MDWE, SELinux execmem
            raise _Moved(use_pending=True)
        raise InjectError("mmap", f"process {stopped.pid} may not map memory")
    return page


def _context(symbols: Symbols, run: int, page: int) -> bytes:
    address = symbols.address
    return struct.pack(
        "<7Q",
        address["PyGILState_Ensure"],
        run,
        address["PyGILState_Release"],
        page + _TEXT_OFFSET,
        0,
        address["pthread_self"],
        address["pthread_detach"],
    )


def _pick_thread(pid: int) -> _Candidate | None:
    """A thread that waits in a safe system call: helpers before the main thread, futex waiters last."""
    deadline = time.monotonic() + _LOOK_FOR_THREAD_S
    while True:
        found = sorted(_parked(pid), key=lambda each: _preference(pid, each))
        if found:
            return found[0]
        if time.monotonic() > deadline:
            return None
        time.sleep(0.002)


def _preference(pid: int, each: _Candidate) -> tuple[bool, bool, bool, int]:
    return each.thread == pid, each.syscall == _FUTEX, each.name.startswith("cuda-"), each.thread


def _parked(pid: int) -> Iterator[_Candidate]:
    try:
        threads = sorted(int(name) for name in os.listdir(f"/proc/{pid}/task"))
    except OSError:
        return
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/syscall") as file:
                number = file.read().split()[0]
            with open(f"/proc/{pid}/task/{thread}/comm", errors="replace") as file:
                name = file.read().strip()
        except (OSError, IndexError):
            continue
        if number.isdigit() and int(number) in SAFE_SYSCALLS:
            yield _Candidate(thread, name, int(number))


@contextlib.contextmanager
def _deferred_signals() -> Iterator[None]:
    """Keeps the terminal's signals waiting for the milliseconds in which a thread of the job is stopped."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _DEFER)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
