"""`oomscope inspect`: a snapshot as text or JSON."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from oomscope.cli._snapshot_options import files_of, limits_of, load, loading_options, selection_of
from oomscope.core.snapshot.words import FORMS, RANKINGS
from oomscope.errors import ExitCode, SnapshotError
from oomscope.store._snapshot_source import source_line
from oomscope.store.snapshots import SnapshotLoader


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.snapshot/1)."
)
@click.option("--at", default="auto", metavar="MOMENT", help=f"Moment to look at: {FORMS}.")
@click.option("--by", type=click.Choice(RANKINGS), default="stack", help="What to rank by.")
@click.option("--top", type=click.IntRange(1), default=None, help="How many entries of each ranking to show.")
@click.option("--device", type=click.IntRange(0), default=None, help="Show one device only.")
@loading_options
def inspect(
    path: Path,
    as_json: bool,
    at: str,
    by: str,
    top: int | None,
    device: int | None,
    last: int | None,
    window: str | None,
    max_memory: str | None,
    max_seconds: float | None,
) -> int:
    """Summarise a memory snapshot, or each one in a folder.

    PATH is a pickle of torch.cuda.memory._dump_snapshot(), also compressed, or an HTML page of torch's own
    viewer.
    Without --at, the state just before the last out-of-memory error is shown; without one, the peak.
    """
    selection = selection_of(last, window)
    objects: list[Any] = []
    failed = 0
    files = files_of(path)
    with SnapshotLoader(limits=limits_of(max_memory, max_seconds)) as loader:
        for number, file in enumerate(files):
            try:
                snapshot, analyses = load(loader, file, selection)
            except SnapshotError as error:
                if len(files) == 1:
                    raise
                click.echo(f"oomscope: {error.message}", err=True)
                failed += 1
                continue
            # Only now: all this brings numpy, which was brought while the file was read.
            from oomscope.core.snapshot.moments import moment
            from oomscope.report.snapshot import snapshot_text
            from oomscope.report.snapshot_json import TOP, snapshot_json

            chosen = [each for each in analyses if device is None or each.device.device == device]
            moments = [moment(each, at) if _has_data(each) else each.focus for each in chosen]
            if as_json:
                objects.append(snapshot_json(snapshot, chosen, moments, top=top or TOP))
            else:
                text = snapshot_text(snapshot, chosen, moments, by=by, top=top or 10, source_of=source_line)
                click.echo(("\n" if number else "") + text, nl=False)
    if as_json:
        found = {"schema": "oomscope.snapshots/1", "snapshots": objects} if path.is_dir() else objects[0]
        click.echo(json.dumps(found, indent=1))
    return int(ExitCode.INPUT if failed == len(files) else ExitCode.DONE)


def _has_data(analysis: Any) -> bool:
    return bool(len(analysis.device.events) or len(analysis.device.segments))
