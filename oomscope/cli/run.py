"""`oomscope run`: the command line of the loop, with screens in a terminal and plain text elsewhere."""

from __future__ import annotations

import dataclasses
import json
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from oomscope.cli.device import rank_numbers, simulated_card
from oomscope.cli.terminal import has_screens
from oomscope.errors import ExitCode, OomscopeError, UsageError

if TYPE_CHECKING:
    from oomscope.launch.command import Launch
    from oomscope.launch.loop import RunRequest
    from oomscope.store.session import Session

RISK_NAMES = ("none", "exact", "rounding", "semantic", "topology")


class RunCommand(click.Command):
    """Takes its own options from before the script and leaves everything else, torchrun's included, untouched."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        ours, rest = self._split(args)
        return super().parse_args(ctx, [*ours, "--", *rest])

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        with _not_started():
            return super().make_context(*args, **kwargs)

    def _split(self, args: Sequence[str]) -> tuple[list[str], list[str]]:
        """Our options, and the rest: torchrun's options, the script and all that follows."""
        from oomscope.launch.command import is_torchrun_option, split_options

        takes_value = {
            name: isinstance(each, click.Option) and not each.is_flag
            for each in self.params
            for name in each.opts
        }
        takes_value |= {"--help": False, "-h": False}
        ours: list[str] = []
        rest: list[str] = []
        position = 0
        while position < len(args):
            word = args[position]
            name = word.partition("=")[0]
            if word == "--" or not word.startswith("-"):
                break
            if name in takes_value:
                width = 2 if takes_value[name] and "=" not in word else 1
                if position + width > len(args):
                    raise UsageError(f"{name} needs a value", hint="oomscope run --help")
                ours += args[position : position + width]
            elif is_torchrun_option(word):
                width = _width(split_options, args[position:])
                rest += args[position : position + width]
            else:
                raise self._unknown(name, takes_value)
            position += width
        return ours, rest + list(args[position:])

    @staticmethod
    def _unknown(name: str, known: dict[str, bool]) -> UsageError:
        from oomscope.launch.command import split_options

        near = get_close_matches(name, known, n=1)
        if near:
            return UsageError(f"no option {name}", hint=f"did you mean {near[0]}?")
        try:
            split_options([name])
        except UsageError as error:
            return error
        return UsageError(f"no option {name}", hint="oomscope run --help")


def _width(split: Any, args: Sequence[str]) -> int:
    """How many words the torchrun option at the start of `args` takes."""
    options, _ = split(list(args[:1])) if "=" in args[0] else _first_option(split, args)
    return len(options)


def _first_option(split: Any, args: Sequence[str]) -> tuple[list[str], list[str]]:
    try:
        one: tuple[list[str], list[str]] = split(list(args[:1]))
    except UsageError:  # it needs the next word as its value
        if len(args) < 2:
            raise
        return list(args[:2]), []
    return one


@contextmanager
def _not_started() -> Iterator[None]:
    """Give an error of ours code 125: 1 to 124 are the job's own, as with `timeout` and `docker run`."""
    try:
        yield
    except OomscopeError as error:
        error.exit_code = ExitCode.NOT_STARTED
        raise


@click.command(cls=RunCommand, context_settings={"help_option_names": ["-h", "--help"]})
@click.option(
    "--device", metavar="sim:CARD", help="Simulate a card (sim:a100-40g, sim:24GiB): no GPU is needed."
)
@click.option("--steps", type=click.IntRange(min=1), metavar="N", help="Stop after N optimizer steps.")
@click.option("--yes", "-y", is_flag=True, help="Take the recommended fix without asking.")
@click.option("--auto", is_flag=True, help="As --yes, without screens.")
@click.option(
    "--apply",
    "apply_",
    metavar="ID,…",
    help="Rerun with these fixes, not the recommended ones; with --steps or sim: even if nothing fails.",
)
@click.option("--plan", type=click.Path(dir_okay=False), help="Start with the fixes of a plan file.")
@click.option("--no-fix", is_flag=True, help="Stop after the diagnosis: predict and rerun nothing.")
@click.option("--risk", type=click.Choice(RISK_NAMES), default="rounding", show_default=True,
              help="The highest risk class that may be taken without asking.")  # fmt: skip
@click.option("--budget", metavar="20m", help="Start no further attempt after this time (90s, 20m, 2h).")
@click.option("--max-attempts", type=click.IntRange(min=1), default=3, show_default=True)
@click.option("--ranks", metavar="0,7", help="Ranks to simulate (default: the first and the last).")
@click.option("--detail", is_flag=True, help="Phases, modules and loader times from the first attempt on.")
@click.option(
    "--no-history", is_flag=True, help="Do not record the GPU's allocation history (1–2 µs an allocation)."
)
@click.option("--python", metavar="PATH", help="The job's interpreter (default: the active environment's).")
@click.option("--ui", type=click.Choice(["auto", "never", "always"]), default="auto", show_default=True,
              help="Screens in a terminal, or plain text.")  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print one oomscope.run/1 object on stdout.")
