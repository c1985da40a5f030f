"""`oomscope diff`: what is live in one snapshot, step or rank and not in another."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oomscope.cli._snapshot_options import limits_of, load, loading_options, selection_of
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.diff import Side
from oomscope.core.snapshot.diff import diff as difference_of
from oomscope.core.snapshot.moments import moment
from oomscope.core.snapshot.words import FORMS
from oomscope.errors import ExitCode, UsageError
from oomscope.report.snapshot import diff_text
from oomscope.report.snapshot_json import diff_json
from oomscope.store.snapshots import SnapshotLoader
from oomscope.units import parse_size
from oomscope.views.snapshot import moment_name


@click.command()
@click.argument("before", type=click.Path(path_type=Path))
@click.argument("after", type=click.Path(path_type=Path), required=False)
@click.option("--at", default="auto", metavar="MOMENT", help=f"Moment in both: {FORMS}.")
@click.option("--to", metavar="MOMENT", help="Moment in AFTER, when it is another one.")
@click.option(
    "--device", type=click.IntRange(0), default=None, help="Device in both; by default the busiest one."
)
@click.option(
    "--top", type=click.IntRange(1), default=10, help="How many stacks of each list to show as text."
)
@click.option("--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.diff/1).")
@click.option("--fail-over", metavar="SIZE", help="Exit with 1 when memory grew by more than this.")
@loading_options
def diff(
    before: Path,
    after: Path | None,
    at: str,
    to: str | None,
    device: int | None,
    top: int,
    as_json: bool,
    fail_over: str | None,
    last: int | None,
    window: str | None,
    max_memory: str | None,
    max_seconds: float | None,
) -> int:
    """Compare two memory snapshots, or two moments of one.

    \b
    oomscope diff monday.pickle tuesday.pickle
    oomscope diff rank0.pickle rank5.pickle --at end
    oomscope diff run.pickle --at step:3 --to step:10
    """  # noqa: D301
    if after is None and to is None:
        raise UsageError("name a second snapshot, or two moments of one: --at step:3 --to step:10")
    limit = _size(fail_over)
    selection = selection_of(last, window)
    with SnapshotLoader(limits=limits_of(max_memory, max_seconds)) as loader:
        _, first = load(loader, before, selection)
        second = load(loader, after, selection)[1] if after is not None else first
    old, new = _pick(first, before, device), _pick(second, after or before, device)
    moments = moment(old, at), moment(new, to or at)
    found = difference_of(Side(old, moments[0].row), Side(new, moments[1].row))
    names = (
        f"{before.name} {moment_name(old, moments[0])}",
        f"{(after or before).name} {moment_name(new, moments[1])}",
    )
    click.echo(
        json.dumps(diff_json(found, names), indent=1) if as_json else diff_text(found, names, top=top),
        nl=as_json,
    )
    grown = found.after_bytes - found.before_bytes
    return int(ExitCode.ANSWER_IS_NO if limit is not None and grown > limit else ExitCode.DONE)


def _size(text: str | None) -> int | None:
    try:
        return parse_size(text) if text else None
    except ValueError as error:
        raise UsageError(f"--fail-over: {error}") from error


def _pick(analyses: list[DeviceAnalysis], path: Path, device: int | None) -> DeviceAnalysis:
    if not analyses:
        raise UsageError(f"{path} holds no device")
    if device is None:
        return max(
            analyses, key=lambda each: (len(each.device.events), each.totals.reserved, -each.device.device)
        )
    if device >= len(analyses):
        raise UsageError(f"{path} has devices 0 to {len(analyses) - 1}")
    return analyses[device]
