"""Python stacks of a running process through py-spy, with our own reasons when it fails.

Non-blocking first: the process is not stopped, it works under seccomp and beside another tracer, and a dump
torn by the running program is simply repeated. Blocking (about 10 ms pause) only after five torn ones.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from oomscope.collect.procfs import read_stat, read_status

NONBLOCKING_TRIES = 5
_TIMEOUT_S = 10.0
_MAX_FRAMES = 200
_MAX_TEXT = 200


@dataclass(frozen=True, slots=True)
class Frame:
    """One Python frame; `line` is 0 when unknown. Local variables only for frames of the program itself."""

    function: str
    file: str
    line: int
    locals: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Thread:
    """One thread, innermost frame first."""

    name: str
    system_id: int | None
    """Thread id inside the process's own pid namespace."""
    active: bool
    owns_gil: bool
    frames: tuple[Frame, ...]


@dataclass(frozen=True, slots=True)
class StackDump:
    """Stacks of a process, or why there are none; `mode` is "nonblocking" or "blocking"."""

    threads: tuple[Thread, ...]
    mode: str = ""
    tries: int = 0
    code: str = "ok"
    why: str = ""

    @property
    def ok(self) -> bool:
        return self.code == "ok"

    @property
    def main(self) -> Thread | None:
        """The thread that trains: Python's MainThread, else the first."""
        for thread in self.threads:
            if thread.name == "MainThread":
                return thread
        return self.threads[0] if self.threads else None

    def to_json(self) -> list[dict[str, Any]]:
        return [asdict(thread) for thread in self.threads]


def find_program() -> str | None:
    """py-spy of this environment, else of PATH."""
    beside = Path(sys.executable).parent / "py-spy"
    return str(beside) if beside.exists() else shutil.which("py-spy")


def dump(pid: int, *, with_locals: bool = True, allow_blocking: bool = True) -> StackDump:
    """Stacks of `pid`. Never raises: what went wrong is in `code` and `why`."""
    program = find_program()
    if program is None:
        return StackDump(
            (), code="no_py_spy", why="py-spy is not installed beside oomscope: pip install 'py-spy>=0.4.3'"
        )
    options = ["--json"] + (["--locals"] if with_locals else [])
    failure = StackDump((), code="torn", why="")
    for attempt in range(1, NONBLOCKING_TRIES + 1):
        result = _run(
            [program, "dump", "--pid", str(pid), "--nonblocking", *options], "nonblocking", attempt, pid
        )
        if result.ok:
            return result
        failure = result
        if result.code != "torn":
            return result
    if not allow_blocking:
        return failure
    result = _run([program, "dump", "--pid", str(pid), *options], "blocking", NONBLOCKING_TRIES + 1, pid)
    _resume(pid)
    return result


def _run(command: list[str], mode: str, tries: int, pid: int) -> StackDump:
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
        )
    except subprocess.TimeoutExpired:
        return StackDump((), mode, tries, "timeout", f"py-spy did not answer within {_TIMEOUT_S:.0f} s")
    except OSError as error:
        return StackDump((), mode, tries, "no_py_spy", f"py-spy cannot be started: {error}")
    if done.returncode == 0:
        try:
            return StackDump(_threads(json.loads(done.stdout)), mode, tries)
        except (ValueError, TypeError, KeyError, AttributeError):
            return StackDump((), mode, tries, "torn", "py-spy wrote something that is not a stack dump")
    code, why = explain(pid, done.stderr.decode(errors="replace"))
    return StackDump((), mode, tries, code, why)


