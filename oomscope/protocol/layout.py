"""Names of the files inside a session folder (version 1), and of the sockets beside it.

Strings and `os.path` only: this module also runs in the job.
"""

from __future__ import annotations

import os
import re
import tempfile
from typing import NamedTuple

FORMAT = "oomscope-session"
VERSION = 1

SESSION_FILE = "session.json"
STATE_FILE = "state.json"
SUPERVISOR_FILE = "supervisor.jsonl"
SUPERVISOR_LOG = "supervisor.log"
SUPERVISOR_TASK = "supervisor.json"
CONTROL_DIR = "control"
ATTEMPTS_DIR = "attempts"
PINNED_FILE = "pinned"
CRASH_FILE = "crash.txt"

ATTEMPT_FILE = "attempt.json"
RESULT_FILE = "result.json"
FINDINGS_FILE = "findings.json"
FIXES_FILE = "fixes.json"
PROOF_FILE = "proof.json"
LAUNCHER_LOG = "launcher.log"
LAUNCHER_ERROR = "launcher_error.json"
ELASTIC_FILE = "elastic.jsonl"
NODES_FILE = "nodes.jsonl"
PROCS_DIR = "procs"
HOST_DIR = "host"
SNAPSHOTS_DIR = "snapshots"
LOGS_DIR = "logs"
STACKS_DIR = "stacks"
PREDICTIONS_DIR = "predictions"
BOOT_DIR = "boot"
#: Messages between simulated ranks, and the ranks that somebody waits for: WANTED_PREFIX and a number.
EXCHANGE_DIR = "exchange"
WANTED_PREFIX = "wanted-"

AGENT_CONFIG = "agent.json"
BUNDLE_FILE = "_oomscope_job.py"

#: In the folder of an attempt's sockets: where its supervisor listens.
SUPERVISOR_SOCKET = "supervisor.sock"

_PROC_NAME = re.compile(r"(?:r(?P<rank>\d{5,})|x\d{4,})-(?P<host>.+)-(?P<pid>\d+)\.jsonl$")
_UNSAFE = re.compile(r"[^A-Za-z0-9_.-]+")

#: A socket path must fit sockaddr_un.sun_path (108 bytes on Linux, 104 on macOS), so the folder gets 80.
_MAX_RUNDIR = 80


class ProcName(NamedTuple):
    """What the name of a file in procs/ says; the records inside are the authority."""

    rank: int | None
    host: str
    pid: int


def safe_name(text: str, limit: int = 40) -> str:
    """`text` as one harmless path component of at most `limit` characters; never empty, never hidden."""
    return _UNSAFE.sub("-", text).strip("-.")[:limit].strip("-.") or "x"


def proc_file(rank: int | None, host: str, pid: int) -> str:
    """Name of the record file of one process.

    `r00003-nodeA-14432.jsonl`, or `x0000-…` when it is not a rank.
    """
    head = "x0000" if rank is None else f"r{rank:05d}"
    return f"{head}-{safe_name(host)}-{pid}.jsonl"


def parse_proc_file(name: str) -> ProcName | None:
    """The parts of a name made by `proc_file`; None when it is not one."""
    match = _PROC_NAME.match(name)
    if match is None:
        return None
    rank = match.group("rank")
    return ProcName(None if rank is None else int(rank), match.group("host"), int(match.group("pid")))


def attempt_dir(session: str, number: int) -> str:
    return os.path.join(session, ATTEMPTS_DIR, f"{number:03d}")


def snapshot_file(rank: int | None, step: int, reason: str) -> str:
    """Name of a snapshot: `r00003-step000120-oom.pickle`."""
    head = "x0000" if rank is None else f"r{rank:05d}"
    return f"{head}-step{step:06d}-{safe_name(reason)}.pickle"


def rundir(session_id: str, label: str) -> str:
    """Folder for the sockets of one attempt.

    On a local file system, private, short enough for a socket address.
    """
    base = os.environ.get("XDG_RUNTIME_DIR") or tempfile.gettempdir()
    for folder in (os.path.join(base, f"oomscope-{os.getuid()}"), f"/tmp/oomscope-{os.getuid()}"):
        path = os.path.join(folder, f"{safe_name(session_id, 36)}-{safe_name(label, 12)}")
        if len(os.fsencode(path)) <= _MAX_RUNDIR:
            return path
    return path
