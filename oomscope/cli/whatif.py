"""`oomscope whatif`: what other allocator settings would have needed."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import click

from oomscope.cli._snapshot_options import limits_of, selection_of
from oomscope.cli.replay import parse_conf
from oomscope.core.allocator.measures import OomMeasures, at_oom
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.verify import verify
from oomscope.core.allocator.whatif import Assessment, assess
from oomscope.core.snapshot.columns import StackTable
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.errors import ExitCode, UsageError
from oomscope.simulate.cards import resolve
from oomscope.store.snapshots import load_snapshot
from oomscope.units import parse_size
from oomscope.views.allocator import (
    TWO_NUMBERS,
    WHATIF_HEADS,
    failure_json,
    failure_lines,
    whatif_advice,
    whatif_bounds,
    whatif_rows,
)


@click.command()
@click.argument("path", type=click.Path(path_type=Path, dir_okay=False))
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.whatif/1)."
)
@click.option(
    "--conf",
    "confs",
    metavar="TEXT",
    multiple=True,
    help="Settings to try; repeat for several. Default: the usual.",
)
@click.option(
    "--capacity", metavar="SIZE", help="Bytes for this process, such as 24GiB, or a card: a100-40g."
)
@click.option("--device", type=click.IntRange(0), default=None, help="Look at one device only.")
@click.option("--last", type=click.IntRange(1), metavar="N", help="Look at the last N events only.")
@click.option(
    "--budget", type=click.FloatRange(min=0.01), default=60.0, show_default=True, metavar="SECONDS",
    help="Time for each device; beyond it fewer runs are made, and the answer says so.",
)  # fmt: skip
@click.option("--max-memory", metavar="SIZE", help="Memory that reading may take, such as 16GiB.")
@click.option("--max-seconds", type=click.FloatRange(min=0.1), help="Time that reading the file may take.")
def whatif(
    path: Path,
    as_json: bool,
    confs: tuple[str, ...],
    capacity: str | None,
    device: int | None,
    last: int | None,
    budget: float,
    max_memory: str | None,
    max_seconds: float | None,
) -> int:
    """Predict peak, smallest sufficient device and retries of a recorded run under other allocator settings.

    Nothing is predicted for a history that the model does not reproduce exactly (exit code 1); see oomscope
    replay.
    """
    configs = [config for config in map(parse_conf, confs) if config is not None] or None
    limit = capacity_of(capacity)
    snapshot = load_snapshot(
        path, limits=limits_of(max_memory, max_seconds), selection=selection_of(last, None)
    )
    chosen = [each for each in snapshot.devices if device is None or each.device == device]
    if device is not None and not chosen:
        raise UsageError(f"--device {device}: the file has {len(snapshot.devices)} devices")
    chosen = [each for each in chosen if len(each.events)] or chosen[:1]
    found = [answer(snapshot, each, capacity=limit, configs=configs, budget_s=budget) for each in chosen]
    trusted = bool(found) and all(each.assessment.trusted for each in found)
    if as_json:
        devices = [
            {**each.assessment.to_json(), "failure": failure_json(each.failure, snapshot.stacks)}
            for each in found
        ]
        click.echo(
            json.dumps({"schema": "oomscope.whatif/1", "trusted": trusted, "devices": devices}, indent=1)
        )
    else:
        click.echo(whatif_text(path.name, found, snapshot.stacks))
    return int(ExitCode.DONE if trusted else ExitCode.ANSWER_IS_NO)


@dataclass(frozen=True, slots=True)
class Answer:
    """What can be said of one device."""

    assessment: Assessment
    failure: OomMeasures | None
    """The state before the last request that failed, if one did."""


def answer(
    snapshot: Snapshot,
    device: DeviceSnapshot,
    *,
    capacity: int | None = None,
    configs: list[AllocatorConfig] | None = None,
    budget_s: float | None = None,
) -> Answer:
    """Replay once, then ask for other settings and for the failure."""
    checked = verify(snapshot, device)
    return Answer(
        assess(
            snapshot,
            device,
            capacity=capacity,
            configs=configs,
            time_budget_s=budget_s,
            verification=checked,
        ),
        at_oom(snapshot, device, verification=checked) if checked.exact else None,
    )


def capacity_of(text: str | None) -> int | None:
    """Bytes of `--capacity`: a size as it stands, or what a card leaves for a process.

    Raises:
        UsageError: neither a size nor a card.
    """
    if text is None:
        return None
    try:
        return parse_size(text)
    except ValueError:
        pass
    try:
        return resolve(text).capacity_bytes()
    except ValueError as error:
        raise UsageError(f"--capacity: {error}") from error


def whatif_text(name: str, found: list[Answer], stacks: StackTable) -> str:
    """The answer for people."""
    lines = [name]
    for each in found:
        assessment = each.assessment
        lines.append(f"device {assessment.device}")
        if not assessment.trusted:
            lines.append(f"  No prediction: {assessment.reason}.")
            continue
        lines += [f"  {line}" for line in whatif_bounds(assessment)]
        if each.failure is not None:
            lines += [f"  {line}" for line in failure_lines(each.failure, stacks)]
        lines += ["", *_table(assessment), "", f"  {whatif_advice(assessment)}"]
        lines += [f"  Note: {note}." for note in assessment.notes]
    if any(each.assessment.trusted for each in found):
        lines += ["", TWO_NUMBERS]
    return "\n".join(lines)


def _table(found: Assessment) -> list[str]:
    rows = [WHATIF_HEADS, *(row.cells for row in whatif_rows(found))]
    widths = [max(len(row[column]) for row in rows) for column in range(len(WHATIF_HEADS))]
    return [
        "  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
