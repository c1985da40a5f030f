"""The last injector: gdb queues a pending call. Stops the whole process for 0.5 to 2 s; any architecture.

Without breakpoints: what breaks out of memray's attach (`int3` left in the job when the debugger dies) cannot
happen here.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path

from oomscope.launch.injectors.base import InjectError, Report

_TIMEOUT_S = 60.0


class GdbInjector:
    """See the module."""

    name = "gdb"

    def unavailable(self, pid: int) -> str | None:
        if shutil.which("gdb") is None:
            return "gdb is not installed"
        if not os.path.exists(f"/proc/{pid}"):
            return f"there is no process {pid}"
        return None

    def run(self, pid: int, source: str) -> Report:
        with tempfile.NamedTemporaryFile(prefix="oomscope-", suffix=".py") as file:
            payload = source.encode() + b"\0"
            file.write(payload)
            file.flush()
            command = _command(pid, Path(file.name), len(payload))
            try:
                done = subprocess.run(
                    command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
                )
            except subprocess.TimeoutExpired as error:
                raise InjectError(
                    "gdb", f"gdb did not finish with process {pid} within {_TIMEOUT_S:.0f} s"
                ) from error
            except OSError as error:
                raise InjectError("gdb", f"gdb cannot be started: {error}") from error
        output = done.stdout.decode(errors="replace") + done.stderr.decode(errors="replace")
        if not re.search(r"^oomscope=0$", output, re.MULTILINE):
            raise InjectError("gdb", f"it could not queue the call: {_reason(output)}", may_try_another=True)
        return Report(self.name, "queued", detail="runs when the main thread executes Python bytecode")


def _command(pid: int, text: Path, size: int) -> list[str]:
    rounded = (size + 4095) & ~4095
    steps = [
        r"sharedlibrary libc\.so",
        r"sharedlibrary libpython",
        # Other threads must run, or a lock that one of them holds is never released.
        "set scheduler-locking off",
        f"set $page = ((void *(*)(void *, unsigned long, int, int, int, long)) mmap)(0, {rounded}, 3, 0x22, "
        "-1, 0)",
        f"restore {text} binary $page",
        "set $queue = (int (*)(void *, void *)) Py_AddPendingCall",
        r'printf "oomscope=%d\n", $queue((void *) &PyRun_SimpleString, $page)',
        "detach",
    ]
    command = ["gdb", "-batch", "-nx", "-iex", "set auto-solib-add off", "-iex", "set debuginfod enabled off"]
    command += ["-p", str(pid)]
    for step in steps:
        command += ["-ex", step]
    return command


def _reason(output: str) -> str:
    wanted = ("ptrace", "not permitted", "No symbol", "Cannot", "error")
    lines = [line.strip() for line in output.splitlines() if any(word in line for word in wanted)]
    return (lines or output.strip().splitlines() or ["no reason given"])[-1][:200]
