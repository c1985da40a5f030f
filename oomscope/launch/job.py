"""One launch of the job, from the command line to result.json."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

from oomscope.launch import boot
from oomscope.launch.command import is_one_script, is_torchrun
from oomscope.launch.host_watch import host_readings
from oomscope.launch.nodes.link import NodeLink
from oomscope.launch.outcome import JobResult, OomFact, RankResult, read_outcome
from oomscope.launch.processes import (
    LaunchedProcess,
    Output,
    end_leftovers,
    isolated_pythons,
    kill_marked,
)
from oomscope.launch.simulated import (
    SimulatedRanks,
    describe,
    simulated_ranks,
    wanted_ranks,
    without_torchrun,
)
from oomscope.launch.terminations import tell_terminations
from oomscope.protocol import layout
from oomscope.protocol.records import PROTOCOL_VERSION
from oomscope.simulate.cards import Card
from oomscope.store import library
from oomscope.store.session import ProcessMark, Session
from oomscope.store.tail import record_files

__all__ = ["JobControl", "JobResult", "JobSpec", "OomFact", "RankResult", "run_job"]

#: Default of the allocation history: python stacks cost little, and the ring is bounded.
HISTORY = {"max_entries": 100_000, "stacks": "python"}

#: Seconds between two looks at the child, and how long a polite end may take before the next signal.
_POLL_S = 0.05
_PEER_GRACE_S = 5.0
#: After so many seconds without a sign of the agent, the session says so: importing torch takes a few.
_AGENT_PATIENCE_S = 30.0


@dataclass(frozen=True)
class JobSpec:
    """What to launch, and how."""

    command: tuple[str, ...]
    cwd: Path
    env: Mapping[str, str]
    device: Card | None
    plan: dict[str, Any]
    steps: int | None
    detail: bool
    role: str
    """"attempt" or "prediction"."""
    attempt_dir: Path
    output: Output = "files"
    ranks: tuple[int, ...] | None = None
    """Simulated ranks to run; None: the first and the last, and those they wait for."""
    history: bool = True
    """Record torch's allocation history."""
    capacity_bytes: int | None = None
    """Replaces the card's own capacity, for predictions of smaller or larger cards."""


@dataclass
class JobControl:
    """A handle by which somebody else ends a running job.

    The signal handler, a viewer's request, a budget.
    """

    level: int = 0
    """0 leave it alone, 1 SIGINT was asked for, 2 SIGTERM, 3 SIGKILL."""
    reason: str = ""

    def stop(self, reason: str = "stop") -> None:
        """Ask politely: SIGINT."""
        self.level, self.reason = max(self.level, 1), reason

    def terminate(self, reason: str = "terminate") -> None:
        self.level, self.reason = max(self.level, 2), reason

    def kill(self, reason: str = "kill") -> None:
        """SIGKILL to every process of the job."""
        self.level, self.reason = 3, reason

    def escalate(self, reason: str) -> None:
        """One level more than before: what each Ctrl-C does."""
        self.level, self.reason = min(self.level + 1, 3), reason


def run_job(
    spec: JobSpec,
    *,
    session: Session,
    on_poll: Callable[[], None] | None = None,
    timeout_s: float | None = None,
    control: JobControl | None = None,
) -> JobResult:
    """Launch, wait, clean up, and write result.json into `spec.attempt_dir`.

    While it runs, SIGINT, SIGTERM and SIGHUP that reach this process go on to the job (main thread only): the
    first SIGINT is forwarded, the second becomes SIGTERM, the third SIGKILL.

    Args:
        spec: what to launch.
        session: where the attempt belongs; its state is updated with the launcher's pid.
        on_poll: called about twenty times a second while the job runs.
        timeout_s: end the job after so many seconds.
        control: lets the caller end the job.

    Raises:
        LaunchFailed: the program cannot be started.
        SetupError: the attempt's folder cannot be written.
        UsageError: a simulated job whose number of ranks is not a number.
    """
    control = control or JobControl()
    run = _Run(spec, session, control)
    started = time.monotonic()
    try:
        real = spec.role == "attempt" and spec.device is None
        with _signals(control), host_readings(spec.attempt_dir, wanted=real) as look:
            run.start()
            while not run.poll():
                look()
                if on_poll is not None:
                    on_poll()
                if timeout_s is not None and time.monotonic() - started > timeout_s:
                    run.time_out(timeout_s)
                time.sleep(_POLL_S)
    finally:
        run.clean_up()
    result = read_outcome(
        spec.attempt_dir,
        exit_code=run.exit_code,
        duration_s=time.monotonic() - started,
        timed_out=run.timed_out,
        node=run.node,
    )
    _write_result(spec.attempt_dir, result)
    return result


