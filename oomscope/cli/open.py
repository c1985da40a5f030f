"""`oomscope open`: the Snapshot screen on a file, a folder of ranks, or a session."""

from __future__ import annotations

from pathlib import Path

import click

from oomscope.cli._snapshot_options import limits_of, loading_options, selection_of
from oomscope.errors import InputError, NotATerminal, SnapshotError


@click.command("open")
@click.argument("path", type=click.Path(path_type=Path))
@loading_options
def open_(
    path: Path, last: int | None, window: str | None, max_memory: str | None, max_seconds: float | None
) -> None:
    """Browse a memory snapshot in the terminal.

    PATH is a snapshot, a folder with one file per rank, or a session's folder or name.
    """
    import os
    import sys

    options = limits_of(max_memory, max_seconds), selection_of(last, window)
    target = _resolved(path)
    if not (sys.stdin.isatty() and sys.stderr.isatty()) or os.environ.get("TERM") == "dumb":
        raise NotATerminal("oomscope open needs a terminal", hint=f"without one: oomscope inspect {path}")
    from oomscope.tui.app import OomscopeApp
    from oomscope.views.snapshot_files import offered

    if not offered(target):
        raise SnapshotError(
            f"{path} holds no snapshot files", hint="snapshots end in .pickle, .pkl, .p or .html"
        )
    app = OomscopeApp(snapshot=target, start="snapshot")
    app.snapshot_options = options  # type: ignore[attr-defined]
    app.run()


def _resolved(path: Path) -> Path:
    """The file or folder; a session's name stands for its folder.

    Raises:
        InputError: neither.
    """
    if path.exists():
        return path
    from oomscope.store.library import find

    try:
        return find(str(path)).path
    except InputError as error:
        raise SnapshotError(f"{path}: no such file, folder or session") from error
