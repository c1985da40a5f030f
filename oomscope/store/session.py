"""A session folder: created once, opened by any number of readers, the single source of truth about a run."""

from __future__ import annotations

import getpass
import os
import re
import secrets
import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from oomscope.errors import SessionError, SetupError
from oomscope.protocol import env as variables
from oomscope.protocol import layout
from oomscope.store.files import LineWriter, read_json, write_json
from oomscope.store.tail import read_records

#: Values of "state" in state.json.
STATES = (
    "starting", "running", "diagnosing", "predicting", "waiting", "stopping", "oom", "failed", "done", "lost",
)  # fmt: skip
#: States after which nothing more happens in a session.
ENDED = frozenset({"oom", "failed", "done", "lost"})

_ATTEMPT_NAME = re.compile(r"\d{3,}$")


def default_home(environ: Mapping[str, str] | None = None) -> Path:
    """`$OOMSCOPE_HOME`, else `$XDG_STATE_HOME/oomscope`, else `~/.local/state/oomscope`."""
    environ = os.environ if environ is None else environ
    if environ.get(variables.HOME):
        return Path(environ[variables.HOME]).expanduser().absolute()
    state = environ.get("XDG_STATE_HOME")
    return (Path(state) if state else Path.home() / ".local" / "state").expanduser() / "oomscope"


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """A process that cannot be mistaken for a later one with the same pid."""

    pid: int
    start_time: int
    """Clock ticks after boot, field 22 of /proc/PID/stat; 0 where /proc does not exist."""

    @classmethod
    def of(cls, pid: int) -> ProcessMark:
        return cls(pid, process_start_time(pid))

    @classmethod
    def from_json(cls, value: object) -> ProcessMark | None:
        if not isinstance(value, dict) or not isinstance(value.get("pid"), int):
            return None
        start = value.get("start_time")
        return cls(value["pid"], start if isinstance(start, int) else 0)

    def to_json(self) -> dict[str, int]:
        return {"pid": self.pid, "start_time": self.start_time}

    def is_alive(self) -> bool:
        """Whether this very process still runs (a zombie does not)."""
        found = process_start_time(self.pid)
        return found != 0 and found == self.start_time


def process_start_time(pid: int) -> int:
    """Start time of `pid` in clock ticks after boot; 0 when there is no such process, or it is a zombie."""
    try:
        with open(f"/proc/{pid}/stat", encoding="utf-8", errors="replace") as stream:
            fields = stream.read().rpartition(")")[2].split()
    except OSError:
        return 0
    if len(fields) < 20 or fields[0] in ("Z", "X"):
        return 0
    return int(fields[19])


class Attempt:
    """One launch inside a session, or one prediction run of it: both folders have the same inner layout."""

    def __init__(self, path: Path, number: int, label: str | None = None) -> None:
        self.path = path
        self.number = number
        self.label = label or f"{number:03d}"

    def __repr__(self) -> str:
        return f"Attempt({self.label!r}, {str(self.path)!r})"

    @property
    def procs(self) -> Path:
        return self.path / layout.PROCS_DIR

    @property
    def snapshots(self) -> Path:
        return self.path / layout.SNAPSHOTS_DIR

    @property
    def logs(self) -> Path:
        return self.path / layout.LOGS_DIR

    def create_folders(self) -> None:
        self.path.mkdir(mode=0o700, parents=True, exist_ok=False)
        for name in (
            layout.PROCS_DIR,
            layout.SNAPSHOTS_DIR,
            layout.LOGS_DIR,
            layout.STACKS_DIR,
            layout.BOOT_DIR,
        ):
            (self.path / name).mkdir(mode=0o700)

    def info(self) -> dict[str, Any]:
        """attempt.json: command, environment difference, fixes; {} before it is written."""
        return read_json(self.path / layout.ATTEMPT_FILE) or {}

    def write_info(self, info: Mapping[str, Any]) -> None:
        write_json(self.path / layout.ATTEMPT_FILE, dict(info))

    def result(self) -> dict[str, Any] | None:
        """result.json; None while the attempt runs."""
        return read_json(self.path / layout.RESULT_FILE)

    def write_result(self, result: Mapping[str, Any]) -> None:
        write_json(self.path / layout.RESULT_FILE, dict(result))

    def findings(self) -> dict[str, Any] | None:
        """findings.json, the diagnosis; None before there is one."""
        return read_json(self.path / layout.FINDINGS_FILE)

    def fixes(self) -> dict[str, Any] | None:
        """fixes.json, the predictions; None before there are any."""
        return read_json(self.path / layout.FIXES_FILE)

    def prediction(self, slug: str) -> Attempt:
        """A new prediction run below this attempt; a number is added when `slug` is taken.

        Raises:
            SetupError: the folder cannot be written.
        """
        base = layout.safe_name(slug)
        for suffix in ("", *(f"-{count}" for count in range(2, 1000))):
            path = self.path / layout.PREDICTIONS_DIR / (base + suffix)
            run = Attempt(path, self.number, f"{self.label}-{base}{suffix}")
            try:
                run.create_folders()
            except FileExistsError:
                continue
            except OSError as error:
                raise SetupError(f"cannot write {path}: {error.strerror}") from error
            return run
        raise SetupError(f"too many prediction runs named {base!r} in {self.path}")


