"""One launch of the job, from the command line to result.json."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import Any

from oomscope.errors import UsageError
from oomscope.launch import boot
from oomscope.launch.command import TORCHRUN_MODULE, torchrun_option, torchrun_script
from oomscope.launch.outcome import JobResult, OomFact, RankResult, read_outcome
from oomscope.launch.processes import LaunchedProcess, Output, end_leftovers, kill_marked
from oomscope.protocol import env as variables
from oomscope.protocol import layout
from oomscope.protocol.records import PROTOCOL_VERSION
from oomscope.simulate.cards import Card
from oomscope.store.session import ProcessMark, Session

__all__ = ["JobControl", "JobResult", "JobSpec", "OomFact", "RankResult", "run_job"]

#: Default of the allocation history: python stacks cost little, and the ring is bounded.
HISTORY = {"enabled": True, "max_entries": 100_000, "stacks": "python"}

#: Seconds between two looks at the child, and how long a polite end may take before the next signal.
_POLL_S = 0.05
_PEER_GRACE_S = 5.0


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
    """Simulated ranks to run; None: rank 0 stands for all."""
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
    _sent: int = field(default=0, repr=False)

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
        with _signals(control):
            run.start()
            while not run.poll():
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
        self._rundir = ""

    def start(self) -> None:
        spec = self.spec
        ranks = _simulated_ranks(spec)
        label = spec.attempt_dir.name
        self._rundir = layout.rundir(self.session.id, f"{label}-{os.getpid():x}")
        config = self._config(main_is_rank=ranks is not None or TORCHRUN_MODULE not in spec.command)
        folder = boot.write_boot(spec.attempt_dir, config)
        base = boot.job_environment(spec.env, folder, session=self.session.path, attempt_dir=spec.attempt_dir)
        if ranks is None:
            self._launch(spec.command, base | self._launcher_environment(base), None)
        else:
            command = _without_torchrun(spec.command)
            for rank in ranks.chosen:
                self._launch(command, base | ranks.environment(rank), rank)
        if spec.role == "attempt":
            self.session.set_state("running", launcher=ProcessMark.of(self.processes[0].pid))

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
                self._deadline = time.monotonic() + _PEER_GRACE_S
                self.control.terminate(f"another rank ended with code {code}")
        if len(self._codes) == len(self.processes):
            return True
        self._pass_on()
        return False

    def time_out(self, seconds: float) -> None:
        if not self.timed_out:
            self.timed_out = True
            self._deadline = time.monotonic() + _PEER_GRACE_S
            self.control.terminate(f"it ran longer than {seconds:g} s")

    @property
    def exit_code(self) -> int:
        """As `subprocess` gives it: of the first process that failed, else 0."""
        return self._first_code or 0

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
        if self._rundir:
            shutil.rmtree(self._rundir, ignore_errors=True)

    def _pass_on(self) -> None:
        if self._deadline is not None and time.monotonic() > self._deadline:
            self.control.kill(self.control.reason)
        level = self.control.level
        if level <= self._sent:
            return
        self._sent = level
        number = {1: signal.SIGINT, 2: signal.SIGTERM, 3: signal.SIGKILL}[level]
        self.session.append_supervisor({"k": "signal", "signal": number.name, "text": self.control.reason})
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
        if rank is None and TORCHRUN_MODULE in command:
            paths = (spec.attempt_dir / layout.LAUNCHER_LOG,) * 2
        else:
            folder = logs / f"rank{rank or 0}"
            paths = (folder / "stdout.log", folder / "stderr.log")
        process = LaunchedProcess(command, cwd=spec.cwd, env=env, output=output, logs=(paths[0], paths[1]))
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
        return extra if TORCHRUN_MODULE in self.spec.command or "torchrun" in self.spec.command[0] else {}

    def _config(self, *, main_is_rank: bool) -> dict[str, Any]:
        spec = self.spec
        return {
            "protocol": PROTOCOL_VERSION,
            "session": str(self.session.path),
            "attempt_dir": str(spec.attempt_dir),
            "rundir": self._rundir,
            "role": spec.role,
            "device": _device(spec),
            "steps": spec.steps,
            "plan": spec.plan or {"fixes": []},
            "detail": spec.detail,
            "history": dict(HISTORY),
            "ranks": list(spec.ranks) if spec.ranks is not None else None,
            "supervisor_pid": os.getpid(),
            "main_is_rank": main_is_rank,
        }


@dataclass(frozen=True)
class _SimulatedRanks:
    """The ranks of a simulated torchrun job: one plain process stands for each chosen one."""

    world_size: int
    local_world_size: int
    chosen: tuple[int, ...]

    def environment(self, rank: int) -> dict[str, str]:
        """What torchrun would have set.

        Source: torch.distributed.elastic LocalElasticAgent._start_workers.
        """
        return {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank % self.local_world_size),
            "WORLD_SIZE": str(self.world_size),
            "LOCAL_WORLD_SIZE": str(self.local_world_size),
            "GROUP_RANK": str(rank // self.local_world_size),
            "GROUP_WORLD_SIZE": str(self.world_size // self.local_world_size),
            "ROLE_RANK": str(rank),
            "ROLE_WORLD_SIZE": str(self.world_size),
            "ROLE_NAME": "default",
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": "29500",
            "TORCHELASTIC_RUN_ID": "simulated",
            "TORCHELASTIC_RESTART_COUNT": "0",
            "TORCHELASTIC_MAX_RESTARTS": "0",
        }


def _simulated_ranks(spec: JobSpec) -> _SimulatedRanks | None:
    """The ranks to simulate, or None when the command starts its own processes."""
    if spec.device is None or TORCHRUN_MODULE not in spec.command:
        return None
    local = _count(torchrun_option(spec.command, "--nproc-per-node") or "1", "--nproc-per-node")
    nodes = _count((torchrun_option(spec.command, "--nnodes") or "1").rpartition(":")[2], "--nnodes")
    world = local * nodes
    chosen = spec.ranks if spec.ranks is not None else (0,)
    wrong = [rank for rank in chosen if not 0 <= rank < world]
    if wrong or not chosen:
        raise UsageError(
            f"no rank {wrong[0] if wrong else '?'} in a job of {world}", hint=f"ranks are 0 to {world - 1}"
        )
    return _SimulatedRanks(world, local, tuple(chosen))


def _count(text: str, option: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise UsageError(
            f"{option} {text}: a simulated device needs a number", hint=f"for example {option} 8"
        )
    return value


def _without_torchrun(command: Sequence[str]) -> tuple[str, ...]:
    """The command of one rank.

    The interpreter of the torchrun command and what torchrun would have started.
    """
    return (command[0], *torchrun_script(command))


def _device(spec: JobSpec) -> dict[str, Any] | None:
    card = spec.device
    if card is None:
        return None
    ranks = _simulated_ranks(spec)
    capacity = card.capacity_bytes(ranks.world_size if ranks is not None else 1)
    return {
        "spec": card.name,
        "name": card.product,
        "capacity_bytes": spec.capacity_bytes if spec.capacity_bytes is not None else capacity,
        "total_bytes": card.usable_bytes,
        "compute_capability": list(card.compute_capability),
        "multiprocessors": card.multiprocessors,
        "context_bytes": card.context_bytes,
        "nccl_bytes": card.nccl_bytes,
        "source": card.source,
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


def spec_for_rerun(
    spec: JobSpec, attempt_dir: Path, *, env: Mapping[str, str], plan: dict[str, Any]
) -> JobSpec:
    """`spec` with the changes of a set of fixes, for a new attempt."""
    merged = {**spec.env, **env}
    merged.pop(variables.OWNER, None)
    return replace(spec, attempt_dir=attempt_dir, env=merged, plan=plan)
