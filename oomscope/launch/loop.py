"""The loop that oomscope exists for: run, diagnose, predict, decide, rerun, prove.

It is the same loop in the foreground and in a detached supervisor; only who narrates and who decides differs. Every
step is written to the session folder before the next one starts, so that a viewer sees the same as the loop itself,
and so that a prediction stands on disk before the rerun that tests it.
"""

from __future__ import annotations

import os
import re
import time
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from oomscope.core.fixes.choice import choose
from oomscope.core.fixes.model import Risk
from oomscope.errors import OomscopeError
from oomscope.launch.job import JobControl, JobResult, JobSpec, run_job
from oomscope.launch.predict import launch_changes, patched_command, predict
from oomscope.launch.proof import prove
from oomscope.launch.request import LoopOutcome, RunRequest
from oomscope.live.evidence import collect
from oomscope.live.judge import judge
from oomscope.protocol import layout
from oomscope.simulate import cards
from oomscope.store.files import read_json, write_json
from oomscope.store.session import Attempt, Session

#: How an output folder or file of the attempt before makes itself known.
_EXISTS = re.compile(r"FileExistsError|already exists")
__all__ = ["Decide", "Loop", "LoopOutcome", "RunRequest"]

#: Ids of the fixes to apply next, or None to stop. It gets the `oomscope.fixes/1` object.
Decide = Callable[[Mapping[str, Any]], Sequence[str] | None]