class Session:
    """One session folder.

    Attributes:
        path: the folder.
        info: session.json (immutable).
    """

    def __init__(self, path: Path, info: dict[str, Any]) -> None:
        self.path = path
        self.info = info
        self._supervisor = LineWriter(path / layout.SUPERVISOR_FILE)

    def __repr__(self) -> str:
        return f"Session({str(self.path)!r})"

    @property
    def id(self) -> str:
        return self.path.name

    @classmethod
    def create(
        cls,
        home: Path | None = None,
        *,
        name: str,
        command: Sequence[str] = (),
        cwd: Path | None = None,
        environ: Mapping[str, str] | None = None,
        **details: Any,
    ) -> Session:
        """Make a new folder `sessions/<time>-<name>-<random>` below `home` (default: `default_home()`).

        Args:
            home: state folder.
            name: what is run, usually the script's stem.
            command: the command line as the user gave it.
            cwd: where the command runs; default: here.
            environ: the job's environment; only the allow-listed part is stored.
            details: further fields of session.json (`launcher`, `python`, `torch`, `device`, …).

        Raises:
            SetupError: the state folder cannot be written.
        """
        environ = dict(os.environ if environ is None else environ)
        home = default_home(environ) if home is None else home
        now = time.time()
        stamp = datetime.fromtimestamp(now).strftime("%Y%m%d-%H%M%S")
        path = home / "sessions" / f"{stamp}-{layout.safe_name(Path(name).stem, 30)}-{secrets.token_hex(2)}"
        info = {
            "format": layout.FORMAT,
            "version": layout.VERSION,
            "id": path.name,
            "created": int(now * 1e9),
            "host": socket.gethostname(),
            "user": _user(),
            "cwd": str(cwd or Path.cwd()),
            "command": list(command),
            "environment": variables.stored_environment(environ),
            **details,
        }
        try:
            path.mkdir(mode=0o700, parents=True)
            (path / layout.CONTROL_DIR).mkdir(mode=0o700)
            (path / layout.ATTEMPTS_DIR).mkdir(mode=0o700)
            write_json(path / layout.SESSION_FILE, info)
        except OSError as error:
            raise SetupError(
                f"cannot write the state folder {home}: {error.strerror}",
                hint=f"set {variables.HOME} to a folder that you may write",
            ) from error
        session = cls(path, info)
        session.set_state("starting")
        return session

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Session:
        """Open an existing folder.

        Raises:
            SessionError: missing, torn, newer than this program, or not a session folder.
        """
        folder = Path(path).absolute()
        if not folder.is_dir():
            raise SessionError(f"no session folder {folder}", hint="oomscope sessions lists them")
        info = read_json(folder / layout.SESSION_FILE)
        if info is None or info.get("format") != layout.FORMAT:
            raise SessionError(
                f"{folder} is not a session folder of oomscope", hint="oomscope sessions lists them"
            )
        version = info.get("version")
        if not isinstance(version, int):
            raise SessionError(f"{folder / layout.SESSION_FILE} is damaged: version is {version!r}")
        if version > layout.VERSION:
            raise SessionError(
                f"{folder.name} was written by a newer oomscope: "
                f"format version {version}, this one reads {layout.VERSION}",
                hint="pip install --upgrade oomscope",
            )
        return cls(folder, info)

    # -- attempts

    def attempts(self) -> list[Attempt]:
        """All attempts, oldest first."""
        folder = self.path / layout.ATTEMPTS_DIR
        try:
            names = sorted(
                (
                    entry.name
                    for entry in os.scandir(folder)
                    if _ATTEMPT_NAME.match(entry.name) and entry.is_dir()
                ),
                key=int,
            )
        except OSError:
            return []
        return [Attempt(folder / name, int(name)) for name in names]

    def new_attempt(self, **info: Any) -> Attempt:
        """Make the folder of the next attempt and write `info` to its attempt.json.

        Raises:
            SetupError: the folder cannot be written.
        """
        existing = self.attempts()
        number = existing[-1].number + 1 if existing else 1
        attempt = Attempt(Path(layout.attempt_dir(str(self.path), number)), number)
        try:
            attempt.create_folders()
            attempt.write_info({"attempt": number, "created": time.time_ns(), **info})
        except OSError as error:
            raise SetupError(f"cannot write {attempt.path}: {error.strerror}") from error
        return attempt

    # -- supervisor

    def append_supervisor(self, record: Mapping[str, Any]) -> bool:
        """Append to supervisor.jsonl; the record needs `k`. False when the disk refuses."""
        return self._supervisor.append(dict(record))

    def supervisor_records(self) -> list[dict[str, Any]]:
        return read_records(self.path / layout.SUPERVISOR_FILE)

    # -- state

    def state(self) -> dict[str, Any]:
        """state.json; {} when it is missing or torn, which never happens to a reader of a healthy disk."""
        try:
            return read_json(self.path / layout.STATE_FILE) or {}
        except SessionError:
            return {}

    def set_state(
        self,
        state: str,
        *,
        attempt: int | None = None,
        supervisor: ProcessMark | None = None,
        launcher: ProcessMark | None = None,
        **more: Any,
    ) -> None:
        """Replace the state; fields that are not given keep their value.

        Raises:
            ValueError: not one of STATES.
        """
        if state not in STATES:
            raise ValueError(f"unknown session state {state!r}")
        value = {**self.state(), "state": state, "t": time.time_ns(), **more}
        for key, given in (("attempt", attempt), ("supervisor", supervisor), ("launcher", launcher)):
            if given is not None:
                value[key] = given.to_json() if isinstance(given, ProcessMark) else given
        write_json(self.path / layout.STATE_FILE, value)

    def current_state(self) -> str:
        """The state as it is now: `lost` when state.json says it goes on but its supervisor is gone.

        A job may outlive its supervisor: that one shows as `running` while a marked launcher lives.
        """
        state = self.state()
        name = state.get("state")
        if name not in STATES:
            return "lost"
        if name in ENDED or self.info.get("host") != socket.gethostname():
            return str(name)
        marks = [ProcessMark.from_json(state.get(key)) for key in ("supervisor", "launcher")]
        known = [mark for mark in marks if mark is not None]
        if known and not any(mark.is_alive() for mark in known):
            return "lost"
        return str(name)

    # -- life time

    @property
    def is_pinned(self) -> bool:
        return (self.path / layout.PINNED_FILE).exists()

    def pin(self) -> None:
        """Keep this session whatever its age."""
        (self.path / layout.PINNED_FILE).touch(mode=0o600)

    def unpin(self) -> None:
        """Let retention delete this session again."""
        (self.path / layout.PINNED_FILE).unlink(missing_ok=True)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError, ImportError):  # no entry in the password database: containers with a bare uid
        return str(os.getuid())
