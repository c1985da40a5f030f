"""An attachment to a running job: how far we got with each rank, and why not further.

The ladder: *observe* (NVML, /proc, cgroups: no rights needed, no pause), *stacks* (py-spy), *agent* (our code
inside the job, only when asked for). Every rung works alone. The evidence goes into a session folder like
that of a launched job.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from oomscope.collect import gpumap, outside, stacks
from oomscope.collect.base import State
from oomscope.collect.machine import Machine
from oomscope.collect.procfs import read_stat
from oomscope.collect.recorder import HostRecorder
from oomscope.errors import AttachFailed, OomscopeError
from oomscope.launch import attach_place, preflight
from oomscope.launch.attach_end import exit_code, how_it_ended
from oomscope.launch.attach_observe import ObservedRank
from oomscope.launch.attach_place import Relay
from oomscope.launch.attachment import (
    Attachment,
    Options,
    Rung,
    attempt_info,
    create_session,
    error_file,
    name_of,
    nvml_uuid,
    sentence,
)
from oomscope.launch.discover import Job
from oomscope.launch.injectors import inject, wrapped
from oomscope.launch.injectors.remote_exec import python_version
from oomscope.launch.peers import send_dump
from oomscope.launch.terminations import tell_terminations
from oomscope.live.session import SessionView
from oomscope.live.state import RankState
from oomscope.store.files import read_json
from oomscope.store.session import ProcessMark

_ANSWER_S = 10.0
_RENEW_S = 1.0
_LEAVE_S = 3.0
#: What the agent's syntax needs.
OLDEST_PYTHON = (3, 9)
#: Stacks of ranks without an agent are read anew after this time, without stopping them.
_STACKS_S = 5.0


class AttachSession:
    """The attachment to one job. Not thread-safe: one thread calls everything.

    Args:
        job: as `discover` found it.
        options: how far to go.
        home: state folder; the default one when None.
        environ: for the collectors.
        on_note: hears what happens, one sentence each.
    """

    def __init__(
        self,
        job: Job,
        options: Options | None = None,
        *,
        home: Path | None = None,
        environ: Mapping[str, str] | None = None,
        on_note: Callable[[str], None] = lambda text: None,
    ) -> None:
        self.job = job
        self.options = options or Options()
        self.ranks = [Attachment(rank) for rank in job.ranks]
        self.machine = Machine()
        self._note = on_note
        self.session = create_session(job, home)
        self.attempt = self.session.new_attempt()
        self.attempt.write_info(attempt_info(job))
        mark = ProcessMark.of(job.launcher or job.ranks[0].pid)
        self.session.set_state("running", attempt=1, supervisor=ProcessMark.of(os.getpid()), launcher=mark)
        self.session.append_supervisor(
            {"k": "attempt_started", "attempt": 1, "command": list(job.ranks[0].command), "pid": mark.pid}
        )
        for problem in job.problems:
            self._say(problem)
        self.recorder = HostRecorder(self.attempt.path, environ=environ, on_record=self.machine.take).start()
        self.recorder.watch(job.pids)
        self.view = SessionView(self.session)
        self._renewed = 0.0
        self._stacks_read = time.monotonic()
        self._closed = False

    # -- climbing

    def climb(self) -> None:
        """Goes as far as the options allow, rank by rank; one that resists does not keep the others down."""
        if self.options.observe_only:
            for each in self.ranks:
                each.why_not_higher = "--observe-only was given"
            return
        for each in self.ranks:
            self.read_stack(each)
        if self.options.agent:
            self.attach_agents()

    def read_stack(self, each: Attachment) -> None:
        """Rung 1: where the rank is now."""
        verdict = preflight.check(each.rank.pid)
        # py-spy's non-blocking mode works beside another tracer.
        if not verdict.ok and verdict.code != "traced":
            each.why_not_higher = sentence(verdict.why, verdict.remedy)
            return
        dump = stacks.dump(each.rank.pid, allow_blocking=self.options.blocking_stacks and verdict.ok)
        each.stack = dump
        if not dump.ok:
            each.why_not_higher = dump.why
        elif each.rung is Rung.OBSERVE:
            each.rung = Rung.STACKS
            each.why_not_higher = (
                sentence(verdict.why, verdict.remedy)
                if not verdict.ok
                else f"not asked for: oomscope attach {self.job.target} --agent runs code inside the job"
            )

    def attach_agents(self, only: Iterable[int] | None = None) -> None:
        """Rung 2 for all ranks, or those with the given pids."""
        wanted = set(only) if only is not None else None
        chosen = [each for each in self.ranks if wanted is None or each.rank.pid in wanted]
        for each in chosen:
            if each.agent in ("none", "left", "failed"):
                self._inject(each)
        deadline = time.monotonic() + self.options.answer_s
        while any(each.agent == "starting" for each in chosen) and time.monotonic() < deadline:
            self.refresh()
            time.sleep(0.02)
        for each in chosen:
            if each.agent == "starting":
                each.why_not_higher = self._why_waiting(each)

    def _inject(self, each: Attachment) -> None:
        pid = each.rank.pid
        try:
            verdict = preflight.check(pid)
            if not verdict.ok:
                raise AttachFailed(verdict.why, hint=verdict.remedy or None)
            version = python_version(pid)
            if version is not None and version < OLDEST_PYTHON:
                found, needed = (".".join(map(str, each)) for each in (version, OLDEST_PYTHON))
                raise AttachFailed(f"process {pid} runs Python {found}; the agent needs {needed} or later")
            place = attach_place.place_for(each.rank, self.attempt.path, self.session.id)
            each.place, each.relay = place, Relay(place, each.rank)
            place.answer(each.rank.namespace_pid).unlink(missing_ok=True)
            source, error_file = place.loader(each.rank.namespace_pid)
            each.report = inject(pid, wrapped(source, error_file))
        except OomscopeError as error:
            each.agent, each.why_not_higher = "failed", sentence(error.message, error.hint or "")
            self._say(f"{name_of(each)}: {each.why_not_higher}")
            return
        each.agent = "starting"
        report = each.report
        self._say(
            f"{name_of(each)}: agent sent by {report.injector}"
            + (
                f", thread {report.thread_did} stopped for {report.stopped_us / 1000:.1f} ms"
                if report.thread
                else ""
            )
        )

    def _why_waiting(self, each: Attachment) -> str:
        detail = each.report.detail if each.report is not None else ""
        where = ""
        if each.stack is not None and each.stack.main is not None and each.stack.main.frames:
            frame = each.stack.main.frames[0]
            where = f"; its main thread is in {frame.function} ({os.path.basename(frame.file)}:{frame.line})"
        waited = f"the agent was sent and has not answered for {self.options.answer_s:.0f} s"
        return f"{waited}: {detail or 'no reason known'}{where}"

    # -- staying

    def refresh(self) -> bool:
        """Renews the lease, copies spools, notices answers and ends. Call about twenty times a second."""
        now = time.monotonic()
        renew = now - self._renewed > _RENEW_S
        if renew:
            self._renewed = now
        for each in self.ranks:
            if each.place is None or each.ended:
                continue
            if each.relay is not None:
                each.relay.poll()
            if renew and each.agent in ("starting", "active"):
                with contextlib.suppress(OSError):
                    attach_place.renew(each.place)
            if each.agent == "starting":
                self._hear_answer(each)
        self._notice_ends()
        if renew:
            self._observe()
        return self.view.poll()

    def _observe(self) -> None:
        """Once a second: what can be seen of the ranks that have no agent."""
        without = [
            each for each in self.ranks if not each.ended and each.agent not in ("active", "starting", "left")
        ]
        if not without:
            return
        again = time.monotonic() - self._stacks_read > _STACKS_S
        if again:
            self._stacks_read = time.monotonic()
        gpus = self.gpus()
        for each in without:
            if again and each.rung is not Rung.OBSERVE:
                dump = stacks.dump(each.rank.pid, allow_blocking=False)
                each.stack = dump if dump.ok else each.stack
            each.observed = each.observed or ObservedRank(each.rank, self.attempt.procs)
            each.observed.write(self.machine, gpus.by_pid.get(each.rank.pid), each.stack)

    def _hear_answer(self, each: Attachment) -> None:
        assert each.place is not None
        answer = None
        with contextlib.suppress(OomscopeError):
            answer = read_json(each.place.answer(each.rank.namespace_pid))
        if answer is None:
            self._hear_error(each)
            return
        code = str(answer.get("code"))
        if answer.get("ok"):
            each.agent, each.rung, each.why_not_higher = "active", Rung.AGENT, None
            return
        each.agent = "already" if code == "already" else "failed"
        if code == "already":
            each.why_not_higher = (
                f"an agent is active there already; its records are in {answer.get('attempt_dir')}"
            )
        else:
            each.why_not_higher = str(answer.get("text")).strip().splitlines()[-1][:300]
        self._say(f"{name_of(each)}: {each.why_not_higher}")

    def _hear_error(self, each: Attachment) -> None:
        assert each.place is not None
        try:
            text = each.place.error(each.rank.namespace_pid).read_text(errors="replace")
        except OSError:
            return
        each.agent, each.why_not_higher = (
            "failed",
            f"the agent could not start: {text.strip().splitlines()[-1][:300]}",
        )
        self._say(f"{name_of(each)}: {each.why_not_higher}")

    def _notice_ends(self) -> None:
        for each in self.ranks:
            if each.ended:
                continue
            stat = read_stat(each.rank.pid)
            if stat is not None and stat.state not in "ZX" and stat.start_ticks == each.rank.start_ticks:
                continue
            each.ended = True
            each.last_error = error_file(each.rank)
            if each.agent in ("starting", "active"):
                each.agent = "left"
            tell_terminations(self.attempt.path)
            self._say(f"{name_of(each)} (pid {each.rank.pid}) has ended")

    @property
    def is_over(self) -> bool:
        """All ranks have ended."""
        return all(each.ended for each in self.ranks)

    def states(self) -> dict[int, RankState]:
        """What the agents have told, by pid *inside* the job's pid namespace."""
        return {state.pid: state for state in (*self.view.ranks, *self.view.others)}

    def state_of(self, each: Attachment) -> RankState | None:
        if each.place is None or each.agent in ("none", "failed", "already"):
            return None
        return self.states().get(each.rank.namespace_pid)

    def number_of(self, each: Attachment) -> int | None:
        """The rank's number: from its environment, else from its agent."""
        if each.rank.rank is not None:
            return each.rank.rank
        state = self.state_of(each)
        return state.rank if state is not None else None

    # -- what can be seen from outside

    def gpus(self) -> gpumap.GpuMap:
        """Which GPU each rank uses."""
        ranks = []
        for each in self.ranks:
            state = self.state_of(each)
            ranks.append(
                gpumap.RankProcess(
                    each.rank.pid,
                    self.number_of(each),
                    each.rank.local_rank,
                    each.rank.environ,
                    nvml_uuid(state.gpu_uuid) if state is not None else None,
                )
            )
        return gpumap.assign(ranks, self.machine.devices, self.machine.holders())

    def collectors(self) -> dict[str, dict[str, str]]:
        """State of every collector: {"state", "code", "why"}."""
        return {
            name: {"state": status.state.value, "code": status.code, "why": status.why}
            for name, status in self.recorder.statuses.items()
        }

    def wait_for_readings(self, timeout_s: float = 3.0) -> None:
        """Until every collector has delivered or given up, and attached agents have told of a step."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            self.refresh()
            started = all(status.state is not State.STARTING for status in self.recorder.statuses.values())
            told = all(
                each.agent != "active"
                or ((state := self.state_of(each)) is not None and state.series.last_step >= 0)
                for each in self.ranks
            )
            if started and told and (self.machine.host.get("processes") or self.is_over):
                return
            time.sleep(0.05)

    def how_it_ended(self) -> list[outside.Fact]:
        """After the end: facts about it from outside."""
        return how_it_ended(self.attempt.path, self.ranks)

    def dump(self, rank: int | None = None) -> int:
        """Asks the agents of all ranks, or one, for stacks and a snapshot; how many took the message."""
        sockets = [
            each.place.socket_of(each.rank.namespace_pid, each.rank.pid)
            for each in self.ranks
            if each.place is not None and each.agent == "active" and rank in (None, self.number_of(each))
        ]
        return send_dump(sockets, "request")

    # -- leaving

    def detach(self) -> list[Attachment]:
        """Asks all agents to leave and waits for them; returns those that did not."""
        active = [each for each in self.ranks if each.agent in ("starting", "active") and not each.ended]
        for each in active:
            if each.place is not None:
                with contextlib.suppress(OSError):
                    attach_place.ask_to_leave(each.place)
        deadline = time.monotonic() + _LEAVE_S
        while time.monotonic() < deadline:
            for each in active:
                if each.relay is not None:
                    each.relay.poll()
            self.view.poll()
            if all(self._has_left(each) for each in active):
                break
            time.sleep(0.02)
        left_over = []
        for each in active:
            if self._has_left(each):
                each.agent = "left"
                if each.relay is not None:
                    each.relay.remove()
            else:
                left_over.append(each)
        return left_over

    def _has_left(self, each: Attachment) -> bool:
        state = self.state_of(each)
        return each.ended or (state is not None and state.said_bye)

    def close(self) -> None:
        """Detaches, ends the collectors and leaves a final state in the session."""
        if self._closed:
            return
        self._closed = True
        for each in self.detach():
            self._say(
                f"{name_of(each)}: the agent did not answer; it leaves by itself within "
                f"{attach_place.LEASE_S:.0f} s"
            )
        self._notice_ends()
        over = self.is_over
        if over:
            self.recorder.settle()  # how it ended stands in the first reading after the end
        self.recorder.stop()
        facts = self.how_it_ended() if over else []
        for fact in facts:
            self._say(fact.text)
        self.view.poll()
        oom = any(state.state == "oom" for state in self.view.ranks)
        failed = any((each.exit_status or 0) != 0 for each in self.ranks)
        self.session.append_supervisor(
            {
                "k": "attempt_ended",
                "attempt": 1,
                "exit_code": exit_code(self.ranks) if over else None,
                "oom": oom,
            }
        )
        text = "the job ended" if over else "detached; the job goes on"
        self.session.append_supervisor({"k": "finished", "exit_code": 0, "text": text})
        self.session.set_state("oom" if oom else "failed" if failed else "done")

    def _say(self, text: str) -> None:
        self.session.append_supervisor({"k": "note", "text": text})
        self._note(text)
