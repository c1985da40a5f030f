"""From what stands on the command line to the command that is started.

A script with none of torchrun's options runs as plain Python; with one of them, through torchrun (`python -m
torch.distributed.run`, the same thing); and what follows `--`, or begins with another program, runs verbatim.
Nothing after the script is looked at: it is the script's.
"""

from __future__ import annotations

import difflib
import os
import re
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from oomscope.errors import InputError, UsageError

Kind = Literal["python", "torchrun", "verbatim"]

TORCHRUN_MODULE = "torch.distributed.run"

#: torchrun's options that take a value, with dashes; underscores mean the same.
#: Source: torch.distributed.run.get_args_parser(), torch 2.4 to 2.13.
_VALUE_OPTIONS = frozenset(
    {
        "--nnodes", "--nproc-per-node", "--rdzv-backend", "--rdzv-endpoint", "--rdzv-id", "--rdzv-conf",
        "--max-restarts", "--monitor-interval", "--start-method", "--event-log-handler", "--role",
        "--log-dir",
        "-r", "--redirects", "-t", "--tee", "--local-ranks-filter", "--duplicate-stdout-filters",
        "--duplicate-stderr-filters", "--node-rank", "--master-addr", "--master-port", "--local-addr",
        "--logs-specs", "--numa-binding", "--signals-to-handle", "--shutdown-timeout",
    }
)  # fmt: skip
_FLAGS = frozenset({"--standalone", "-m", "--module", "--no-python", "--run-path", "--virtual-local-rank"})

#: Option, what its value looks like, and that in words. Source: torch.distributed.run.determine_local_world_size,
#: parse_min_max_nnodes and the types in get_args_parser(). The short names are those of torch's device backends.
_CHECKED = (
    (
        "--nproc-per-node",
        r"[1-9]\d*|auto|[a-z]{2,3}u|musa",
        "a number of ranks, auto, gpu, cpu, xpu or another backend",
    ),
    ("--nnodes", r"[1-9]\d*(?::[1-9]\d*)?", "a number of nodes, or MIN:MAX"),
    ("--node-rank", r"\d+", "a number"),
    ("--master-port", r"\d+", "a port number"),
    ("--max-restarts", r"\d+", "a number"),
    ("--monitor-interval", r"\d*\.?\d+|\d+\.", "a number of seconds"),
)
_EXAMPLES = {"--nproc-per-node": 8, "--master-port": 29500}

#: Programs that a user may name instead of a script.
_PROGRAMS = frozenset(
    {"torchrun", "accelerate", "deepspeed", "python", "python3", "srun", "mpirun", "uv", "bash", "sh"}
)


@dataclass(frozen=True, slots=True)
class Launch:
    """A command ready to start."""

    command: tuple[str, ...]
    kind: Kind
    script: Path | None
    """The training script, where the command line names one."""
    module: bool = False
    """The script was given as a module name (`-m package.train`)."""

    @property
    def name(self) -> str:
        """What a session of it is called."""
        if self.script is not None:
            return self.script.stem
        if self.module:
            words = torchrun_script(self.command) if self.kind == "torchrun" else self.command[1:]
            return words[1].replace(".", "-")
        return Path(self.command[0]).stem