class Loop:
    """One session's attempts, from the first launch to the proof."""

    def __init__(
        self,
        session: Session,
        request: RunRequest,
        env: Mapping[str, str],
        *,
        decide: Decide = lambda fixes: None,
        on_event: Callable[[dict[str, Any]], None] = lambda record: None,
        on_poll: Callable[[], None] | None = None,
        control: JobControl | None = None,
        also_predict: Callable[[], bool] = lambda: False,
    ) -> None:
        """Prepare; nothing starts yet.

        Args:
            session: where everything is written.
            request: what to run and what is allowed.
            env: the job's environment without any fix; later attempts are derived from it, never from each other.
            decide: asked when neither an option nor `take_best` has chosen.
            on_event: gets every record that goes to supervisor.jsonl, right after it was written.
            on_poll: called often while a job runs; it may use `control`.
            control: ends the running job, and with it the loop.
            also_predict: asked after an attempt that did not run out of memory.
        """
        self.session = session
        self.request = request
        self.env = dict(env)
        self.decide = decide
        self.on_event = on_event
        self.on_poll = on_poll
        self.control = control or JobControl()
        self.also_predict = also_predict
        self.card = cards.resolve(request.device) if request.device else None
        self.outcome = LoopOutcome(exit_code=0)
        self._failed: list[frozenset[str]] = []
        self._started = time.monotonic()

    def run(self) -> LoopOutcome:
        """Run attempts until one survives, nothing more can be done, or the user has had enough.

        Raises:
            KeyboardInterrupt: before any attempt has ended; later, the outcome is that of the last attempt.
        """
        return self._until_ended(lambda: self._run_attempts(tuple(self.request.initial), None))

    def resume(self, attempt: Attempt) -> LoopOutcome:
        """Go on after `attempt`, which has ended: predict, let somebody decide, and rerun."""
        result = attempt.result() or {}
        self.outcome.exit_code, self.outcome.oom = int(result.get("exit_code") or 0), bool(result.get("oom"))
        fixes = tuple(attempt.info().get("fixes") or ())

        def go_on() -> None:
            chosen = self._choose(self._predict(attempt), fixes, several_nodes=result.get("node") is not None)
            if chosen:
                self._run_attempts(chosen, attempt)

        return self._until_ended(go_on)

    def _until_ended(self, work: Callable[[], None]) -> LoopOutcome:
        try:
            work()
        except KeyboardInterrupt:
            if not self.outcome.attempts:
                raise
            self._say(f"interrupted: oomscope fix {self.session.id} --predict takes it up again")
        self.session.set_state(self._final_state())
        return self.outcome

    def _run_attempts(self, fixes: tuple[str, ...], previous: Attempt | None) -> None:
        while True:
            attempt, result = self._attempt(fixes, previous)
            self._diagnose(attempt)
            if previous is not None:
                self._prove(previous, attempt)
                another = self._another_plan(previous, attempt, result)
                if another:
                    fixes = another
                    continue
            if not self._needs_fixes(result, previous) or not self._may_continue():
                break
            if result.node:
                self._say(
                    f"this was node {result.node}: the session on node 0 has all ranks, and the predictions"
                )
                break
            chosen = self._choose(self._predict(attempt), fixes, several_nodes=result.node is not None)
            if not chosen:
                break
            previous, fixes = attempt, chosen

    def _needs_fixes(self, result: JobResult, previous: Attempt | None) -> bool:
        if not self.request.predict:
            return False
        if result.oom or self.also_predict():
            return True
        if not self.request.chosen or previous is not None or result.exit_code != 0:
            return False
        if self._is_trial:
            return True
        self._say(
            f"it did not run out of memory: nothing was rerun, {', '.join(self.request.chosen)} not applied. "
            "With --steps N both are tried and compared; oomscope run --plan FILE starts with fixes"
        )
        return False

    @property
    def _is_trial(self) -> bool:
        """Fixes were asked for on a run that is short anyway: they are compared although it does not fail."""
        return bool(self.request.chosen) and (self.card is not None or self.request.steps is not None)

    def _attempt(self, fixes: tuple[str, ...], previous: Attempt | None) -> tuple[Attempt, JobResult]:
        spec, changes = self._spec(fixes, previous)
        attempt = self.session.new_attempt()
        attempt.write_info(
            {
                "attempt": attempt.number,
                "command": list(spec.command),
                "cwd": str(spec.cwd),
                "device": self.request.device,
                "steps": spec.steps,
                "fixes": list(fixes),
                "changes": changes,
            }
        )
        self.session.set_state("running", attempt=attempt.number)
        self._note(
            "attempt_started",
            attempt=attempt.number,
            command=list(spec.command),
            fixes=list(fixes),
            pid=os.getpid(),
        )
        result = run_job(
            replace(spec, attempt_dir=attempt.path),
            session=self.session,
            on_poll=self.on_poll,
            control=self.control,
        )
        self._note("attempt_ended", attempt=attempt.number, exit_code=result.exit_code, oom=result.oom)
        self.outcome.attempts.append(attempt.number)
        self.outcome.exit_code = result.exit_code
        self.outcome.oom = result.oom
        return attempt, result

    def _spec(self, fixes: tuple[str, ...], previous: Attempt | None) -> tuple[JobSpec, dict[str, Any]]:
        """The launch of the next attempt, and how it differs from the user's own command."""
        request = self.request
        spec = JobSpec(
            command=request.command,
            cwd=Path(request.cwd),
            env=self.env,
            device=self.card,
            plan={"fixes": []},
            steps=request.steps,
            # The heavier probes are for attempts that are investigated anyway; the first real run stays light.
            detail=request.detail or self._is_trial or self.card is not None or previous is not None,
            history=request.history or self.card is not None,
            role="attempt",
            attempt_dir=self.session.path,
            output=request.output,
            ranks=request.ranks,
        )
        # What a rerun must reproduce besides losses; a simulated device has no values to record.
        marks = [{"id": "fingerprint", "options": {}}] if spec.detail and self.card is None else []
        if marks and previous is None:  # what the fixes have to know; a prediction run watches by itself
            marks.append({"id": "observe", "options": {}})
        if not fixes:
            return replace(spec, plan={"fixes": marks}), {"env": {}, "plan": {"fixes": []}, "argv": []}
        planned = launch_changes(fixes, previous, env=self.env)
        changes: dict[str, Any] = {
            "env": dict(planned.env),
            "plan": dict(planned.plan),
            "argv": list(planned.argv),
        }
        spec = replace(
            spec,
            command=(*patched_command(planned, spec, self.session), *planned.argv),
            env={**self.env, **planned.env},
            plan={"fixes": [*changes["plan"]["fixes"], *marks]},
        )
        return spec, changes

    def _diagnose(self, attempt: Attempt) -> None:
        self.session.set_state("diagnosing")
        self._note("diagnosing", attempt=attempt.number)
        with self._shielded("the diagnosis"):
            findings = judge(collect(attempt.path)).to_json()
            write_json(attempt.path / layout.FINDINGS_FILE, findings)
            rule = findings["verdicts"][0]["rule"] if findings["verdicts"] else None
            self._note("diagnosed", attempt=attempt.number, rule=rule)

    def _predict(self, attempt: Attempt) -> dict[str, Any]:
        catalogue: dict[str, Any] = {"fixes": [], "plans": [], "recommended": None}
        self.session.set_state("predicting")

        def progress(fix: str, done: int, total: int) -> None:
            self._note("predicting", fix=fix, done=done, total=total)

        with self._shielded("the prediction"):
            catalogue = predict(
                self.session,
                attempt,
                card=self.card,
                only=self.request.chosen or None,
                on_progress=progress,
                spec=self._spec((), None)[0],
                together=bool(self.request.chosen),
            )
            write_json(attempt.path / layout.FIXES_FILE, catalogue)
            self._note("predicted", attempt=attempt.number)
            # The simulation has seen what comes after the failure, which the failed run could not show.
            self._diagnose(attempt)
        return catalogue

    def _choose(
        self, catalogue: Mapping[str, Any], active: tuple[str, ...], *, several_nodes: bool
    ) -> tuple[str, ...]:
        """The ids for the next attempt: asked for, recommended, or decided by a person; empty to stop."""
        if several_nodes:
            self._say(
                "a job on several nodes is not started again from one of them: adopt a fix with oomscope fix, or "
                "start it on every node with oomscope run --plan"
            )
            return ()
        if self.request.chosen:
            if set(self.request.chosen) <= set(active):
                self._say("the chosen fixes were not enough")
                return ()
            return self._accepted(catalogue, self.request.chosen, by="option")
        if self.request.take_best:
            return self._recommended(catalogue, active)
        self.session.set_state("waiting")
        self._note("waiting")
        chosen = self.decide(catalogue)
        return self._accepted(catalogue, tuple(chosen), by="user") if chosen else ()

    def _recommended(self, catalogue: Mapping[str, Any], active: tuple[str, ...]) -> tuple[str, ...]:
        choice = choose(catalogue, Risk(self.request.allowed_risk), active, self._failed)
        if choice.why_none:
            self._say(choice.why_none)
            return ()
        return self._accepted(catalogue, choice.fixes, by="recommendation")

    def _accepted(self, catalogue: Mapping[str, Any], ids: tuple[str, ...], by: str) -> tuple[str, ...]:
        """`ids` when every one of them applies; otherwise each refusal is recorded and nothing is rerun."""
        known = {fix["id"]: fix for fix in catalogue["fixes"]}
        for each in ids:
            fix = known.get(each)
            if fix is not None and fix["applicable"]:
                continue
            reason = fix["why_not"] if fix is not None else "there is no such fix for this failure"
            self.outcome.refused.append({"fix": each, "reason": reason})
            self._say(f"{each} refused: {reason}")
        if self.outcome.refused:
            return ()
        self._note("decision", fixes=list(ids), by=by)
        return ids

    def _prove(self, before: Attempt, after: Attempt) -> None:
        with self._shielded("the proof"):
            write_json(after.path / layout.PROOF_FILE, prove(before.path, after.path))
            self._note("proved", attempt=after.number)

    def _another_plan(self, previous: Attempt, attempt: Attempt, result: JobResult) -> tuple[str, ...]:
        """The next plan when the rerun failed, but not for memory; its fixes are taken back and not tried again."""
        proof = read_json(attempt.path / layout.PROOF_FILE) or {}
        if result.oom or proof.get("accepted") is not False:
            return ()
        fixes = tuple(attempt.info().get("fixes") or ())
        self._say(f"{' + '.join(fixes)} not accepted: {proof.get('why_not_accepted')}")
        self._failed.append(frozenset(fixes))
        if result.exit_code == 0 or not self.request.take_best or self.request.chosen:
            return ()
        stopped = next(
            (rank.exception for rank in result.ranks if _EXISTS.search(rank.exception or "")), None
        )
        if stopped is not None:
            self._say(
                f"the rerun stopped at what attempt {previous.number} left ({stopped}): move it away, or let the "
                "script take an existing folder, and start again"
            )
            return ()
        return self._recommended(previous.fixes() or {"fixes": []}, ()) if self._may_continue() else ()

    def _may_continue(self) -> bool:
        if self.control.level:
            return False
        if len(self.outcome.attempts) >= self.request.max_attempts:
            self._say(f"stopped after {len(self.outcome.attempts)} attempts (--max-attempts)")
            return False
        budget = self.request.budget_s
        if budget is not None and time.monotonic() - self._started > budget:
            self._say(f"stopped: the budget of {budget:g} s is used up (--budget)")
            return False
        return True

    def _final_state(self) -> str:
        if self.outcome.oom:
            return "oom"
        return "done" if self.outcome.exit_code == 0 else "failed"

    @contextmanager
    def _shielded(self, what: str) -> Iterator[None]:
        """Keep a failure of our own analysis away from the job's result: it is noted, and the loop goes on."""
        try:
            yield
        except OomscopeError as error:
            self._say(f"{what} failed: {error.message}")
        except Exception as error:  # noqa: BLE001  # the worker boundary: the job's exit code matters more
            crash = self.session.path / layout.CRASH_FILE
            with open(crash, "a", encoding="utf-8") as stream:
                stream.write(traceback.format_exc() + "\n")
            self._say(f"{what} failed by a bug of oomscope ({type(error).__name__}); details are in {crash}")

    def _say(self, text: str) -> None:
        self._note("note", text=text)

    def _note(self, kind: str, **fields: Any) -> None:
        record = {"k": kind, **fields}
        self.session.append_supervisor(record)
        self.on_event(record)
