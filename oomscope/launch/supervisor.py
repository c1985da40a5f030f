"""A process that owns the job and survives the viewer.

`start` makes it: its own session, no terminal, streams in a file. It calls one function of ours, named
`module:attribute`, with the session and a payload; the loop of attempts is such a function. The payload and
the environment go through a pipe, never through a file: they may hold secrets.
"""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from oomscope.errors import LaunchFailed, OomscopeError
from oomscope.launch.processes import become_subreaper
from oomscope.protocol import layout
from oomscope.store.session import ENDED, ProcessMark, Session

#: How long a new supervisor may take to write its first state.
_START_S = 20.0

Entry = Callable[[Session, Mapping[str, Any]], int]


def start(
    session: Session, entry: str, payload: Mapping[str, Any], *, env: Mapping[str, str] | None = None
) -> int:
    """Start a detached supervisor and wait until it has taken the session over; returns its pid.

    Args:
        session: what it works on.
        entry: `module:attribute` of a function `(session, payload) -> exit code` inside oomscope.
        payload: JSON values for it.
        env: its environment, default: ours. It is what the job inherits.

    Raises:
        LaunchFailed: it ended, or said nothing, before it had taken over.
    """
    log = session.path / layout.SUPERVISOR_LOG
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        process = subprocess.Popen(
            [sys.executable, "-m", "oomscope.launch.supervisor"],
            stdin=subprocess.PIPE,
            stdout=descriptor,
            stderr=descriptor,
            start_new_session=True,
            env=_own_environment(env),
            cwd=session.path,
        )
    except OSError as error:
        raise LaunchFailed(f"cannot start the supervisor: {error.strerror}") from error
    finally:
        os.close(descriptor)
    message = {
        "session": str(session.path),
        "entry": entry,
        "payload": dict(payload),
        "environment": dict(os.environ if env is None else env),
    }
    assert process.stdin is not None
    with process.stdin as stream:
        stream.write(json.dumps(message).encode())
    _wait_for(session, process, log)
    return process.pid


def _wait_for(session: Session, process: subprocess.Popen[bytes], log: Path) -> None:
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        supervisor = ProcessMark.from_json(session.state().get("supervisor"))
        if supervisor is not None and supervisor.pid == process.pid:
            # It outlives us on purpose; tell subprocess that nobody will wait for it.
            process.returncode = 0
            return
        if process.poll() is not None:
            break
        time.sleep(0.02)
    tail = log.read_text(errors="replace").strip().splitlines()[-1:] or ["it said nothing"]
    raise LaunchFailed(f"the supervisor did not start: {tail[0]}", hint=f"details are in {log}")


def _own_environment(env: Mapping[str, str] | None) -> dict[str, str]:
    """Ours, with this very package importable; the job's environment comes through the pipe, exact."""
    environment = dict(os.environ if env is None else env)
    root = str(Path(__file__).resolve().parents[2])
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [root, environment.get("PYTHONPATH", "")]))
    return environment


def main() -> int:
    """The supervisor process.

    Read the message, take the session over, call the entry, leave a final state.
    """
    message = json.loads(sys.stdin.buffer.read())
    os.environ.clear()
    os.environ.update(message["environment"])
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    session = Session.open(message["session"])
    become_subreaper()
    module, _, attribute = message["entry"].partition(":")
    if not module.startswith("oomscope."):
        raise LaunchFailed(f"not an entry of ours: {message['entry']!r}")
    session.set_state("starting", supervisor=ProcessMark.of(os.getpid()))
    try:
        entry: Entry = getattr(importlib.import_module(module), attribute)
        code = entry(session, message["payload"])
        text = ""
    except OomscopeError as error:
        code, text = int(error.exit_code), error.message
    except BaseException:  # noqa: BLE001  # the worker boundary: what went wrong must reach the session
        code, text = 70, traceback.format_exc()
        sys.stderr.write(text)
        text = text.strip().splitlines()[-1]
    session.append_supervisor({"k": "finished", "exit_code": code, "text": text})
    if session.state().get("state") not in ENDED:
        session.set_state("done" if code == 0 else "failed")
    return code


if __name__ == "__main__":
    sys.exit(main())
