"""Keeps one collector child alive and says in which state it is, without ever waiting for it.

A call into a hung GPU driver leaves the child in the uninterruptible state D, where even SIGKILL does not end
it. So a silent child is reported as stale, killed, and *not* joined; a new one is started after a growing
pause.
"""

from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field

from oomscope.collect.base import PERIOD_S, Record, State, Tier
from oomscope.collect.procfs import read_stat, read_text

#: Periods of silence after which the values are called old, and after which the child is given up.
_STALE_PERIODS, _DEAD_PERIODS = 3, 10
_MIN_STALE_S = 2.0
MAX_RESTARTS = 5
#: The job comes first, also on the processors.
NICENESS = 10
_MAX_LINE = 4 << 20


@dataclass(slots=True)
class Status:
    """Where a collector stands; `why` is a sentence for a person."""

    state: State = State.STARTING
    code: str = ""
    why: str = ""
    last_ns: int = 0
    """UTC epoch ns of the newest record; 0 before the first."""
    restarts: int = 0
    devices: list[Record] = field(default_factory=list)
    driver: str | None = None


class SupervisedCollector:
    """One collector in a child process. Call `poll` often; it never blocks.

    Args:
        name: of the registry.
        period_s: of the fast tier.
        environ: of the child; the current one by default.
        command: instead of our own child program, for tests.
    """

    def __init__(
        self,
        name: str,
        period_s: float = PERIOD_S[Tier.FAST],
        *,
        environ: Mapping[str, str] | None = None,
        command: Sequence[str] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.name = name
        self.status = Status()
        self._command = list(
            command or [sys.executable, "-m", "oomscope.collect.child", name, "--period", str(period_s)]
        )
        self._environ = dict(os.environ if environ is None else environ)
        self._stale_s = max(_MIN_STALE_S, _STALE_PERIODS * period_s)
        self._dead_s = max(2 * self._stale_s, _DEAD_PERIODS * period_s)
        self._clock = clock
        self._child: subprocess.Popen[bytes] | None = None
        self._abandoned: list[subprocess.Popen[bytes]] = []
        self._buffer = b""
        self._heard = 0.0
        self._not_before = 0.0
        self._watched: list[int] = []

    def poll(self) -> list[Record]:
        """New records since the last call; starts, watches and restarts the child."""
        if self.status.state in (State.UNAVAILABLE, State.FAILED):
            return []
        now = self._clock()
        if self._child is None:
            if now >= self._not_before:
                self._start(now)
            return [self.state_record()] if self._child is None and self.status.code == "start" else []
        before = self.status.state
        records = self._read(now)
        if self._child is not None and self._child.poll() is not None:
            records += self._read(now)
            self._ended(now)
        elif now - self._heard > self._stale_s:
            self._silent(now)
        if self.status.state is not before:
            records.append(self.state_record())
        return records

    def state_record(self) -> Record:
        status = self.status
        return {
            "t": time.time_ns(),
            "k": "collector",
            "name": self.name,
            "state": status.state.value,
            "code": status.code,
            "why": status.why,
        }

    def watch(self, pids: Iterable[int]) -> None:
        """Tells the child which processes matter."""
        self._watched = sorted(set(pids))
        self._send_watch()

    def close(self) -> None:
        """Ends the child: closes its stdin, then kills it after a moment. Does not wait for a hung one."""
        child, self._child = self._child, None
        for each in self._abandoned:
            each.poll()
        if child is None:
            return
        _close_pipes(child)
        try:
            child.wait(0.5)
        except subprocess.TimeoutExpired:
            self._kill(child)
            with suppress(subprocess.TimeoutExpired):
                child.wait(0.2)

    def _start(self, now: float) -> None:
        try:
            self._child = subprocess.Popen(
                self._command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=self._environ,
                start_new_session=True,
            )
        except OSError as error:
            self._set(State.FAILED, "start", f"the {self.name} collector cannot be started: {error}")
            return
        _make_way(self._child.pid)
        assert self._child.stdout is not None
        descriptor = self._child.stdout.fileno()
        fcntl.fcntl(descriptor, fcntl.F_SETFL, fcntl.fcntl(descriptor, fcntl.F_GETFL) | os.O_NONBLOCK)
        self._buffer = b""
        # Starting an interpreter on a loaded machine takes longer than one sample does.
        self._heard = now + 5.0
        self._send_watch()

    def _send_watch(self) -> None:
        if self._child is None or self._child.stdin is None or not self._watched:
            return
        with suppress(OSError):
            self._child.stdin.write(json.dumps({"watch": self._watched}).encode() + b"\n")
            self._child.stdin.flush()

    def _read(self, now: float) -> list[Record]:
        assert self._child is not None
        assert self._child.stdout is not None
        records: list[Record] = []
        while True:
            try:
                chunk = os.read(self._child.stdout.fileno(), 1 << 16)
            except BlockingIOError:
                break
            if not chunk:
                break
            *lines, self._buffer = (self._buffer + chunk).split(b"\n")
            if len(self._buffer) > _MAX_LINE:
                self._buffer = b""
            for line in lines:
                record = _parse(line)
                if record is not None and self._accept(record, now):
                    records.append(record)
        return records

    def _accept(self, record: Record, now: float) -> bool:
        """Updates the status; False for records that end here."""
        kind = record["k"]
        self._heard = max(self._heard, now) if self.status.state is State.STARTING else now
        self.status.last_ns = time.time_ns()
        if kind == "collector" and record.get("name") == self.name:
            self._set(
                State(record.get("state", "failed")), str(record.get("code", "")), str(record.get("why", ""))
            )
            return False
        if kind == "devices":
            self.status.devices = list(record.get("devices", []))
            self.status.driver = record.get("driver")
        if kind == "tick":
            self._heard = now
            self._set(State.OK)
            return False
        return True

    def _silent(self, now: float) -> None:
        assert self._child is not None
        self._set(State.STALE, "silent", _why_silent(self.name, self._child.pid))
        if now - self._heard > self._dead_s:
            self._kill(self._child)
            self._again(now, "silent", self.status.why)

    def _ended(self, now: float) -> None:
        child, self._child = self._child, None
        assert child is not None
        _close_pipes(child)
        if self.status.state is State.UNAVAILABLE:
            return
        code = child.returncode
        how = f"signal {-code}" if code < 0 else f"exit code {code}"
        self._again(now, "crashed", f"the {self.name} collector ended with {how}")

    def _again(self, now: float, code: str, why: str) -> None:
        self._child = None
        self.status.restarts += 1
        if self.status.restarts > MAX_RESTARTS:
            self._set(State.FAILED, code, f"{why}; given up after {MAX_RESTARTS} restarts")
            return
        self._set(State.STALE, code, f"{why}; it is started again")
        self._not_before = now + min(30.0, 0.5 * 2**self.status.restarts)

    def _kill(self, child: subprocess.Popen[bytes]) -> None:
        _close_pipes(child)
        with suppress(ProcessLookupError):
            child.kill()
        # Kept so that its pid is not reaped into a warning; a process in state D may never end.
        self._abandoned = [each for each in self._abandoned if each.poll() is None] + [child]

    def _set(self, state: State, code: str = "", why: str = "") -> None:
        self.status.state, self.status.code, self.status.why = state, code, why


def _close_pipes(child: subprocess.Popen[bytes]) -> None:
    for pipe in (child.stdin, child.stdout):
        with suppress(OSError):
            if pipe is not None:
                pipe.close()


def _parse(line: bytes) -> Record | None:
    try:
        record = json.loads(line)
    except ValueError:
        return None
    return record if isinstance(record, dict) and isinstance(record.get("k"), str) else None


def _make_way(pid: int) -> None:
    """Put a new child behind the job on the processors, before it has imported anything.

    Nice values keep it behind in the long run; the batch policy keeps it from interrupting a thread that runs, which is
    what the start of an interpreter would do many times.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, pid, max(NICENESS, os.getpriority(os.PRIO_PROCESS, 0)))
    if hasattr(os, "SCHED_BATCH"):
        with suppress(OSError):
            os.sched_setscheduler(pid, os.SCHED_BATCH, os.sched_param(0))


def _why_silent(name: str, pid: int) -> str:
    """What the silent child is doing, as far as /proc tells."""
    stat = read_stat(pid)
    state = stat.state if stat is not None else "gone"
    text = f"the {name} collector (pid {pid}) does not answer; its state is {state}"
    wait = (read_text(f"/proc/{pid}/wchan") or "").strip()
    if wait not in ("", "0"):
        text += f", waiting in the kernel function {wait}"
    if state == "D":
        text += ": the GPU driver hangs; look for Xid in the kernel log"
    return text