def explain(pid: int, stderr: str) -> tuple[str, str]:
    """Our code and sentence for a failure; what /proc says goes before py-spy's own text, which misleads."""
    stat, status = read_stat(pid), read_status(pid)
    if stat is None:
        return "gone", f"process {pid} has ended"
    if stat.state in "ZX":
        return "zombie", f"process {pid} has ended; its parent {stat.parent} has not collected it (zombie)"
    text = stderr.split("Stack backtrace:")[0]
    if "Failed to find python version" in text:
        return "not_python", f"process {pid} ({stat.comm}) is not a CPython process"
    refused = any(word in text for word in ("Permission", "EPERM", "os error 13", "Operation not permitted"))
    if refused:
        uid = int((status.get("Uid") or "0").split()[0])
        if uid != os.geteuid() and os.geteuid() != 0:
            return (
                "other_user",
                f"process {pid} belongs to uid {uid}, we are uid {os.geteuid()}: run oomscope as that user",
            )
        tracer = status.get("TracerPid", "0")
        if tracer != "0":
            return "traced", f"process {pid} is already traced by process {tracer}"
        return (
            "forbidden",
            f"reading process {pid} is forbidden: in a container add the capability SYS_PTRACE "
            "(docker run --cap-add SYS_PTRACE; Kubernetes securityContext.capabilities.add)",
        )
    last = next((line.strip() for line in reversed(text.splitlines()) if line.strip()), "no reason given")
    return "torn", f"py-spy could not read the stacks: {last[:_MAX_TEXT]}"


def _threads(raw: Any) -> tuple[Thread, ...]:
    return tuple(
        Thread(
            name=str(row.get("thread_name") or ""),
            system_id=row.get("os_thread_id"),
            active=bool(row.get("active")),
            owns_gil=bool(row.get("owns_gil")),
            frames=tuple(_frame(frame) for frame in (row.get("frames") or [])[:_MAX_FRAMES]),
        )
        for row in raw
    )


def _frame(raw: Any) -> Frame:
    file = str(raw.get("filename") or "")
    values = {}
    if "site-packages" not in file and "/lib/python" not in file:
        for each in raw.get("locals") or ():
            values[str(each.get("name"))] = str(each.get("repr"))[:_MAX_TEXT]
    return Frame(str(raw.get("name") or "?"), file, int(raw.get("line") or 0), values)


def _resume(pid: int) -> None:
    """A blocking dump that fails may leave threads stopped (py-spy #390, #416, #565): let them go on.

    SIGCONT has no effect on a process that runs; it is sent only when a thread stands in T and nobody traces
    it.
    """
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return
    if read_status(pid).get("TracerPid", "0") != "0":
        return
    for thread in threads:
        stat = read_stat_of_thread(pid, int(thread))
        if stat == "T":
            with suppress(OSError):
                os.kill(pid, signal.SIGCONT)
            return


def read_stat_of_thread(pid: int, thread: int) -> str | None:
    """State letter of one thread."""
    try:
        with open(f"/proc/{pid}/task/{thread}/stat", encoding="utf-8", errors="replace") as file:
            return file.read().rsplit(")", 1)[1].split()[0]
    except (OSError, IndexError):
        return None


#: Parts of file names, innermost frame first, that show what a training thread is doing.
_PHASE_MARKS = (
    ("/torch/optim/", "optimizer"),
    ("/torch/autograd/", "backward"),
    ("/torch/serialization.py", "save"),
    ("/torch/utils/data/", "data"),
    ("/torch/nn/modules/module.py", "forward"),
)


def phase_of(thread: Thread) -> str | None:
    """The phase of training that a stack shows; None when it shows none."""
    for frame in thread.frames:
        for mark, phase in _PHASE_MARKS:
            if mark in frame.file:
                return phase
    return None


def guess_from_locals(dump: StackDump) -> dict[str, int]:
    """Numbers that training scripts keep in local variables: step, epoch, batch size. Guesses."""
    names = {
        "step": ("step", "global_step", "iteration", "iter_num", "it"),
        "epoch": ("epoch", "cur_epoch"),
        "batch_size": ("batch_size", "bs", "micro_batch_size"),
    }
    thread = dump.main
    found: dict[str, int] = {}
    for frame in thread.frames if thread is not None else ():
        for key, candidates in names.items():
            for name in candidates:
                text = frame.locals.get(name, "")
                if key not in found and text.lstrip("-").isdigit():
                    found[key] = int(text)
    return found
