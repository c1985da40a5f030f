"""`oomscope sessions`: what was recorded on this machine, newest first."""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomscope.errors import OomscopeError

if TYPE_CHECKING:
    from oomscope.store.session import Attempt, Session


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("-n", "--limit", type=click.IntRange(min=1), default=20, show_default=True, metavar="N",
              help="Show the N newest.")  # fmt: skip
@click.option("--all", "show_all", is_flag=True, help="Show all of them.")
@click.option(
    "--prune", is_flag=True, help="Delete what retention says: older than 14 days or beyond 10 GiB."
)
@click.option("--pin", metavar="NAME", help="Keep a session whatever its age.")
@click.option("--unpin", metavar="NAME", help="Let retention delete a session again.")
@click.option(
    "--export", metavar="NAME", help="Write a session into NAME.tar.gz here; attach opens it unpacked."
)
@click.option("--without-snapshots", is_flag=True, help="Leave the memory snapshots out of --export.")
@click.option("--json", "as_json", is_flag=True, help="Print one oomscope.sessions/1 object on stdout.")
def sessions(
    limit: int,
    show_all: bool,
    prune: bool,
    pin: str | None,
    unpin: str | None,
    export: str | None,
    without_snapshots: bool,
    as_json: bool,
) -> int:
    """List recorded sessions.

    A session is opened by any unique part of its name: oomscope attach 3f9c.
    """
    from oomscope.store import library

    if pin or unpin or export:
        return _change(pin, unpin, export, snapshots=not without_snapshots)
    from oomscope.store.session import default_home

    if prune:
        for name in library.prune():
            click.echo(f"deleted {name}", err=True)
    found = library.sessions()
    rows = [describe(each) for each in (found if show_all else found[:limit])]
    if as_json:
        value = {
            "schema": "oomscope.sessions/1",
            "home": str(default_home()),
            "count": len(found),
            "sessions": rows,
        }
        click.echo(json.dumps(value, indent=1, ensure_ascii=False))
        return 0
    if not rows:
        click.echo("no sessions yet; oomscope run train.py makes one", err=True)
        return 0
    for line in _table(rows):
        click.echo(line)
    if len(rows) < len(found):
        click.echo(f"{len(found) - len(rows)} older ones: oomscope sessions --all", err=True)
    return 0


def _change(pin: str | None, unpin: str | None, export: str | None, *, snapshots: bool) -> int:
    """What is done with one session in place of listing all."""
    from oomscope.store import archive, library

    if pin:
        library.find(pin).pin()
    if unpin:
        library.find(unpin).unpin()
    if export:
        click.echo(archive.pack(library.find(export), Path.cwd(), snapshots=snapshots))
    return 0


def describe(session: Session) -> dict[str, Any]:
    """One session as an entry of `oomscope.sessions/1`; a damaged file inside leaves its field null."""
    attempts = session.attempts()
    last = attempts[-1] if attempts else None
    result = _quietly(last, "result")
    findings = _quietly(last, "findings")
    verdicts = (findings or {}).get("verdicts")
    first = verdicts[0] if isinstance(verdicts, list) and verdicts and isinstance(verdicts[0], dict) else {}
    created = session.info.get("created")
    command = session.info.get("command")
    return {
        "id": session.id,
        "path": str(session.path),
        "created_ns": created if isinstance(created, int) else None,
        "state": session.current_state(),
        "command": [str(each) for each in command] if isinstance(command, list) else [],
        "cwd": session.info.get("cwd"),
        "host": session.info.get("host"),
        "device": session.info.get("device"),
        "attempts": len(attempts),
        "exit_code": (result or {}).get("exit_code"),
        "oom": (result or {}).get("oom"),
        "rule": first.get("rule"),
        "pinned": session.is_pinned,
    }


def _quietly(attempt: Attempt | None, name: str) -> dict[str, Any] | None:
    if attempt is None:
        return None
    try:
        value: dict[str, Any] | None = getattr(attempt, name)()
    except OomscopeError:
        return None
    return value


def _table(rows: list[dict[str, Any]]) -> list[str]:
    now = time.time()
    cells = [("SESSION", "AGE", "STATE", "ATTEMPTS", "CAUSE", "COMMAND")]
    for row in rows:
        age = "" if row["created_ns"] is None else _age(now - row["created_ns"] / 1e9)
        cells.append(
            (
                row["id"],
                age,
                row["state"],
                str(row["attempts"]),
                row["rule"] or ("out of memory" if row["oom"] else "-"),
                " ".join(os.path.basename(word) if os.sep in word else word for word in row["command"]),
            )
        )
    widths = [max(len(line[column]) for line in cells) for column in range(5)]
    lines = (
        "  ".join([*(text.ljust(width) for text, width in zip(line, widths, strict=False)), line[5]]).rstrip()
        for line in cells
    )
    # A line never wraps in a terminal; in a file or a pipe nothing is cut that could be searched for.
    columns = shutil.get_terminal_size().columns if sys.stdout.isatty() else None
    return [_shortened(line, columns) for line in lines]


def _shortened(text: str, limit: int | None) -> str:
    return text if limit is None or len(text) <= limit else text[: limit - 1] + "…"


def _age(seconds: float) -> str:
    for limit, divisor, unit in ((90, 1, "s"), (5400, 60, "min"), (129600, 3600, "h")):
        if seconds < limit:
            return f"{max(0, round(seconds / divisor))} {unit}"
    return f"{round(seconds / 86400)} d"
