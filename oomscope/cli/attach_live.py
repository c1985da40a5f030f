"""`oomscope attach PID|NAME|RUN-ID|slurm:ID|container:ID`: a job that was not started by oomscope."""

from __future__ import annotations

import json
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import click

from oomscope.cli.terminal import has_screens
from oomscope.errors import ExitCode, OomscopeError
from oomscope.launch.attach_session import AttachSession
from oomscope.launch.attachment import Options
from oomscope.launch.discover import Job, discover
from oomscope.store import control
from oomscope.views.attach import attach_json, attach_lines

_PERIOD_S = 0.05
_PLAIN_EVERY_S = 10.0


def attach_live(
    target: str,
    *,
    once: bool = False,
    as_json: bool = False,
    observe_only: bool = False,
    agent: bool = False,
    ui: str = "auto",
    home: Path | None = None,
) -> int:
    """Attaches to a running job and shows it; returns the exit code.

    Args:
        target: pid, script name, run id, `slurm:JOB` or `container:ID`.
        once: one look, then leave.
        as_json: print `oomscope.attach/1`; implies `once`.
        observe_only: never beyond the first rung.
        agent: run the agent inside the job without asking.
        ui: "auto", "always" or "never".
        home: state folder.

    Raises:
        AttachFailed: nothing of that name runs, or it is no training job.
        UsageError: several jobs match.
    """
    job = discover(target)
    started_by_us = next((rank.session for rank in job.ranks if rank.session), None)
    if started_by_us is not None:
        sys.stderr.write(f"oomscope: this job was started by oomscope; its session is {started_by_us}\n")
    screens = not once and not as_json and has_screens(ui)
    interactive = not once and not as_json and sys.stdin.isatty()
    if not agent and not observe_only and interactive:
        agent = _ask(job)
    options = Options(observe_only=observe_only, agent=agent)
    session = AttachSession(job, options, home=home, on_note=_say if not (screens or as_json) else _silent)
    try:
        if once or as_json:
            _look(session, as_json)
        elif screens:
            _screens(session)
        else:
            _plain(session)
    finally:
        session.close()
    return int(ExitCode.DONE)


def _ask(job: Job) -> bool:
    count = len(job.ranks)
    sys.stderr.write(
        f"{job.name}: {count} rank{'s' if count > 1 else ''} found.\n"
        "With the agent oomscope sees steps, allocator readings and OOM errors. This runs code inside your "
        "job: one helper "
        "thread of each rank is stopped for about a millisecond. It leaves when you leave.\n"
    )
    return click.confirm("Run the agent inside the job?", default=False, err=True)


def _look(session: AttachSession, as_json: bool) -> None:
    session.climb()
    session.wait_for_readings()
    if as_json:
        click.echo(json.dumps(attach_json(session), indent=1))
    else:
        click.echo("\n".join(attach_lines(session)))


def _plain(session: AttachSession) -> None:
    """Without a terminal: a table now and then, until the job ends or Ctrl-C."""
    session.climb()
    session.wait_for_readings()
    next_table = 0.0
    with suppress(KeyboardInterrupt):
        while not session.is_over:
            session.refresh()
            _serve(session)
            if time.monotonic() >= next_table:
                next_table = time.monotonic() + _PLAIN_EVERY_S
                click.echo("\n".join(attach_lines(session)), err=True)
            time.sleep(_PERIOD_S)


def _screens(session: AttachSession) -> None:
    """The viewer in front, the attachment in a thread: when the viewer dies, the lease ends with it."""
    from oomscope.tui.app import run_app

    stop = threading.Event()
    worker = threading.Thread(target=_work, args=(session, stop), name="oomscope-attach", daemon=True)
    worker.start()
    try:
        choice = run_app(session.session.path)
        if choice in ("stop", "kill"):
            pid = session.job.launcher or session.job.ranks[0].pid
            _say(f"this job was not started by oomscope and goes on; to stop it: kill {pid}")
    finally:
        stop.set()
        worker.join(10.0)


def _work(session: AttachSession, stop: threading.Event) -> None:
    try:
        session.climb()
    except OomscopeError as error:
        session.session.append_supervisor({"k": "note", "text": error.message})
    while not stop.is_set() and not session.is_over:
        session.refresh()
        _serve(session)
        stop.wait(_PERIOD_S)


def _serve(session: AttachSession) -> None:
    """Answers the requests of viewers. The job is not ours: it is neither stopped nor killed here."""
    for request in control.receive(session.session):
        if request.do == "dump":
            count = session.dump(request.rank)
            control.answer(session.session, request, count > 0, f"{count} rank(s) were asked for a dump")
        elif request.do == "detach":
            left = session.detach()
            control.answer(session.session, request, not left, "detached; the job goes on")
        else:
            text = "this job was not started by oomscope: stop it where it was started"
            control.answer(session.session, request, False, text)


def _say(text: str) -> None:
    sys.stderr.write(f"oomscope: {text}\n")


def _silent(text: str) -> None:
    """Notes stand in the session; the screens show them from there."""
