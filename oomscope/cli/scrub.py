"""`oomscope scrub`: a snapshot without names of people, to be shared."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oomscope.cli._snapshot_options import limits_of
from oomscope.cli.export import refuse_existing
from oomscope.store.snapshots import SnapshotLoader


@click.command()
@click.argument("path", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="File to write; default NAME.scrubbed.pickle."
)
@click.option(
    "--name", "names", multiple=True, metavar="NAME", help="Another name to replace; may be repeated."
)
@click.option("--force", is_flag=True, help="Replace an existing file.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.scrub/1)."
)
@click.option("--max-memory", metavar="SIZE", help="Memory that reading may take, such as 16GiB.")
def scrub(
    path: Path,
    output: Path | None,
    names: tuple[str, ...],
    force: bool,
    as_json: bool,
    max_memory: str | None,
) -> None:
    """Replace user names and home folders in a snapshot, the same name by the same word everywhere.

    Events, addresses, sizes and the sharing of objects stay as they are; names of files, functions and
    modules stay too: read them before you
    publish.
    """
    target = output or path.with_name(path.name.split(".")[0] + ".scrubbed.pickle")
    refuse_existing(path, target, force)
    with SnapshotLoader(limits=limits_of(max_memory, None)) as loader:
        done = loader.convert(path, target, scrub=True, names=names)
    if as_json:
        click.echo(json.dumps({"schema": "oomscope.scrub/1", **done}, indent=1))
        return
    replaced = done["replaced"]
    click.echo(f"wrote {target}: {len(replaced)} name{'' if len(replaced) == 1 else 's'} replaced")
    for old, new in replaced.items():
        click.echo(f"  {old} -> {new}")