class _Run:
    """The processes of one launch: one launcher, or one plain process per simulated rank."""

    def __init__(self, spec: JobSpec, session: Session, control: JobControl) -> None:
        self.spec = spec
        self.session = session
        self.control = control
        self.processes: list[LaunchedProcess] = []
        self.timed_out = False
        self._codes: dict[int, int] = {}
        self._first_code: int | None = None
        self._sent = 0
        self._deadline: float | None = None
        self._reason = ""
        self._rundir = ""
        self._link: NodeLink | None = None
        self._started = time.monotonic()
        self._looked = False
        self._ranks: SimulatedRanks | None = None
        self._base: dict[str, str] = {}
        self._started_ranks: set[int] = set()

    def start(self) -> None:
        spec = self.spec
        ranks = self._ranks = simulated_ranks(spec.command, spec.ranks) if spec.device is not None else None
        label = spec.attempt_dir.name
        self._rundir = layout.rundir(self.session.id, f"{label}-{os.getpid():x}")
        config = self._config(ranks)
        folder = boot.write_boot(spec.attempt_dir, config)
        if spec.role == "attempt" and spec.device is None:
            self._link = NodeLink(spec.attempt_dir, self._rundir, self.session.path, self._say).start()
        base = boot.job_environment(spec.env, folder, session=self.session.path, attempt_dir=spec.attempt_dir)
        self._base = base
        if ranks is None:
            self._launch(spec.command, base | self._launcher_environment(base), None)
        else:
            self._start_ranks(ranks, ranks.chosen)
        if spec.role == "attempt":
            with contextlib.suppress(OSError):  # a full disk must not end a job that has just started
                self.session.set_state("running", launcher=ProcessMark.of(self.processes[0].pid))
                library.prune(self.session.path.parents[1])

    def poll(self) -> bool:
        """Collect exit codes, pass signals on; True when every process has ended."""
        for process in self.processes:
            code = process.poll()
            if code is None or process.pid in self._codes:
                continue
            self._codes[process.pid] = code
            if self._first_code is None or (self._first_code == 0 and code != 0):
                self._first_code = code
            if code != 0 and len(self.processes) > 1 and self.control.level == 0:
                self._end(f"another rank ended with code {code}")
        if len(self._codes) == len(self.processes):
            return True
        if self._ranks is not None and self._sent == 0 and self._deadline is None:
            self._start_ranks(self._ranks, wanted_ranks(self.spec.attempt_dir))
        self._pass_on()
        self._look_for_agent()
        return False

    def _start_ranks(self, ranks: SimulatedRanks, chosen: Iterable[int]) -> None:
        """One process for each of `chosen` that does not run yet."""
        command = without_torchrun(self.spec.command)
        for rank in sorted(set(chosen) - self._started_ranks):
            if 0 <= rank < ranks.world_size:
                self._started_ranks.add(rank)
                self._launch(command, self._base | ranks.environment(rank), rank)

    def _look_for_agent(self) -> None:
        """Once, after a while: say so when no process of the job has reported, and why that may be."""
        if self._looked or time.monotonic() - self._started < _AGENT_PATIENCE_S:
            return
        self._looked = True
        if record_files(self.spec.attempt_dir):
            return
        text = "no process of the job has loaded the agent yet"
        isolated = isolated_pythons(self.spec.attempt_dir)
        if isolated:
            text += f": pid {isolated[0]} was started with -I, -E or -S"
        self._say(text)

    def _say(self, text: str) -> None:
        self.session.append_supervisor({"k": "note", "text": text})

    def time_out(self, seconds: float) -> None:
        if not self.timed_out:
            self.timed_out = True
            self._end(f"it ran longer than {seconds:g} s")

    @property
    def exit_code(self) -> int:
        """As `subprocess` gives it: of the first process that failed, else 0."""
        return self._first_code or 0

    @property
    def node(self) -> int | None:
        """Number of this node in a job that has others; None in a job of one node."""
        link = self._link
        return link.node if link is not None and (link.is_hub or link.is_member) else None

    def clean_up(self) -> None:
        """End what is left, wait for the last output, remove the sockets."""
        if len(self._codes) < len(self.processes):  # we are leaving by an exception
            kill_marked(self.spec.attempt_dir)
            for process in self.processes:
                process.send(signal.SIGKILL)
        killed = end_leftovers(self.spec.attempt_dir)
        if killed:
            self.session.append_supervisor({"k": "orphans", "pids": killed})
        for process in self.processes:
            process.finish()
        tell_terminations(self.spec.attempt_dir)
        if self._link is not None:
            self._link.finish(self.exit_code)
        if self._rundir:
            shutil.rmtree(self._rundir, ignore_errors=True)

    def _end(self, reason: str) -> None:
        """End the job for a reason of our own: SIGTERM, and SIGKILL after a while."""
        if self._deadline is None:
            self._deadline = time.monotonic() + _PEER_GRACE_S
            self._reason = reason

    def _pass_on(self) -> None:
        level, reason = self.control.level, self.control.reason
        if self._deadline is not None and level < 3:
            # Our own wish to end it stays ours: the caller may use its handle again for the next attempt.
            level, reason = (3 if time.monotonic() > self._deadline else max(level, 2)), self._reason
        if level <= self._sent:
            return
        self._sent = level
        number = {1: signal.SIGINT, 2: signal.SIGTERM, 3: signal.SIGKILL}[level]
        self.session.append_supervisor({"k": "signal", "signal": number.name, "text": reason})
        if level == 3:
            kill_marked(self.spec.attempt_dir)
        for process in self.processes:
            if process.pid not in self._codes:
                process.send(number)

    def _launch(self, command: Sequence[str], env: Mapping[str, str], rank: int | None) -> None:
        spec = self.spec
        output: Output = spec.output
        if rank is not None and self.processes and output != "files":
            output = "files"  # the first simulated rank speaks for all of them
        logs = spec.attempt_dir / layout.LOGS_DIR
        launcher = spec.attempt_dir / layout.LAUNCHER_LOG
        folder = logs / f"rank{rank or 0}"
        own = rank is not None or is_one_script(command)
        paths = (folder / "stdout.log", folder / "stderr.log") if own else (launcher, launcher)
        process = LaunchedProcess(command, cwd=spec.cwd, env=env, output=output, logs=paths)
        self.processes.append(process)

    def _launcher_environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """Per-rank log files and the root cause of torchrun.

        As defaults that the user's own settings win over.
        """
        folder = self.spec.attempt_dir
        extra = {}
        if "TORCHELASTIC_ERROR_FILE" not in base:
            # torchrun copies the first failed rank's error here; without it, it logs a complaint.
            extra["TORCHELASTIC_ERROR_FILE"] = str(folder / layout.LAUNCHER_ERROR)
        if self.spec.output == "files" and not {"PET_LOG_DIR", "PET_REDIRECTS", "PET_TEE"} & set(base):
            extra["PET_LOG_DIR"] = str(folder / layout.LOGS_DIR)
            extra["PET_REDIRECTS"] = "3"
        return extra if is_torchrun(self.spec.command) else {}

    def _config(self, ranks: SimulatedRanks | None) -> dict[str, Any]:
        """agent.json."""
        spec = self.spec
        device = None
        if spec.device is not None:
            world_size = ranks.world_size if ranks is not None else 1
            device = describe(spec.device, world_size, spec.capacity_bytes)
        return {
            "protocol": PROTOCOL_VERSION,
            "session": str(self.session.path),
            "attempt_dir": str(spec.attempt_dir),
            "rundir": self._rundir,
            "role": spec.role,
            "device": device,
            "steps": spec.steps,
            "plan": spec.plan or {"fixes": []},
            "detail": spec.detail,
            "history": {**HISTORY, "enabled": spec.history},
            "ranks": list(ranks.chosen) if ranks is not None else spec.ranks,
            "supervisor_pid": os.getpid(),
            "main_is_rank": ranks is not None or is_one_script(spec.command),
        }


@contextlib.contextmanager
def _signals(control: JobControl) -> Iterator[None]:
    """Turn signals to this process into requests.

    Only the main thread can, others leave signals as they are.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def on_interrupt(number: int, frame: FrameType | None) -> None:
        control.escalate("Ctrl-C")

    def on_terminate(number: int, frame: FrameType | None) -> None:
        control.terminate(signal.Signals(number).name)

    handlers = {signal.SIGINT: on_interrupt, signal.SIGTERM: on_terminate, signal.SIGHUP: on_terminate}
    before = {number: signal.signal(number, handler) for number, handler in handlers.items()}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _write_result(attempt_dir: Path, result: JobResult) -> None:
    from oomscope.store.files import write_json

    with contextlib.suppress(OSError):  # a full disk costs the file, not the caller's answer
        write_json(attempt_dir / layout.RESULT_FILE, {"host": socket.gethostname(), **result.to_json()})
