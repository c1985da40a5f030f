"""`oomscope top`: the GPUs of this machine and who uses their memory."""

from __future__ import annotations

import json

import click

from oomscope.cli.terminal import has_screens
from oomscope.errors import ExitCode


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option("--once", is_flag=True, help="Print one reading and leave.")
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.machine/1)."
)
@click.option("--interval", type=click.FloatRange(0.5, 60.0), default=1.0, show_default=True, metavar="SECONDS",
              help="Between two readings.")  # fmt: skip
@click.option("--ui", type=click.Choice(["auto", "never", "always"]), default="auto", show_default=True,
              help="Screen in a terminal, or plain text.")  # fmt: skip
def top(once: bool, as_json: bool, interval: float, ui: str) -> int:
    """Show the GPUs of this machine, their processes, and which rank of which job each one is.

    Without a terminal, one reading is printed.
    """
    from oomscope.collect.machine import MachineWatch
    from oomscope.launch.whose import Owners, TorchReadings
    from oomscope.views.machine import machine_json, machine_view
    from oomscope.views.machine_text import machine_lines

    if not once and not as_json and has_screens(ui):
        from oomscope.tui.screens.machine import MachineApp

        MachineApp(interval_s=interval).run()
        return int(ExitCode.DONE)
    watch = MachineWatch(period_s=interval)
    try:
        watch.first_reading()
    finally:
        watch.close()
    pids = [row["pid"] for rows in watch.machine.holders().values() for row in rows]
    view = machine_view(watch.machine, watch.statuses, Owners().of(pids), TorchReadings().poll())
    if as_json:
        click.echo(json.dumps(machine_json(view), indent=1))
    else:
        click.echo("\n".join(machine_lines(view)))
    return int(ExitCode.DONE)
