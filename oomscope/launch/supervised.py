"""The loop in a detached supervisor: requests from viewers decide, and end the job."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from oomscope.errors import UsageError
from oomscope.launch.job import JobControl
from oomscope.launch.loop import Loop, RunRequest
from oomscope.launch.peers import request_dump
from oomscope.launch.supervisor import start
from oomscope.store import control
from oomscope.store.session import ENDED, Session

#: A supervisor without a decision goes home after a day; `oomscope fix` takes the session up again.
_WAIT_S = 24 * 3600.0
_POLL_S = 0.2


def supervise(session: Session, payload: Mapping[str, Any]) -> int:
    """Entry of the supervisor process: the loop of `payload`, a `RunRequest` as JSON; returns the job's exit code."""
    return _loop(session, RunRequest.from_json(payload)).run().exit_code


def take_up(session: Session, payload: Mapping[str, Any]) -> int:
    """Entry of a supervisor for a session that has ended: predict for its last attempt, and wait for a decision."""
    attempt = session.attempts()[-1]
    return _loop(session, _request_of(session)).resume(attempt).exit_code


def predict_ended(session: Session) -> None:
    """Start a supervisor that takes up `session`, which has ended; its progress stands in the session folder.

    Raises:
        UsageError: it has not ended, or no attempt was made.
        LaunchFailed: the supervisor did not start.
    """
    if session.current_state() not in ENDED:
        raise UsageError("the session is still supervised")
    if not session.attempts():
        raise UsageError("no attempt was made in this session: there is nothing to predict for")
    start(session, "oomscope.launch.supervised:take_up", {})


def _request_of(session: Session) -> RunRequest:
    """The request of an earlier supervisor, as its first attempt tells."""
    first = session.attempts()[0].info()
    return RunRequest(
        command=tuple(first.get("command") or session.info.get("command") or ()),
        cwd=str(first.get("cwd") or session.info.get("cwd") or "."),
        device=first.get("device"),
        steps=first.get("steps"),
    )


def _loop(session: Session, request: RunRequest) -> Loop:
    desk = _Desk(session)
    return Loop(
        session,
        request,
        dict(os.environ),
        decide=desk.wait_for_decision,
        on_poll=desk.serve,
        control=desk.job,
        also_predict=lambda: desk.predictions_wanted,
    )


class _Desk:
    """Where viewers' requests arrive."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.job = JobControl()
        self.predictions_wanted = False
        """Somebody wants to see fixes although the job may not run out of memory."""

    def serve(self) -> None:
        """Answer what has arrived while a job runs."""
        for request in control.receive(self.session):
            if request.do == "stop":
                self.job.stop("asked by a viewer")
                self._answer(request, "the job was asked to stop")
            elif request.do == "kill":
                self.job.kill("asked by a viewer")
                self._answer(request, "the job is being killed")
            elif request.do == "dump":
                count = request_dump(self.session, rank=request.rank)
                self._answer(request, f"{count} ranks were asked for a snapshot", ok=count > 0)
            elif request.do == "detach":
                self._answer(request, "the job goes on")
            elif request.do == "predict":
                self.predictions_wanted = True
                self._answer(request, "fixes are predicted as soon as this attempt has ended")
            else:
                self._answer(request, "the job is still running", ok=False)

    def wait_for_decision(self, fixes: Mapping[str, Any]) -> Sequence[str] | None:
        """Block until a viewer chooses fixes, gives up, or a day has gone."""
        until = time.monotonic() + _WAIT_S
        while time.monotonic() < until:
            for request in control.receive(self.session):
                if request.do == "rerun" and request.fixes:
                    self._answer(request, f"rerun with {', '.join(request.fixes)}")
                    return request.fixes
                if request.do in ("stop", "kill"):
                    self._answer(request, "the session is closed")
                    return None
                if request.do == "predict":
                    self._answer(request, "the fixes are predicted already")
                else:
                    self._answer(request, "no job is running", ok=request.do == "detach")
            time.sleep(_POLL_S)
        return None

    def _answer(self, request: control.Request, text: str, *, ok: bool = True) -> None:
        control.answer(self.session, request, ok, text)
