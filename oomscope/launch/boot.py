"""The folder that brings the agent into the job: bootstrap, bundle and configuration, first on PYTHONPATH."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomscope.agent import bundle
from oomscope.errors import SetupError
from oomscope.protocol import env as variables
from oomscope.protocol import layout
from oomscope.store.files import write_json


def write_boot(attempt_dir: Path, config: Mapping[str, Any]) -> Path:
    """Write boot/ below `attempt_dir` and the folder for the sockets; returns boot/.

    Raises:
        SetupError: the folder cannot be written.
    """
    boot = attempt_dir / layout.BOOT_DIR
    try:
        boot.mkdir(mode=0o700, parents=True, exist_ok=True)
        (boot / "sitecustomize.py").write_text(bundle.sitecustomize(), encoding="utf-8")
        text = bundle.source(simulate=config.get("device") is not None)
        (boot / layout.BUNDLE_FILE).write_text(text, encoding="utf-8")
        write_json(boot / layout.AGENT_CONFIG, dict(config))
        _make_private(config["rundir"])
    except OSError as error:
        raise SetupError(f"cannot write {boot}: {error.strerror}") from error
    return boot


def _make_private(folder: str) -> None:
    """Make a folder, and its parent, that nobody else can enter: /tmp is everybody's.

    Raises:
        OSError: it cannot be made, or somebody else made it first.
    """
    for path in (os.path.dirname(folder), folder):
        os.makedirs(path, mode=0o700, exist_ok=True)
        found = os.lstat(path)
        if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid():
            raise PermissionError(errno.EPERM, f"{path} belongs to somebody else")
        if found.st_mode & 0o077:
            os.chmod(path, 0o700)


def job_environment(
    base: Mapping[str, str], boot: Path, *, session: Path, attempt_dir: Path
) -> dict[str, str]:
    """`base` with the agent in front of PYTHONPATH and the mark by which the job's processes are known."""
    environment = dict(base)
    environment.pop(variables.OWNER, None)
    path = [str(boot), *(each for each in environment.get("PYTHONPATH", "").split(os.pathsep) if each)]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    environment[variables.SESSION] = str(session)
    environment[variables.ATTEMPT] = str(attempt_dir)
    return environment
