"""ptrace through ctypes: stop one thread, let it call functions, and put it back exactly as it was.

Crash safety: every injected call returns into a hand-made signal frame. We stop the thread at the entry of
rt_sigreturn and restore it ourselves; if this process is killed meanwhile, the thread executes rt_sigreturn
and restores itself.

Interrupted system calls go on: at that stop we leave the original call number (or restart_syscall, which
keeps the remaining time) in orig_rax. Needs Linux 5.3 (PTRACE_GET_SYSCALL_INFO). Structures: sys/user.h,
asm/sigcontext.h of x86-64.
"""

from __future__ import annotations

import ctypes
import errno
import os
import signal
import struct
import time
from types import TracebackType

from oomscope.launch.injectors.base import InjectError
from oomscope.launch.injectors.elf import Memory

_CONT, _DETACH, _SYSCALL = 7, 17, 24
_GETREGSET, _SETREGSET, _SEIZE, _INTERRUPT = 0x4204, 0x4205, 0x4206, 0x4207
_GET_SYSCALL_INFO = 0x420E
_OPTION_SYSGOOD = 1
_NT_PRSTATUS, _NT_X86_XSTATE = 1, 0x202
_EVENT_STOP = 128
_WALL = 0x40000000
_INFO_ENTRY, _INFO_EXIT = 1, 2

_NR_RT_SIGRETURN, _NR_RESTART_SYSCALL, _NR_TGKILL = 15, 219, 234
_NO_SYSCALL = 0xFFFFFFFFFFFFFFFF
#: -ERESTARTSYS, -ERESTARTNOINTR, -ERESTARTNOHAND: the kernel would repeat the call itself.
_RESTART_SAME = (-512, -513, -514)
#: -ERESTART_RESTARTBLOCK: to be continued with what is left of its time.
_RESTART_BLOCK = -516

_NAMES = (
    "r15 r14 r13 r12 rbp rbx r11 r10 r9 r8 rax rcx rdx rsi rdi "
    "orig_rax rip cs eflags rsp ss fs_base gs_base ds es fs gs"
)
REGISTERS = tuple(_NAMES.split())
_ARGUMENTS = ("rdi", "rsi", "rdx", "rcx", "r8", "r9")
_DIRECTION_FLAG = 0x400
_RED_ZONE = 128
_STOP_TIMEOUT_S = 5.0
_SPIN_S = 0.001

#: Order of the general registers in struct sigcontext.
_FRAME_ORDER = (
    "r8", "r9", "r10", "r11", "r12", "r13", "r14", "r15", "rdi", "rsi", "rbp", "rbx", "rdx", "rax",
    "rcx", "rsp", "rip", "eflags",
)  # fmt: skip
_UC_FLAGS = 7  # FP_XSTATE | SIGCONTEXT_SS | STRICT_RESTORE_SS
_XSTATE_MAGIC1, _XSTATE_MAGIC2 = 0x46505853, 0x46505845
_SW_RESERVED = 464  # software bytes of the FXSAVE area, where the kernel looks for the magic

_libc = ctypes.CDLL(None, use_errno=True)
_libc.ptrace.restype = ctypes.c_long
_libc.ptrace.argtypes = [ctypes.c_long, ctypes.c_long, ctypes.c_void_p, ctypes.c_void_p]


class _IoVec(ctypes.Structure):
    _fields_ = [("base", ctypes.c_void_p), ("length", ctypes.c_size_t)]


def _ptrace(request: int, thread: int, address: int = 0, data: int = 0) -> int:
    ctypes.set_errno(0)
    result = int(_libc.ptrace(request, thread, address, data))
    if result == -1 and (number := ctypes.get_errno()):
        raise OSError(number, os.strerror(number))
    return result


def _register_set(request: int, thread: int, kind: int, buffer: ctypes.Array[ctypes.c_char]) -> int:
    """Bytes read or written."""
    vector = _IoVec(ctypes.cast(buffer, ctypes.c_void_p), len(buffer))
    _ptrace(request, thread, kind, ctypes.addressof(vector))
    return int(vector.length)


def _signed(value: int) -> int:
    return value - (1 << 64) if value >> 63 else value


