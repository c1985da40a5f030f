"""Every error that oomscope reports to a person, with its exit code.

::

    OomscopeError                 70  a bug of ours
    ├─ UsageError                  2  bad option or configuration; names the nearest valid one
    ├─ InputError                  3  a file that cannot be used
    │  ├─ SnapshotError               not a snapshot, refused pickle, cut file
    │  └─ SessionError                torn, newer, or not a session folder
    ├─ SetupError                  4  something on this machine is missing
    │  ├─ NvmlUnavailable             no driver, no library, no permission
    │  ├─ TorchMissing                the job's interpreter has no torch
    │  ├─ PermissionDenied            ptrace, another user's process
    │  └─ NotATerminal                the screens need a terminal
    ├─ JobError                    5  the training job could not be started or reached
    │  ├─ LaunchFailed
    │  ├─ AttachFailed
    │  └─ AgentSilent
    ├─ FixError                    6  a fix cannot be applied or predicted
    │  ├─ PatchDoesNotApply
    │  └─ PredictionImpossible
    └─ PluginError                 7

`message` says what, where and which value; `hint` is the next command to type. `oomscope.cli.main` is the only catcher.
"""

from __future__ import annotations

import enum


class ExitCode(enum.IntEnum):
    """Exit codes of every command; `oomscope run` returns the job's own code instead."""

    DONE = 0
    ANSWER_IS_NO = 1
    USAGE = 2
    INPUT = 3
    SETUP = 4
    JOB = 5
    FIX = 6
    PLUGIN = 7
    BUG = 70
    NOT_STARTED = 125
    INTERRUPTED = 130


class OomscopeError(Exception):
    """Base of all reported errors: one sentence, and a hint that names the next step."""

    exit_code: ExitCode = ExitCode.BUG

    def __init__(self, message: str, *, hint: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.hint = hint


class UsageError(OomscopeError):
    """A bad option or configuration value."""

    exit_code = ExitCode.USAGE


class InputError(OomscopeError):
    """A file or folder that cannot be used."""

    exit_code = ExitCode.INPUT


class SnapshotError(InputError):
    """Not a memory snapshot, a refused pickle, or a cut file."""


class SessionError(InputError):
    """A session folder that is torn, newer than this program, or not one of ours."""


class SetupError(OomscopeError):
    """Something that this machine or environment lacks."""

    exit_code = ExitCode.SETUP


class NvmlUnavailable(SetupError):
    """The NVIDIA management library is missing, mismatched or forbidden."""


class TorchMissing(SetupError):
    """The job's interpreter cannot import torch."""


class PermissionDenied(SetupError):
    """The operating system refuses access to a process or a file."""


class NotATerminal(SetupError):
    """A screen was asked for where there is no usable terminal."""


class JobError(OomscopeError):
    """The training job could not be started or reached."""

    exit_code = ExitCode.JOB


class LaunchFailed(JobError):
    """The launcher did not start."""


class AttachFailed(JobError):
    """A running process could not be attached to."""


class AgentSilent(JobError):
    """The job runs, but the agent inside it does not answer."""


class FixError(OomscopeError):
    """A fix cannot be applied or predicted."""

    exit_code = ExitCode.FIX


class PatchDoesNotApply(FixError):
    """The source file is not what the patch was made for."""


class PredictionImpossible(FixError):
    """There is no evidence on which a prediction could stand."""


class PluginError(OomscopeError):
    """A plugin is broken or incompatible."""

    exit_code = ExitCode.PLUGIN
