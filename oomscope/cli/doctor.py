"""`oomscope doctor`: what works on this machine, and how to mend what does not."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import click

from oomscope.errors import ExitCode

if TYPE_CHECKING:
    from oomscope.launch.doctor_host import Check

_MARKS = {"ok": "ok", "warn": "! warn", "error": "▲ error"}


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--json", "as_json", is_flag=True, help="One JSON object on standard output (oomscope.doctor/1)."
)
@click.option(
    "--python", metavar="PROGRAM", help="The job's interpreter; the one oomscope run would use by default."
)
@click.option("--quick", is_flag=True, help="Leave out the checks that import torch.")
def doctor(as_json: bool, python: str | None, quick: bool) -> int:
    """Say what works on this machine, and how to mend what does not.

    Every check tries the real thing: it asks the driver, looks into a process of its own, runs the simulated
    device. Exit code 1 when something is broken; what is merely missing is a warning.
    """
    from oomscope.launch.doctor import job_python, run_checks

    checks: list[Check] = []
    for check in run_checks(job_python(python), with_torch=not quick):
        checks.append(check)
        if not as_json:
            click.echo("\n".join(lines(check)))
    broken = sum(check.status == "error" for check in checks)
    if as_json:
        click.echo(json.dumps(to_json(checks), indent=1))
    else:
        warned = sum(check.status == "warn" for check in checks)
        click.echo(f"\n{len(checks) - broken - warned} ok, {warned} warnings, {broken} errors")
    return int(ExitCode.ANSWER_IS_NO if broken else ExitCode.DONE)


def lines(check: Check) -> list[str]:
    """One check as text, and its remedy below."""
    out = [f"{_MARKS[check.status]:<8}{check.title:<22}{check.text}"]
    if check.remedy:
        out.append(f"{'':30}→ {check.remedy}")
    return out


def to_json(checks: list[Check]) -> dict[str, Any]:
    """`oomscope.doctor/1`."""
    from oomscope import __version__

    return {
        "schema": "oomscope.doctor/1",
        "version": __version__,
        "ok": all(check.status != "error" for check in checks),
        "checks": [check.to_json() for check in checks],
    }
