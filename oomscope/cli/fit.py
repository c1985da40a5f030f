"""`oomscope fit`: the largest batch size or sequence length that fits on a simulated card."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomscope.cli.device import rank_numbers, simulated_card
from oomscope.errors import ExitCode, UsageError
from oomscope.units import format_bytes

if TYPE_CHECKING:
    from oomscope.launch.fit import Point
    from oomscope.simulate.cards import Card


class FitCommand(click.Command):
    """Takes its own options from before the script, and some from behind it.

    --device sim:…, --max, --json.
    """

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        takes_value = {
            name: isinstance(each, click.Option) and not each.is_flag
            for each in self.params
            for name in each.opts
        } | {"--help": False, "-h": False}
        position, ours = 0, []
        while position < len(args) and args[position].partition("=")[0] in takes_value:
            word = args[position]
            width = 2 if takes_value[word.partition("=")[0]] and "=" not in word else 1
            ours += args[position : position + width]
            position += width
        behind, rest = _take_behind(args[position:])
        return super().parse_args(ctx, [*ours, *behind, "--", *rest])


def _take_behind(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Our options behind the script; everything else is the script's."""
    ours: list[str] = []
    rest: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        following = args[position + 1] if position + 1 < len(args) else ""
        if (word == "--device" and following.startswith("sim:")) or (word == "--max" and following):
            ours += [word, following]
            position += 1
        elif word.startswith(("--device=sim:", "--max=")) or word == "--json":
            ours.append(word)
        else:
            rest.append(word)
        position += 1
    return ours, rest


@click.command(cls=FitCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--device", metavar="sim:CARD", required=True, help="The card: sim:a100-40g, sim:24GiB.")
@click.option("--max", "option", metavar="OPTION", required=True,
              help="The script's own option to raise: batch_size, seq_len.")  # fmt: skip
@click.option(
    "--from", "lowest", type=click.IntRange(min=1), default=1, show_default=True, help="Smallest value."
)
@click.option("--to", "highest", type=click.IntRange(min=1), help="Largest value; default: no limit.")
@click.option("--multiple-of", type=click.IntRange(min=1), default=1, show_default=True,
              help="Try multiples of this only.")  # fmt: skip
@click.option("--steps", type=click.IntRange(min=1), default=2, show_default=True,
              help="Optimizer steps of each run; the second has optimizer states.")  # fmt: skip
@click.option("--ranks", metavar="0,7", help="Ranks to simulate (default: the first and the last).")
@click.option("--python", metavar="PATH", help="The job's interpreter (default: the active environment's).")
@click.option("--json", "as_json", is_flag=True, help="Print one oomscope.fit/1 object on stdout.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def fit(
    device: str, option: str, lowest: int, highest: int | None, multiple_of: int, steps: int,
    ranks: str | None, python: str | None, as_json: bool, command: tuple[str, ...],
) -> int:  # fmt: skip
    """Find the largest value of an option of a script that fits on a simulated card.

    \b
    oomscope fit --device sim:a100-40g --max batch_size train.py --lr 1e-3
    oomscope fit --device sim:h100-80g --max seq_len --nproc-per-node 8 train.py

    Exit code 1 when not even the smallest value fits.
    """  # noqa: D301
    from oomscope.launch.command import build_command, job_python
    from oomscope.launch.fit import Prober, find_option, largest
    from oomscope.launch.job import JobSpec
    from oomscope.launch.selftest import check_simulator
    from oomscope.store.session import Session

    card = simulated_card(device)
    if highest is not None and highest < lowest:
        raise UsageError(f"--to {highest} is below --from {lowest}")
    interpreter = job_python(asked=python)
    launch = build_command(command, interpreter)
    found = find_option(option, launch.command, launch.script)
    check_simulator(interpreter)
    session = Session.create(
        name=launch.script.name if launch.script else Path(launch.command[0]).name,
        command=sys.argv[1:],
        launcher=launch.kind,
        python=interpreter,
        device=device,
    )
    attempt = session.new_attempt(command=list(launch.command), kind="fit")
    chosen = rank_numbers(ranks)
    spec = JobSpec(
        command=launch.command, cwd=Path.cwd(), env=dict(os.environ), device=card, plan={}, steps=steps,
        detail=False, role="prediction", attempt_dir=attempt.path, output="files", ranks=chosen,
    )  # fmt: skip
    capacity = card.capacity_bytes(_world_size(launch.command))
    prober = Prober(spec, session, attempt, found, capacity)

    def probe(value: int) -> Point:
        point = prober(value)
        if not as_json:
            click.echo(_row(found.flag, point), err=True)
        return point

    session.set_state("running")
    best, curve = largest(
        probe, found.current or lowest, limit=capacity, lowest=lowest, highest=highest, multiple=multiple_of
    )
    session.set_state("done")
    if as_json:
        click.echo(json.dumps(_object(found.flag, best, curve, card, capacity, prober.assumed), indent=1))
    else:
        click.echo(_verdict(found.flag, best, curve, card, capacity))
    return int(ExitCode.DONE if best is not None else ExitCode.ANSWER_IS_NO)


def _world_size(command: Sequence[str]) -> int:
    """2 stands for any number of ranks: NCCL's buffers are taken off."""
    from oomscope.launch.command import TORCHRUN_MODULE

    return 2 if TORCHRUN_MODULE in command else 1


def _object(
    flag: str, best: int | None, curve: Sequence[Point], card: Card, capacity: int, assumed: dict[str, int]
) -> dict[str, Any]:
    return {
        "schema": "oomscope.fit/1",
        "option": flag,
        "largest": best,
        "card": card.name,
        "capacity_bytes": capacity,
        "curve": [point.to_json() for point in curve],
        "assumed_values": assumed,
    }


def _row(flag: str, point: Point) -> str:
    verdict = "fits" if point.fits else "does not fit"
    return f"{flag} {point.value}: peak {format_bytes(point.peak_reserved_bytes)} reserved, {verdict}"


def _verdict(flag: str, best: int | None, curve: Sequence[Point], card: Card, capacity: int) -> str:
    limit = format_bytes(capacity)
    if best is None:
        smallest = curve[0]
        return (
            f"Nothing fits: {flag} {smallest.value} needs {format_bytes(smallest.peak_reserved_bytes)} (simulated), "
            f"{card.name} has {limit}."
        )
    peak = next(point.peak_reserved_bytes for point in curve if point.value == best)
    above = next((point for point in curve if point.value > best), None)
    text = f"Largest {flag} on {card.name}: {best}; peak {format_bytes(peak)} of {limit} (simulated)"
    if above is None:
        return text + ". Nothing larger was tried."
    return text + f"; {above.value} would need {format_bytes(above.peak_reserved_bytes)}."
