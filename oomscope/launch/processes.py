"""Starting the job's processes, ending them, and finding the ones that were left behind."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, Literal

from oomscope.errors import LaunchFailed
from oomscope.protocol import env as variables

Output = Literal["files", "through", "tee"]

#: prctl(2): orphans of the job become children of this process instead of init's.
_PR_SET_CHILD_SUBREAPER = 36


class LaunchedProcess:
    """One child in a session of its own, so that a Ctrl-C in the terminal reaches it only through us.

    Args:
        output: `through`: our own streams; `files`: two log files, and nothing to read; `tee`: log files, and both
            streams on our stderr.
        logs: (stdout, stderr) paths for `files` and `tee`.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        cwd: Path,
        env: Mapping[str, str],
        output: Output,
        logs: tuple[Path, Path] | None = None,
    ) -> None:
        """Start it.

        Raises:
            LaunchFailed: the program cannot be started.
        """
        self._pumps: list[threading.Thread] = []
        with contextlib.ExitStack() as stack:
            streams: tuple[IO[bytes] | int | None, IO[bytes] | int | None] = (None, None)
            if output != "through" and logs is not None:
                files = tuple(stack.enter_context(_log(path)) for path in logs)
                streams = (subprocess.PIPE, subprocess.PIPE) if output == "tee" else (files[0], files[1])
            try:
                self.process = subprocess.Popen(
                    list(command),
                    cwd=cwd,
                    env=dict(env),
                    stdin=subprocess.DEVNULL if output == "files" else None,
                    stdout=streams[0],
                    stderr=streams[1],
                    start_new_session=True,
                )
            except OSError as error:
                raise LaunchFailed(f"cannot start {command[0]}: {error.strerror}") from error
        if output == "tee" and logs is not None:
            for source, path in zip((self.process.stdout, self.process.stderr), logs, strict=True):
                pump = threading.Thread(target=_pump, args=(source, path), daemon=True)
                pump.start()
                self._pumps.append(pump)

    @property
    def pid(self) -> int:
        return self.process.pid

    def poll(self) -> int | None:
        """Return code as `subprocess` gives it (negative for a signal); None while it runs."""
        return self.process.poll()

    def send(self, number: int) -> None:
        """Send a signal to the process itself, not to its group: a launcher decides what its ranks get."""
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(number)

    def finish(self) -> None:
        """After it ended: wait for the last of its output.

        A grandchild that holds the pipe does not keep us.
        """
        for pump in self._pumps:
            pump.join(timeout=1.0)


def _log(path: Path) -> IO[bytes]:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    return open(descriptor, "wb", buffering=0)


def _pump(source: IO[bytes] | None, path: Path) -> None:
    if source is None:
        return
    target = sys.stderr.fileno()
    with source, _log(path) as log:
        while data := os.read(source.fileno(), 1 << 16):
            with contextlib.suppress(OSError):
                log.write(data)
            with contextlib.suppress(OSError):
                os.write(target, data)


def become_subreaper() -> None:
    """Adopt orphans of the job, so that they can be found and ended.

    Linux only; elsewhere nothing happens.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def marked_processes(attempt_dir: Path) -> list[int]:
    """Processes whose environment carries this attempt's mark, without ourselves. Only these are ever killed.

    Costs under a millisecond for a few hundred processes; processes of other users cannot be read and are
    left out.
    """
    mark = f"{variables.ATTEMPT}={attempt_dir}\0".encode()
    found = []
    for name in os.listdir("/proc") if os.path.isdir("/proc") else []:
        if not name.isdigit() or int(name) == os.getpid():
            continue
        try:
            with open(f"/proc/{name}/environ", "rb") as stream:
                if mark in stream.read() + b"\0":
                    found.append(int(name))
        except OSError:
            continue
    return found


def isolated_pythons(attempt_dir: Path) -> list[int]:
    """Python processes of this attempt that were told to ignore PYTHONPATH, and so never load the agent."""
    found = []
    for pid in marked_processes(attempt_dir):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as stream:
                program, *rest = stream.read().decode(errors="replace").split("\0")
        except OSError:
            continue
        options = itertools.takewhile(
            lambda word: word.startswith("-") and not word.startswith(("-c", "-m")), rest
        )
        if os.path.basename(program).startswith("python") and any(
            set("IES") & set(word[1:]) for word in options
        ):
            found.append(pid)
    return found


def end_leftovers(attempt_dir: Path, *, grace_s: float = 3.0) -> list[int]:
    """End what the job left behind: a moment to leave by itself, then SIGKILL.

    Returns the pids that were killed.
    """
    until = time.monotonic() + grace_s
    left = marked_processes(attempt_dir)
    while left and time.monotonic() < until:
        time.sleep(0.05)
        _reap(left)
        left = marked_processes(attempt_dir)
    for pid in left:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
    until = time.monotonic() + 2.0
    while left and time.monotonic() < until and marked_processes(attempt_dir):
        time.sleep(0.02)
        _reap(left)
    return left


def kill_marked(attempt_dir: Path) -> None:
    """SIGKILL to every process of this attempt."""
    for pid in marked_processes(attempt_dir):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)


def _reap(pids: Sequence[int]) -> None:
    """Collect orphans that were handed to us; never anybody else's children."""
    for pid in pids:
        with contextlib.suppress(ChildProcessError, OSError):
            os.waitpid(pid, os.WNOHANG)
