"""`oomscope replay`: check that the allocator model reproduces a snapshot."""

from __future__ import annotations

import json
from pathlib import Path

import click

from oomscope.cli._snapshot_options import limits_of, selection_of
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.verify import Verification, verify
from oomscope.errors import ExitCode, UsageError
from oomscope.store.snapshots import load_snapshot
from oomscope.views.allocator import replay_details, replay_verdict


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.replay/1)."
)
@click.option(
    "--conf", metavar="TEXT", help="Replay with these allocator settings instead of the recorded ones."
)
@click.option("--device", type=click.IntRange(0), default=None, help="Replay one device only.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Replay the last N events only.")
@click.option("--max-memory", metavar="SIZE", help="Memory that reading may take, such as 16GiB.")
@click.option("--max-seconds", type=click.FloatRange(min=0.1), help="Time that reading the file may take.")
def replay(
    path: Path,
    as_json: bool,
    conf: str | None,
    device: int | None,
    last: int | None,
    max_memory: str | None,
    max_seconds: float | None,
) -> int:
    """Replay a memory snapshot through the allocator model, and say where the two differ.

    When every address, segment and final block agrees, predictions made with the model can be trusted. Exit
    code 0 when all devices with a history are reproduced exactly, 1 when not.
    """
    config = parse_conf(conf)
    snapshot = load_snapshot(
        path, limits=limits_of(max_memory, max_seconds), selection=selection_of(last, None)
    )
    chosen = [each for each in snapshot.devices if device is None or each.device == device]
    if device is not None and not chosen:
        raise UsageError(f"--device {device}: the file has {len(snapshot.devices)} devices")
    found = [verify(snapshot, each, config=config) for each in chosen]
    if as_json:
        answer = {"schema": "oomscope.replay/1", "devices": [each.to_json() for each in found]}
        click.echo(json.dumps(answer, indent=1))
    else:
        click.echo(replay_text(path.name, found))
    checked = [each for each in found if each.exact is not None]
    return int(ExitCode.DONE if checked and all(each.exact for each in checked) else ExitCode.ANSWER_IS_NO)


def replay_text(name: str, found: list[Verification]) -> str:
    """The answer for people."""
    lines = [name]
    shown = [each for each in found if each.exact is not None] or found[:1]
    for each in shown:
        lines.append(f"  {replay_verdict(each)}")
        if each.replay is not None:
            lines.extend(f"    {label:<10} {text}" for label, text in replay_details(each))
    return "\n".join(lines)


def parse_conf(text: str | None) -> AllocatorConfig | None:
    """Settings of an option.

    Raises:
        UsageError: the text names no settings that torch would take.
    """
    if text is None:
        return None
    try:
        return AllocatorConfig.parse(text)
    except ValueError as error:
        raise UsageError(f"--conf: {error}", hint="write it as in PYTORCH_CUDA_ALLOC_CONF") from error
