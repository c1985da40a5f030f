"""How a process introduces itself: the first record of its file."""

from __future__ import annotations

import os
import sys
from typing import Any

from ..protocol import env as variables
from ..protocol.records import PROTOCOL_VERSION, Identity


def hello(torch: Any, config: dict[str, Any], identity: Identity, host: str) -> dict[str, Any]:
    """The `hello` record of this process."""
    return {
        "k": "hello",
        "version": PROTOCOL_VERSION,
        "pid": os.getpid(),
        "start_time": _start_time(),
        "host": host,
        "argv": list(getattr(sys, "argv", [])),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "identity": dict(identity),
        "torch": str(torch.__version__),
        "cuda": getattr(getattr(torch, "version", None), "cuda", None),
        "simulated": bool(config.get("device")),
        "role": config.get("role"),
        "env": variables.stored_environment(dict(os.environ)),
    }


def _start_time() -> int:
    """Clock ticks after boot at which this process started (field 22 of /proc/self/stat); 0 without /proc."""
    try:
        with open("/proc/self/stat") as stream:
            return int(stream.read().rpartition(")")[2].split()[19])
    except (OSError, ValueError, IndexError):
        return 0
