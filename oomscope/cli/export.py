"""`oomscope export`: a snapshot for another tool."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import IO

import click

from oomscope.cli._snapshot_options import limits_of, load, loading_options, selection_of
from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.moments import moment
from oomscope.core.snapshot.words import FORMS
from oomscope.errors import UsageError
from oomscope.report.html_snapshot import snapshot_html
from oomscope.report.snapshot_export import write_csv, write_flamegraph, write_json, write_perfetto
from oomscope.store.snapshots import Selection, SnapshotLoader

SUFFIXES = {
    "memory-viz": ".pickle", "html": ".html", "json": ".json", "csv": ".csv", "perfetto": ".perfetto.json",
    "flamegraph": ".folded",
}  # fmt: skip


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option("--to", "form", required=True, type=click.Choice(list(SUFFIXES)), help="Form to write.")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help='File to write; "-" is standard output.'
)
@click.option("--at", default="auto", metavar="MOMENT", help=f"Moment for html and flamegraph: {FORMS}.")
@click.option("--force", is_flag=True, help="Replace an existing file.")
@loading_options
def export(
    path: Path,
    form: str,
    output: Path | None,
    at: str,
    force: bool,
    last: int | None,
    window: str | None,
    max_memory: str | None,
    max_seconds: float | None,
) -> None:
    """Convert a memory snapshot for another tool.

    \b
    memory-viz   torch's own form, pickle protocol 4: docs.pytorch.org/memory_viz, torch.cuda._memory_viz
    html         one page without network: timeline and calls, for a colleague without oomscope
    perfetto     counters and ranges for ui.perfetto.dev
    flamegraph   folded stacks for speedscope, inferno, flamegraph.pl
    csv, json    every allocation with birth, death, category and stack
    """  # noqa: D301
    target = output or Path(path.name.split(".")[0] + SUFFIXES[form])
    selection = selection_of(last, window)
    with SnapshotLoader(limits=limits_of(max_memory, max_seconds)) as loader:
        if form == "memory-viz":
            if selection != Selection():
                raise UsageError("memory-viz writes the whole history; --last and --range do not apply")
            refuse_existing(path, target, force)
            loader.convert(path, target)
        else:
            if str(target) != "-":
                refuse_existing(path, target, force)
            snapshot, analyses = load(loader, path, selection)
            moments = [moment(each, at) if len(each.lives) else each.focus for each in analyses]
            _write(target, form, analyses, moments, lambda: snapshot_html(snapshot, analyses, moments))
    if str(target) != "-":
        click.echo(f"wrote {target}", err=True)


def refuse_existing(path: Path, target: Path, force: bool) -> None:
    """Protect files that are there.

    Raises:
        UsageError: `target` is the source, a standard stream, or exists and `force` is not set.
    """
    if str(target) == "-":
        raise UsageError("this form is binary: name a file with --output")
    if target.exists() and path.exists() and target.samefile(path):
        raise UsageError(f"{target} is the file that is read", hint="name another one with --output")
    if target.exists() and not force:
        raise UsageError(
            f"{target} exists", hint="replace it with --force, or name another file with --output"
        )


def _write(
    target: Path, form: str, analyses: list[DeviceAnalysis], moments: list[Focus], page: Callable[[], str]
) -> None:
    if str(target) == "-":
        _render(sys.stdout, form, analyses, moments, page)
        return
    try:
        with target.open("w", encoding="utf-8", newline="") as out:
            _render(out, form, analyses, moments, page)
    except OSError as error:
        raise UsageError(f"{target}: {error.strerror or error}") from error


def _render(
    out: IO[str], form: str, analyses: list[DeviceAnalysis], moments: list[Focus], page: Callable[[], str]
) -> None:
    if form == "html":
        out.write(page())
    elif form == "perfetto":
        write_perfetto(out, analyses)
    elif form == "flamegraph":
        write_flamegraph(out, analyses, moments)
    elif form == "csv":
        write_csv(out, analyses)
    else:
        write_json(out, analyses)
