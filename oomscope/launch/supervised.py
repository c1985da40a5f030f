"""The loop in a detached supervisor: requests from viewers decide, and end the job."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping, Sequence
from typing import Any

from oomscope.launch.job import JobControl
from oomscope.launch.loop import Loop, RunRequest
from oomscope.launch.peers import request_dump
from oomscope.store import control
from oomscope.store.session import Session

#: A supervisor without a decision goes home after a day; `oomscope fix` takes the session up again.
_WAIT_S = 24 * 3600.0
_POLL_S = 0.2


def supervise(session: Session, payload: Mapping[str, Any]) -> int:
    """Entry of the supervisor process: the loop of `payload`, a `RunRequest` as JSON; returns the job's exit code."""
    desk = _Desk(session)
    loop = Loop(
        session,
        RunRequest.from_json(payload),
        dict(os.environ),
        decide=desk.wait_for_decision,
        on_poll=desk.serve,
        control=desk.job,
    )
    return loop.run().exit_code


class _Desk:
    """Where viewers' requests arrive."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.job = JobControl()

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
                self._answer(request, "no job is running", ok=request.do == "detach")
            time.sleep(_POLL_S)
        return None

    def _answer(self, request: control.Request, text: str, *, ok: bool = True) -> None:
        control.answer(self.session, request, ok, text)