def job_python(environ: Mapping[str, str] | None = None, asked: str | None = None) -> str:
    """The interpreter of the job.

    `asked`, the active environment's, ours if it has torch, or the first on PATH.

    Raises:
        UsageError: `asked` is not an executable.
    """
    environ = os.environ if environ is None else environ
    if asked:
        found = shutil.which(asked, path=environ.get("PATH"))
        if found is None:
            raise UsageError(
                f"--python {asked}: no such executable", hint="for example --python .venv/bin/python"
            )
        return found
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        candidate = Path(environ.get(variable, ""), "bin", "python")
        if environ.get(variable) and os.access(candidate, os.X_OK):
            return str(candidate)
    if find_spec("torch") is not None:
        return sys.executable
    for name in ("python", "python3"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return found
    return sys.executable


def build_command(args: Sequence[str], python: str, *, cwd: Path | None = None) -> Launch:
    """The command for `args`, which is what follows oomscope's own options.

    Args:
        args: `[torchrun options] script.py args…`, `-- any command`, or `torchrun …` and the like.
        python: the job's interpreter.
        cwd: where a relative script path is looked up; default: here.

    Raises:
        UsageError: an option that neither oomscope nor torchrun knows (the nearest one is named), or no
            command.
        InputError: the script is missing or unreadable.
    """
    if args and args[0] == "--":
        return _verbatim(tuple(args[1:]))
    options, rest = split_options(args)
    if not rest:
        raise UsageError("no script to run", hint="oomscope run train.py, or oomscope run -- any command")
    flags = {_canonical(each) for each in options}
    module = bool(flags & {"-m", "--module"})
    if not options and _is_program(rest[0]):
        return _verbatim(tuple(rest))
    script = None if module or "--no-python" in flags else _check_script(rest[0], cwd)
    _check_values(options)
    if all(_canonical(each) in ("-m", "--module") for each in options):
        return Launch((python, *(["-m"] if module else []), *rest), "python", script, module)
    return Launch((python, "-m", TORCHRUN_MODULE, *options, *rest), "torchrun", script, module)


def _check_values(options: Sequence[str]) -> None:
    """Refuse numbers that torchrun would answer with a traceback.

    Raises:
        UsageError: with what the option takes.
    """
    for name, pattern, takes in _CHECKED:
        value = torchrun_option((TORCHRUN_MODULE, *options), name)
        if value is not None and re.fullmatch(pattern, value) is None:
            raise UsageError(
                f"{name} {value}: not {takes}", hint=f"for example {name} {_EXAMPLES.get(name, 1)}"
            )


def split_options(args: Sequence[str]) -> tuple[list[str], list[str]]:
    """Split `args` into torchrun's options (untouched) and the rest that begins with the script.

    Raises:
        UsageError: an unknown option, or an option without its value.
    """
    options: list[str] = []
    position = 0
    while position < len(args):
        word = args[position]
        if word == "--":
            return options, list(args[position + 1 :])
        if not word.startswith("-") or word == "-":
            break
        name, equals, _ = word.partition("=")
        canonical = _canonical(name)
        if canonical in _FLAGS:
            options.append(word)
            position += 1
        elif canonical in _VALUE_OPTIONS:
            width = 1 if equals or _has_joined_value(word, canonical) else 2
            if position + width > len(args):
                raise UsageError(f"{word} needs a value")
            options += args[position : position + width]
            position += width
        else:
            raise _unknown(word)
    return options, list(args[position:])


def is_torchrun_option(word: str) -> bool:
    """Whether `word` (with or without `=value`) is an option of torchrun's."""
    return _canonical(word.partition("=")[0]) in _FLAGS | _VALUE_OPTIONS


def torchrun_option(command: Sequence[str], name: str) -> str | None:
    """Value of option `name` (dashes) in a torchrun command made by `build_command`, or None."""
    if TORCHRUN_MODULE not in command:
        return None
    options, _ = split_options(command[list(command).index(TORCHRUN_MODULE) + 1 :])
    value = None
    position = 0
    while position < len(options):
        word, equals, given = options[position].partition("=")
        canonical = _canonical(word)
        takes_next = (
            canonical in _VALUE_OPTIONS and not equals and not _has_joined_value(options[position], canonical)
        )
        if canonical == name:
            value = given if equals else (options[position + 1] if takes_next else options[position][2:])
        position += 2 if takes_next else 1
    return value


def torchrun_script(command: Sequence[str]) -> list[str]:
    """The script and its arguments inside a torchrun command; with `-m` in front when it is a module."""
    options, rest = split_options(command[list(command).index(TORCHRUN_MODULE) + 1 :])
    module = any(_canonical(each) in ("-m", "--module") for each in options)
    return (["-m"] if module else []) + rest


def is_torchrun(command: Sequence[str]) -> bool:
    """Whether a command is torchrun, as a module or as the program."""
    return TORCHRUN_MODULE in command or "torchrun" in (os.path.basename(word) for word in command[:2])


def is_one_script(command: Sequence[str]) -> bool:
    """Whether a command is one Python script or module, so that the process itself is the rank."""
    if is_torchrun(command) or not os.path.basename(command[0]).startswith("python"):
        return False
    module = command[2] if len(command) > 2 and command[1] == "-m" else ""
    return not module.startswith(("torch.distributed.", "accelerate.", "deepspeed."))


def _canonical(option: str) -> str:
    """Torchrun's spelling with dashes; a unique beginning of a long option counts, as argparse lets it."""
    option = option.partition("=")[0]
    if not option.startswith("--"):
        return option[:2]
    option = "--" + option[2:].replace("_", "-")
    known = _FLAGS | _VALUE_OPTIONS
    if option in known:
        return option
    matches = [each for each in known if each.startswith(option)]
    return matches[0] if len(matches) == 1 else option


def _has_joined_value(word: str, canonical: str) -> bool:
    """`-r3`: a short option with its value attached."""
    return not word.startswith("--") and len(canonical) == 2 and len(word) > 2


def _unknown(word: str) -> UsageError:
    name = word.partition("=")[0]
    known = sorted(_FLAGS | _VALUE_OPTIONS)
    near = difflib.get_close_matches(_canonical(name), known, n=1)
    if near:
        return UsageError(f"no option {name}", hint=f"did you mean {near[0]}?")
    return UsageError(
        f"no option {name}",
        hint="options of the script stand after it; for other launchers: oomscope run -- COMMAND",
    )


def _is_program(word: str) -> bool:
    name = os.path.basename(word)
    if name in _PROGRAMS or (name.startswith("python") and name[6:].replace(".", "").isdigit()):
        return True
    return not word.endswith(".py") and not os.path.exists(word) and shutil.which(word) is not None


def _verbatim(command: tuple[str, ...]) -> Launch:
    if not command:
        raise UsageError(
            "nothing to run after --", hint="oomscope run -- torchrun --nproc-per-node 2 train.py"
        )
    if shutil.which(command[0]) is None:
        raise InputError(f"no program {command[0]!r}", hint="check the spelling and PATH")
    words = [part for word in command[1:] for part in _parts(word)]
    script = next((Path(word) for word in words if word.endswith(".py")), None)
    return Launch(command, "verbatim", script)


def _parts(word: str) -> list[str]:
    """The words of a command line inside a word (`bash -c '…'`); a word with a blank that is a file is one."""
    if not any(each.isspace() for each in word) or os.path.exists(word):
        return [word]
    try:
        return shlex.split(word)
    except ValueError:  # an open quote: whatever it is, it names no script
        return []


def _check_script(word: str, cwd: Path | None) -> Path:
    path = (cwd or Path.cwd()) / word
    if path.is_dir():
        if (path / "__main__.py").is_file():
            return path
        raise InputError(
            f"{word} is a folder without __main__.py, not a script", hint="oomscope run FOLDER/train.py"
        )
    if not path.exists():
        names = [each.name for each in path.parent.glob("*.py")] if path.parent.is_dir() else []
        near = difflib.get_close_matches(path.name, names, n=1)
        hint = f"did you mean {Path(word).with_name(near[0])}?" if near else "check the path"
        raise InputError(f"no script {word}", hint=hint)
    if not os.access(path, os.R_OK):
        raise InputError(f"cannot read {word}: permission denied", hint=f"chmod u+r {shlex.quote(word)}")
    return path
