"""Tries the simulated device in a process of its own: a mismatch is a sentence, never an abort of a job.

`command(python)` gives the command line; the process prints one JSON object: {"ok", "reason", "torch"}. A
process that prints nothing died in the attempt, which is a reason too: see `judge`.
"""

from __future__ import annotations

import json
import os
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PACKAGE = __name__.rpartition(".")[0]


def command(python: str) -> list[str]:
    """The command line that runs the self-test with the interpreter of a job."""
    text = f"import sys; sys.path.insert(0, {_ROOT!r}); from {_PACKAGE} import trial; trial.main()"
    return [python, "-c", text]


def judge(exit_code: int, output: str) -> dict[str, Any]:
    """The result of a self-test from what its process left: {"ok", "reason", "torch"}."""
    for line in reversed(output.splitlines()):
        if line.startswith("{"):
            try:
                found = json.loads(line)
            except ValueError:
                break
            if isinstance(found, dict) and "ok" in found:
                return found
    return {
        "ok": False,
        "reason": f"the self-test of the simulated device died (exit status {exit_code})",
        "torch": None,
    }
