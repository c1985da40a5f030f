"""What an attachment is made of: the ladder, the state of one rank, and the session folder it is recorded in."""

from __future__ import annotations

import contextlib
import enum
import os
import socket
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oomscope.collect import stacks
from oomscope.errors import OomscopeError
from oomscope.launch.attach_observe import ObservedRank
from oomscope.launch.attach_place import Place, Relay
from oomscope.launch.discover import Job, Rank
from oomscope.launch.injectors import Report
from oomscope.store.files import read_json
from oomscope.store.session import Session, default_home

#: How long to wait for the answer of an agent that was sent.
_ANSWER_S = 10.0


class Rung(str, enum.Enum):
    """How far we got with a rank."""

    OBSERVE = "observe"
    STACKS = "stacks"
    AGENT = "agent"


@dataclass(slots=True)
class Attachment:
    """One rank of the job and what we know about it from outside."""

    rank: Rank
    rung: Rung = Rung.OBSERVE
    why_not_higher: str | None = None
    stack: stacks.StackDump | None = None
    agent: str = "none"
    """none, starting, active, left, already (another oomscope is in there), failed."""
    report: Report | None = None
    place: Place | None = None
    relay: Relay | None = None
    observed: ObservedRank | None = None
    ended: bool = False
    exit_status: int | None = None
    last_error: str | None = None
    """What the rank wrote into its torchelastic error file."""


@dataclass(slots=True)
class Options:
    """How far the user wants to go."""

    observe_only: bool = False
    agent: bool = False
    blocking_stacks: bool = True
    answer_s: float = field(default=_ANSWER_S)


def create_session(job: Job, home: Path | None) -> Session:
    first = job.ranks[0]
    cwd = Path("/")
    with contextlib.suppress(OSError):
        cwd = Path(os.readlink(f"/proc/{first.pid}/cwd"))
    return Session.create(
        default_home() if home is None else home,
        name=job.name,
        command=first.command,
        cwd=cwd,
        environ=first.environ,
        attached=True,
        target=job.target,
        launcher="attached",
        python=_executable(first.pid),
    )


def error_file(rank: Rank) -> str | None:
    """The message in the rank's torchelastic error file; torchrun removes it soon after the end."""
    path = rank.environ.get("TORCHELASTIC_ERROR_FILE")
    if not path:
        return None
    try:
        found: Any = read_json(path)
    except OomscopeError:
        return None
    message = found.get("message") if found is not None else None
    text = message.get("message") if isinstance(message, dict) else message
    return str(text)[:500] if text else None


def _executable(pid: int) -> str | None:
    try:
        return os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None


def attempt_info(job: Job) -> dict[str, Any]:
    return {
        "command": list(job.ranks[0].command),
        "attached": True,
        "host": socket.gethostname(),
        "launcher": job.launcher,
        "run_id": job.run_id,
        "ranks": [
            {"rank": rank.rank, "pid": rank.pid, "start_ticks": rank.start_ticks, "source": rank.source}
            for rank in job.ranks
        ],
        "fixes": [],
    }


def nvml_uuid(uuid: str | None) -> str | None:
    """Torch writes a UUID without the prefix that NVML puts before it."""
    if uuid is None or uuid.startswith(("GPU-", "MIG-")):
        return uuid
    return "GPU-" + uuid


def name_of(each: Attachment) -> str:
    return f"rank {each.rank.rank}" if each.rank.rank is not None else f"process {each.rank.pid}"


def sentence(why: str, remedy: str) -> str:
    return f"{why}. {remedy}" if remedy else why
