"""`oomscope attach`: open the viewer on a recorded or running session, or on processes that run already."""

from __future__ import annotations

import json
import os
from typing import TYPE_CHECKING, Any

import click

from oomscope.cli.terminal import has_screens
from oomscope.errors import AttachFailed, SessionError

if TYPE_CHECKING:
    from oomscope.live.session import SessionView
    from oomscope.live.state import RankState
    from oomscope.store.session import Session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--ui", type=click.Choice(["auto", "never", "always"]), default="auto", show_default=True,
              help="Screens in a terminal, or plain text.")  # fmt: skip
@click.option("--readonly", is_flag=True, help="Without the actions that change the job.")
@click.option("--json", "as_json", is_flag=True, help="Print one oomscope.session/1 object on stdout.")
@click.option("--once", is_flag=True, help="A running job: take one look, print it, leave.")
@click.option("--observe-only", is_flag=True, help="A running job: read NVML and /proc, touch nothing.")
@click.option("--agent", is_flag=True, help="A running job: run the agent inside it without asking.")
@click.argument("target", default="last", metavar="[SESSION|PID|NAME]")
def attach(
    ui: str, readonly: bool, as_json: bool, once: bool, observe_only: bool, agent: bool, target: str
) -> int:
    """Open the viewer on a session, or on a job that was not started by oomscope.

    SESSION is a folder, any unique part of a session's name, or "last", the newest (the default).

    A running job: the PID of its launcher, of a rank or of a DataLoader worker, the NAME of its script, its
    torchrun run id, slurm:JOB or container:ID. With --once --json it is printed as oomscope.attach/1.
    """
    if once or observe_only or agent or _is_live(target):
        return _live(target, once=once, as_json=as_json, observe_only=observe_only, agent=agent, ui=ui)
    try:
        session = _session(target)
    except SessionError as error:
        if os.sep in target or target == "last":
            raise
        return _live(target, once=once, as_json=as_json, ui=ui, no_session=error)
    if as_json:
        click.echo(json.dumps(state_object(session), indent=1, ensure_ascii=False))
    elif has_screens(ui):
        from oomscope.tui.app import OomscopeApp

        OomscopeApp(session, readonly=readonly).run()
    else:
        for line in state_text(session):
            click.echo(line)
    return 0


def _session(target: str) -> Session:
    from oomscope.store.library import find

    return find(target)


def _is_live(target: str) -> bool:
    """Whether it can only mean a job that runs: a session's name may end in digits too."""
    return target.startswith(("slurm:", "container:")) or (
        target.isdigit() and os.path.isdir(f"/proc/{target}")
    )


def _live(target: str, *, no_session: SessionError | None = None, **options: Any) -> int:
    """Attach to a job that runs already.

    Raises:
        AttachFailed: neither a session nor a job has that name.
    """
    from oomscope.cli.attach_live import attach_live

    try:
        return attach_live(target, **options)
    except AttachFailed as error:
        if no_session is not None:
            error.message += f"; {no_session.message}"
        raise


def state_object(session: Session) -> dict[str, Any]:
    """The session as `oomscope.session/1`: its state and that of each rank in the newest attempt."""
    view = _read(session)
    return {
        "schema": "oomscope.session/1",
        "session": str(session.path),
        "id": session.id,
        "state": view.state,
        "attempt": view.attempt.number if view.attempt is not None else None,
        "ranks": [_rank_object(each) for each in view.ranks],
        "bad_lines": view.bad_lines,
        "lost_records": view.lost_records,
    }


def state_text(session: Session) -> list[str]:
    """The session in a few lines, for a place without a terminal."""
    from oomscope.units import format_bytes

    view = _read(session)
    attempt = f", attempt {view.attempt.number}" if view.attempt is not None else ""
    lines = [f"{session.id}: {view.state}{attempt}", f"  {session.path}"]
    for each in view.ranks:
        peak, of = each.peak_reserved_bytes, each.capacity_bytes
        if peak is None:
            memory = f"host peak {format_bytes(each.peak_rss_bytes or 0)}"
        else:
            simulated = "simulated " if each.simulated else ""
            memory = f"{simulated}peak reserved {format_bytes(peak)}" + (
                f" of {format_bytes(of)}" if of else ""
            )
        loss = "" if each.loss is None else f", loss {each.loss:.4f}"
        lines.append(f"  rank {each.rank}: {each.state}, {each.step} steps, {memory}{loss}")
        if each.exception is not None:
            message = str(each.exception.get("message")).splitlines() or [""]
            lines.append(f"    {each.exception.get('type')}: {message[0][:200]}")
    if not view.ranks:
        lines.append("  no rank has reported")
    if view.bad_lines or view.lost_records:
        lines.append(
            f"  {view.bad_lines} unreadable lines, {view.lost_records} records lost (a full disk, a kill)"
        )
    return lines


def _read(session: Session) -> SessionView:
    from oomscope.live.session import SessionView

    view = SessionView(session)
    while view.poll():
        continue
    return view


def _rank_object(state: RankState) -> dict[str, Any]:
    names = (
        "rank", "local_rank", "pid", "host", "device", "gpu_name", "simulated", "state", "step", "micro_step",
        "phase",
        "allocated_bytes", "reserved_bytes", "peak_allocated_bytes", "peak_reserved_bytes", "capacity_bytes",
        "device_used_bytes", "rss_bytes", "peak_rss_bytes", "retries", "ooms", "loss",
    )  # fmt: skip
    return {name: getattr(state, name) for name in names}
