"""Options that the snapshot commands share, and loading with a progress line on standard error."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

from oomscope.errors import SnapshotError, UsageError
from oomscope.store.snapshots import Limits, Selection, SnapshotLoader
from oomscope.units import parse_size
from oomscope.views.snapshot_files import offered

if TYPE_CHECKING:
    from oomscope.core.snapshot.analysis import DeviceAnalysis
    from oomscope.core.snapshot.model import Snapshot

F = TypeVar("F", bound=Callable[..., Any])


def loading_options(command: F) -> F:
    """`--last`, `--range`, `--max-memory`, `--max-seconds`."""
    options = (
        click.option("--last", type=click.IntRange(1), metavar="N", help="Look at the last N events only."),
        click.option("--range", "window", metavar="A:B", help="Look at events A up to B only."),
        click.option("--max-memory", metavar="SIZE", help="Memory that reading may take, such as 16GiB."),
        click.option(
            "--max-seconds", type=click.FloatRange(min=0.1), help="Time that reading a file may take."
        ),
    )
    for option in reversed(options):
        command = option(command)
    return command


def limits_of(max_memory: str | None, max_seconds: float | None) -> Limits:
    """Limits from the options.

    Raises:
        UsageError: not a size.
    """
    try:
        memory = parse_size(max_memory) if max_memory else None
    except ValueError as error:
        raise UsageError(f"--max-memory: {error}") from error
    return Limits(memory_bytes=memory, seconds=max_seconds)


def selection_of(last: int | None, window: str | None) -> Selection:
    """The part of the history from the options.

    Raises:
        UsageError: both options, or a range that is none.
    """
    if last is not None and window is not None:
        raise UsageError("--last and --range exclude each other")
    if window is None:
        return Selection(last=last)
    start, colon, stop = window.partition(":")
    try:
        first, end = int(start or 0), int(stop) if stop else None
    except ValueError:
        first, end = -1, None
    if not colon or first < 0 or (end is not None and end <= first):
        raise UsageError(f"--range {window}: write two event numbers, such as 1000:2000")
    return Selection(start=first, stop=end)


def files_of(path: Path) -> list[Path]:
    """`path` itself, or the snapshot files in a folder, which may be a session's.

    Raises:
        SnapshotError: the folder holds none.
    """
    found = offered(path)
    if not found:
        raise SnapshotError(
            f"{path} holds no snapshot files", hint="snapshots end in .pickle, .pkl, .p or .html"
        )
    return found


def load(loader: SnapshotLoader, path: Path, selection: Selection) -> tuple[Snapshot, list[DeviceAnalysis]]:
    """A snapshot with its analyses; shows progress when standard error is a terminal."""
    show = sys.stderr.isatty()

    def progress(fraction: float, text: str) -> None:
        if show:
            filled = int(fraction * 20)
            sys.stderr.write(f"\r{path.name}  [{'#' * filled}{'.' * (20 - filled)}] {text:<12}")
            sys.stderr.flush()

    try:
        snapshot = loader.load(path, selection=selection, on_progress=progress)
    finally:
        if show:
            sys.stderr.write("\r\x1b[2K")
            sys.stderr.flush()
    from oomscope.core.snapshot.analysis import analyse

    return snapshot, analyse(snapshot)