class StoppedThread:
    """One thread held still; a context manager whose end lets it go on as if nothing had happened.

    Raises:
        InjectError: it cannot be stopped.
    """

    def __init__(self, pid: int, thread: int, restore_rt: int, memory: Memory) -> None:
        self.pid, self.thread = pid, thread
        self.signals: list[int] = []
        self.stopped_us = 0.0
        self._restore_rt, self._memory = restore_rt, memory
        self._at_sigreturn = False
        self._restores_itself = False
        self._started = 0.0

    def __enter__(self) -> StoppedThread:
        try:
            _ptrace(_SEIZE, self.thread, 0, _OPTION_SYSGOOD)
        except PermissionError as error:
            raise InjectError(
                "seccomp",
                "ptrace was refused although the memory of the process can be read: a seccomp profile of "
                "the container "
                "runtime, Yama or another security module blocks it",
                hint="docker run --cap-add SYS_PTRACE; Kubernetes: securityContext.capabilities.add: "
                "[SYS_PTRACE]",
                may_try_another=True,
            ) from error
        self._started = time.perf_counter()
        try:
            _ptrace(_INTERRUPT, self.thread)
            self._wait_until_stopped()
            self._save()
        except BaseException:
            self._detach()
            raise
        return self

    @property
    def syscall(self) -> int:
        """Number of the system call the thread stands in; none is 2**64 - 1."""
        return int(self._registers["orig_rax"])

    def _save(self) -> None:
        registers = ctypes.create_string_buffer(8 * len(REGISTERS))
        _register_set(_GETREGSET, self.thread, _NT_PRSTATUS, registers)
        self._registers = dict(
            zip(REGISTERS, struct.unpack(f"<{len(REGISTERS)}Q", registers.raw), strict=True)
        )
        area = ctypes.create_string_buffer(32768)
        size = _register_set(_GETREGSET, self.thread, _NT_X86_XSTATE, area)
        self._xstate = ctypes.create_string_buffer(area.raw[:size], size)
        with open(f"/proc/{self.pid}/task/{self.thread}/status", encoding="utf-8", errors="replace") as file:
            blocked = next(line.split()[1] for line in file if line.startswith("SigBlk"))
        self._blocked = int(blocked, 16)

    def _wait(self) -> int:
        started = time.monotonic()
        while True:
            pid, status = os.waitpid(self.thread, _WALL | os.WNOHANG)
            if pid:
                return int(status)
            waited = time.monotonic() - started
            if waited < _SPIN_S:
                os.sched_yield()  # on a busy machine a sleep costs a whole turn of the others
                continue
            if waited > _STOP_TIMEOUT_S:
                raise InjectError(
                    "timeout", f"thread {self.thread} did not stop within {_STOP_TIMEOUT_S:.0f} s"
                )
            time.sleep(0.00005)

    def _wait_until_stopped(self) -> None:
        while True:
            status = self._wait()
            if not os.WIFSTOPPED(status):
                raise InjectError("gone", f"process {self.pid} ended while it was attached to")
            if status >> 16 == _EVENT_STOP:
                return
            self.signals.append(os.WSTOPSIG(status))
            _ptrace(_CONT, self.thread)

    def call(self, function: int, *arguments: int, result_of: int | None = None) -> int | None:
        """Lets the thread call `function`.

        The function's own result is lost in the return from the frame; `result_of` names a system call it
        makes, whose result is returned.
        """
        stack = self._prepare(function, arguments)
        self._at_sigreturn = False
        return self._run_to_sigreturn(stack, result_of)

    def finish_with(self, function: int, *arguments: int) -> None:
        """Lets the thread go; it calls `function`, returns into the signal frame and restores itself.

        Saves the dozen stops of following the call. A wait whose remaining time only the kernel knows cannot be
        continued in this way, so such a thread is followed to its end.
        """
        if _signed(self._registers["rax"]) == _RESTART_BLOCK and self._registers["orig_rax"] < 1 << 63:
            self.call(function, *arguments)
            return
        self._prepare(function, arguments)
        self._restores_itself = True

    def _prepare(self, function: int, arguments: tuple[int, ...]) -> int:
        """Writes the frame and sets the registers for a call; the address of the frame."""
        size = len(self._xstate) + 1024
        stack = ((self._registers["rsp"] - _RED_ZONE - size) & ~0xF) - 8
        head, place, extended = self._frame(stack)
        self._memory.write(place, extended)
        self._memory.write(stack, head)
        registers = dict(self._registers)
        registers.update(rip=function, rsp=stack, rax=0, orig_rax=_NO_SYSCALL)
        registers["eflags"] &= ~_DIRECTION_FLAG
        for name, value in zip(_ARGUMENTS, arguments, strict=False):
            registers[name] = value & _NO_SYSCALL
        self._set_registers(registers)
        return int(stack)

    def _run_to_sigreturn(self, stack: int, result_of: int | None) -> int | None:
        info = ctypes.create_string_buffer(96)
        last: int | None = None
        result: int | None = None
        while True:
            _ptrace(_SYSCALL, self.thread)
            status = self._wait()
            if not os.WIFSTOPPED(status):
                raise InjectError(
                    "died", f"process {self.pid} ended during the injected call (status {status:#x})"
                )
            number = os.WSTOPSIG(status)
            if status >> 16 == _EVENT_STOP:
                continue
            if number == signal.SIGTRAP | 0x80:
                _ptrace(_GET_SYSCALL_INFO, self.thread, len(info), ctypes.addressof(info))
                kind = info.raw[0]
                (pointer,) = struct.unpack_from("<Q", info.raw, 16)
                if kind == _INFO_ENTRY:
                    (last,) = struct.unpack_from("<Q", info.raw, 24)
                    if last == _NR_RT_SIGRETURN and pointer == stack + 8:
                        self._at_sigreturn = True
                        return result
                elif kind == _INFO_EXIT and last == result_of:
                    (result,) = struct.unpack_from("<q", info.raw, 24)
            elif number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGILL):
                raise InjectError("fault", f"signal {number} in the injected call")
            else:
                self.signals.append(number)

    def _frame(self, stack: int) -> tuple[bytes, int, bytes]:
        """An rt_sigframe at `stack`: its head, then address and content of the extended state."""
        registers = dict(self._registers)
        result = _signed(registers["rax"])
        if registers["orig_rax"] < 1 << 63 and (result in _RESTART_SAME or result == _RESTART_BLOCK):
            registers["rip"] -= 2  # back onto the `syscall` instruction
            registers["rax"] = _NR_RESTART_SYSCALL if result == _RESTART_BLOCK else registers["orig_rax"]
        size = len(self._xstate)
        place = (stack + 8 + 304 + 63) & ~63
        extended = bytearray(self._xstate.raw)
        (features,) = struct.unpack_from("<Q", extended, _SW_RESERVED)  # here ptrace tells XCR0
        struct.pack_into("<IIQI", extended, _SW_RESERVED, _XSTATE_MAGIC1, size + 4, features, size)
        context = struct.pack(
            "<18Q4H4QQ8Q",
            *(registers[name] for name in _FRAME_ORDER),
            registers["cs"], 0, 0, registers["ss"],
            0, 0, 0, 0, place,
            *([0] * 8),
        )  # fmt: skip
        # ss_flags 0xff is invalid, so that the alternate signal stack stays as it is.
        head = (
            struct.pack("<QQQiiQ", _UC_FLAGS, 0, 0, 0xFF, 0, 0) + context + struct.pack("<Q", self._blocked)
        )
        return (
            struct.pack("<Q", self._restore_rt) + head,
            place,
            bytes(extended) + struct.pack("<I", _XSTATE_MAGIC2),
        )

    def _set_registers(self, registers: dict[str, int]) -> None:
        raw = struct.pack(f"<{len(REGISTERS)}Q", *(registers[name] for name in REGISTERS))
        _register_set(_SETREGSET, self.thread, _NT_PRSTATUS, ctypes.create_string_buffer(raw, len(raw)))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if not self._restores_itself:
            self._restore()
        self._detach()
        self.stopped_us = 1e6 * (time.perf_counter() - self._started)
        for number in self.signals:
            _libc.syscall(_NR_TGKILL, self.pid, self.thread, number)

    def _restore(self) -> None:
        registers = dict(self._registers)
        if self._at_sigreturn:
            # We hold the entry of a system call: what stands in orig_rax now is executed at once.
            result = _signed(registers["rax"])
            inside = registers["orig_rax"] < 1 << 63
            if inside and result == _RESTART_BLOCK:
                registers["orig_rax"] = _NR_RESTART_SYSCALL
            elif not (inside and result in _RESTART_SAME):
                registers["orig_rax"] = _NO_SYSCALL
        try:
            _register_set(_SETREGSET, self.thread, _NT_X86_XSTATE, self._xstate)
            self._set_registers(registers)
        except OSError as failure:
            if failure.errno != errno.ESRCH:
                raise

    def _detach(self) -> None:
        try:
            _ptrace(_DETACH, self.thread)
        except OSError as error:
            if error.errno != errno.ESRCH:
                raise