@click.argument("command", nargs=-1, type=click.UNPROCESSED)
def run(**options: Any) -> int:
    """Run a training script; when it runs out of memory, name the cause, predict each fix, and prove one.

    \b
    oomscope run train.py --lr 1e-3                        plain Python
    oomscope run --nproc-per-node 8 train.py               torchrun, with any of its options
    oomscope run -- accelerate launch train.py             any command, verbatim
    oomscope run --device sim:h100-80g train.py            on a simulated card

    The exit code is the job's own; 125 when it could not be started.
    """  # noqa: D301
    with _not_started():
        return _run(Options(**options))


@dataclasses.dataclass(frozen=True)
class Options:
    """The options as click parsed them."""

    device: str | None
    steps: int | None
    yes: bool
    auto: bool
    apply_: str | None
    plan: str | None
    no_fix: bool
    risk: str
    budget: str | None
    max_attempts: int
    ranks: str | None
    detail: bool
    no_history: bool
    python: str | None
    ui: str
    as_json: bool
    command: tuple[str, ...]


def _run(options: Options) -> int:
    from oomscope.launch.command import build_command, job_python
    from oomscope.launch.selftest import check_simulator
    from oomscope.store.session import Session

    python = job_python(asked=options.python)
    launch = build_command(options.command, python)
    card = simulated_card(options.device) if options.device else None
    chosen = _ids(options.apply_)
    _refuse_early(chosen)
    _refuse_early(_planned(options.plan))
    screens = not options.as_json and not options.auto and has_screens(options.ui)
    request = _request(options, launch, chosen, screens=screens)
    if card is not None:
        if screens:
            click.echo("oomscope: trying the simulated device, then the screens open …", err=True)
        check_simulator(python)
    session = Session.create(
        name=launch.name,
        command=sys.argv[1:],
        launcher=launch.kind,
        python=python,
        script=str(launch.script.absolute()) if launch.script else None,
        device=options.device,
    )
    return _with_screens(session, request) if screens else _in_foreground(session, request, options)


def _request(options: Options, launch: Launch, chosen: tuple[str, ...], *, screens: bool) -> RunRequest:
    from oomscope.launch.loop import RunRequest

    return RunRequest(
        command=launch.command,
        cwd=os.getcwd(),
        device=options.device.removeprefix("sim:") if options.device else None,
        steps=options.steps,
        ranks=rank_numbers(options.ranks),
        detail=options.detail,
        history=not options.no_history,
        output="files" if screens else "tee" if options.as_json else "through",
        take_best=options.yes or options.auto,
        chosen=chosen,
        initial=_planned(options.plan),
        allowed_risk=options.risk,
        max_attempts=options.max_attempts,
        budget_s=_seconds(options.budget),
        predict=not options.no_fix,
    )


def _in_foreground(session: Session, request: RunRequest, options: Options) -> int:
    from oomscope.launch.loop import Loop
    from oomscope.report.run import Narrator
    from oomscope.views.run_summary import run_object

    narrator = Narrator(session, sys.stderr)
    outcome = Loop(session, request, os.environ, on_event=narrator.event).run()
    narrator.finish(exit_code=outcome.exit_code, oom=outcome.oom)
    if options.as_json:
        summary = run_object(session.path, exit_code=outcome.exit_code, refused=outcome.refused)
        click.echo(json.dumps(summary, indent=1, ensure_ascii=False))
    return outcome.exit_code


def _with_screens(session: Session, request: RunRequest) -> int:
    """The loop in a supervisor that survives us, and the viewer here."""
    from oomscope.launch import supervisor
    from oomscope.report.run import Narrator
    from oomscope.tui.app import run_app

    supervisor.start(session, "oomscope.launch.supervised:supervise", dataclasses.asdict(request))
    run_app(session.path)
    narrator = Narrator(session, sys.stderr)
    finished = [each for each in session.supervisor_records() if each.get("k") == "finished"]
    if not finished:
        narrator.say(f"the job goes on; oomscope attach {session.id} shows it again")
        return int(ExitCode.DONE)
    narrator.replay()
    return int(finished[-1]["exit_code"])


def _ids(text: str | None) -> tuple[str, ...]:
    """Fix ids of `--apply a,b`.

    Raises:
        FixError: an id that neither oomscope nor a plugin knows; the nearest one is named.
    """
    if not text:
        return ()
    from oomscope.launch.predict_catalogue import find

    ids = tuple(part.strip() for part in text.split(",") if part.strip())
    for each in ids:
        find(each)
    return ids


def _refuse_early(ids: Sequence[str]) -> None:
    """Refuse what can be known before anything runs: conflicts, advice, and a setting that the environment has."""
    if ids:
        from oomscope.launch.predict import launch_changes

        launch_changes(ids, None, env=os.environ)


def _planned(path: str | None) -> tuple[str, ...]:
    if path is None:
        return ()
    from oomscope.launch.plan_file import read_plan

    return read_plan(Path(path)).fixes


def _seconds(text: str | None) -> float | None:
    if text is None:
        return None
    factor = {"s": 1, "m": 60, "h": 3600}.get(text[-1:])
    try:
        return float(text if factor is None else text[:-1]) * (factor or 1)
    except ValueError:
        raise UsageError(f"--budget {text}: not a time", hint="for example --budget 20m") from None
