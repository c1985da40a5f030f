"""The second injector: `sys.remote_exec` of Python 3.14+ (PEP 768), run by the job's own interpreter.

The interpreter's version must be exactly the job's, so the job's own executable is started for it. Works on
every architecture. The script runs when the main thread next executes bytecode; a second one before that
would silently replace the first, so callers wait for the agent's hello.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

from oomscope.collect.procfs import read_environ, read_status
from oomscope.launch.injectors.base import InjectError, Report

_MINIMUM = (3, 14)
_TIMEOUT_S = 15.0


class RemoteExecInjector:
    """See the module."""

    name = "remote_exec"

    def unavailable(self, pid: int) -> str | None:
        version = python_version(pid)
        if version is None:
            return f"the Python version of process {pid} is not known"
        if version < _MINIMUM:
            return f"needs Python 3.14 or later in the job, it runs {version[0]}.{version[1]}"
        environ, _ = read_environ(pid)
        if environ is not None and environ.get("PYTHON_DISABLE_REMOTE_DEBUG"):
            return "the job was started with PYTHON_DISABLE_REMOTE_DEBUG"
        return None

    def run(self, pid: int, source: str) -> Report:
        # The file must exist in the job's view of the file system, and be readable by the job's user.
        root = Path(f"/proc/{pid}/root")
        inside = f"/tmp/oomscope-{uuid.uuid4().hex}.py"
        script = root / inside.lstrip("/")
        try:
            uid = os.stat(f"/proc/{pid}").st_uid
            descriptor = os.open(script, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
            with open(descriptor, "w", encoding="utf-8") as file:
                # It removes itself: nobody here knows when it runs.
                file.write(
                    source
                    + f"try:\n import os as _o; _o.unlink({inside!r}); del _o\nexcept BaseException: pass\n"
                )
                if uid != os.geteuid():
                    os.fchown(file.fileno(), uid, -1)
        except OSError as error:
            raise InjectError(
                "forbidden", f"cannot write {script}: {error.strerror}", may_try_another=True
            ) from error
        done = self._call(pid, inside)
        if done.returncode != 0:
            script.unlink(missing_ok=True)
            lines = done.stderr.decode(errors="replace").strip().splitlines()
            raise InjectError(
                "remote_exec",
                f"sys.remote_exec failed: {lines[-1] if lines else 'no reason given'}",
                may_try_another=True,
            )
        return Report(self.name, "queued", detail="runs when the main thread executes Python bytecode")

    def _call(self, pid: int, inside: str) -> subprocess.CompletedProcess[bytes]:
        executable = os.readlink(f"/proc/{pid}/exe")
        if _same_root(pid):
            command = [executable, "-I", "-c", _code(pid, inside)]
        else:
            command = _inside_container(pid, executable, inside)
        try:
            return subprocess.run(
                command, stdin=subprocess.DEVNULL, capture_output=True, timeout=_TIMEOUT_S, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise InjectError(
                "remote_exec",
                f"the job's interpreter {executable} cannot be run: {error}",
                may_try_another=True,
            ) from error


def _code(pid: int, inside: str) -> str:
    return f"import sys; sys.remote_exec({pid}, {inside!r})"


def _inside_container(pid: int, executable: str, inside: str) -> list[str]:
    """The same command run in the job's own view: its mounts, its pids, its root folder.

    Raises:
        InjectError: there is no nsenter.
    """
    enter = shutil.which("nsenter")
    if enter is None:
        raise InjectError(
            "remote_exec", "the job runs in a container, and there is no nsenter here", may_try_another=True
        )
    # A chroot shows in the link, a mount namespace does not.
    root = os.readlink(f"/proc/{pid}/root")
    if root != "/" and executable.startswith(root + "/"):
        executable = executable[len(root) :]
    own_pid = int((read_status(pid).get("NSpid") or str(pid)).split()[-1])
    return [enter, "-t", str(pid), "-m", "-p", "-r", executable, "-I", "-c", _code(own_pid, inside)]


def _same_root(pid: int) -> bool:
    try:
        ours, theirs = os.stat("/"), os.stat(f"/proc/{pid}/root/")
        return (ours.st_dev, ours.st_ino) == (theirs.st_dev, theirs.st_ino)
    except OSError:
        return False


def python_version(pid: int) -> tuple[int, int] | None:
    """Version of the CPython in `pid` by the names of its files; None when they do not tell.

    Without asking the interpreter: nothing is started for a mere question.
    """
    try:
        with open(f"/proc/{pid}/maps", encoding="utf-8", errors="replace") as file:
            text = file.read()
        executable = os.readlink(f"/proc/{pid}/exe")
    except OSError:
        return None
    pattern = r"(?:libpython|/lib/python|/python)(\d+)\.(\d+)"
    found = re.search(pattern, executable) or re.search(pattern, text)
    if found is None and executable == os.path.realpath(sys.executable):
        return sys.version_info[0], sys.version_info[1]
    return (int(found[1]), int(found[2])) if found is not None else None
