"""Entry point: the table of commands, lazy loading, and the one place that catches errors.

Importing this module loads click and nothing heavier, so that `oomscope --help` answers at once.
"""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any, NoReturn

import click

from oomscope import __version__
from oomscope.errors import ExitCode, OomscopeError, UsageError

#: name -> (module, attribute, one line of help). The help stands here so that `--help` imports no command.
COMMANDS: dict[str, tuple[str, str, str]] = {
    "run": ("oomscope.cli.run", "run", "Run a training script, find out why it runs out of memory, and prove a fix."),
    "attach": ("oomscope.cli.attach", "attach", "Open the viewer on a running job or a session."),
    "sessions": ("oomscope.cli.sessions", "sessions", "List recorded sessions."),
    "explain": ("oomscope.cli.explain", "explain", "Explain an out-of-memory error: log, snapshot or session."),
    "rules": ("oomscope.cli.rules", "rules", "List the causes oomscope knows, or show the page of one."),
    "fix": ("oomscope.cli.fix", "fix", "List, preview, apply or undo fixes for a session."),
    "open": ("oomscope.cli.open", "open_", "Browse a memory snapshot in the terminal."),
    "inspect": ("oomscope.cli.inspect", "inspect", "Summarise a memory snapshot as text or JSON."),
    "diff": ("oomscope.cli.diff", "diff", "Compare two memory snapshots."),
    "export": ("oomscope.cli.export", "export", "Convert a memory snapshot for another tool."),
    "scrub": ("oomscope.cli.scrub", "scrub", "Remove user names and home folders from a snapshot."),
    "replay": ("oomscope.cli.replay", "replay", "Check that the allocator model reproduces a snapshot exactly."),
    "whatif": ("oomscope.cli.whatif", "whatif", "Predict peak and capacity under other allocator settings."),
    "fit": ("oomscope.cli.fit", "fit", "Find the largest option value that fits on a simulated card."),
    "top": ("oomscope.cli.top", "top", "Show the GPUs of this machine and who uses their memory."),
    "doctor": ("oomscope.cli.doctor", "doctor", "Say what works on this machine, and how to mend what does not."),
}  # fmt: skip


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called, not when they are listed."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        name = args[0]
        if name not in COMMANDS and not name.startswith("-"):
            self._reject(ctx, name)
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, summary) for name, (_, _, summary) in COMMANDS.items()])

    @staticmethod
    def _reject(ctx: click.Context, name: str) -> NoReturn:
        from difflib import get_close_matches

        near = get_close_matches(name, COMMANDS, n=1)
        if near:
            ctx.fail(f"no command {name!r}. Did you mean {near[0]!r}?")
        if os.path.exists(name):
            ctx.fail(f"no command {name!r}. To run a script: oomscope run {name}")
        ctx.fail(f"no command {name!r}. Commands: {', '.join(COMMANDS)}")


@click.command(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="oomscope")
@click.option("--debug", is_flag=True, help="Show the full trace of an error.")
def cli(debug: bool) -> None:
    """Find out what filled the GPU, and prove the fix.

    \b
    oomscope run train.py            run a script; on an OOM: cause, fixes, proof
    oomscope run --device sim:a100-40g train.py     the same without a GPU
    oomscope explain train.log       what an error message says
    oomscope open snapshot.pickle    browse a memory snapshot
    """  # noqa: D301


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit code and reports every error in one paragraph."""
    args = sys.argv[1:] if argv is None else argv
    debug = "--debug" in args[:1] or bool(os.environ.get("OOMSCOPE_DEBUG"))
    try:
        _refuse_empty(args)
        code: Any = cli.main(args=list(args), prog_name="oomscope", standalone_mode=False)
    except OomscopeError as error:
        if debug:
            traceback.print_exc()
        return _report(error)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        error.show()
        context = getattr(error, "ctx", None)
        # `run` keeps 1 to 124 for the job's own codes, as `timeout` and `docker run` do.
        started_a_job = context is not None and context.info_name == "run"
        return int(ExitCode.NOT_STARTED if started_a_job else ExitCode.USAGE)
    except (KeyboardInterrupt, click.Abort):
        return int(ExitCode.INTERRUPTED)
    except BrokenPipeError:
        # The reader of our stdout went away (`oomscope … | head`): nothing is wrong, and nothing more to say.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return int(ExitCode.DONE)
    except Exception:  # noqa: BLE001  # the worker boundary of the whole program: a bug of ours
        return _report_bug()
    return code if isinstance(code, int) else int(ExitCode.DONE)


def _refuse_empty(args: list[str]) -> None:
    """An empty argument would mean the current folder; it is nearly always a shell variable that is not set.

    Raises:
        UsageError: there is one. What follows `run` is the job's own affair.
    """
    if "" in args and args[:1] != ["run"]:
        command = args[0] or "oomscope"
        raise UsageError(f"an argument of {command} is empty", hint="is a variable of the shell not set?")


def _report(error: OomscopeError) -> int:
    sys.stderr.write(f"oomscope: {error.message}\n")
    if error.hint:
        sys.stderr.write(f"  hint: {error.hint}\n")
    return int(error.exit_code)


def _report_bug() -> int:
    import tempfile  # 7 ms of every start, for what should never happen

    text = traceback.format_exc()
    with tempfile.NamedTemporaryFile("w", prefix="oomscope-crash-", suffix=".txt", delete=False) as crash:
        crash.write(f"oomscope {__version__}\nargv {sys.argv!r}\npython {sys.version}\n\n{text}")
    sys.stderr.write(
        f"oomscope: internal error: {text.strip().splitlines()[-1]}\n"
        f"  hint: this is a bug of oomscope; details are in {crash.name}\n"
    )
    return int(ExitCode.BUG)


if __name__ == "__main__":
    sys.exit(main())
