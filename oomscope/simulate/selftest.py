"""Tries the simulated device in a process of its own: a mismatch is a sentence, never an abort of a job.

`command(python)` gives the command line; the process prints one JSON object: {"ok", "reason", "torch"}. A
process that prints nothing died in the attempt, which is a reason too: see `judge`.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any

_ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
_PACKAGE = __name__.rpartition(".")[0]


def command(python: str) -> list[str]:
    """The command line that runs the self-test with the interpreter of a job."""
    text = f"import sys; sys.path.insert(0, {_ROOT!r}); from {_PACKAGE} import selftest; selftest.main()"
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


def main() -> None:
    """Run the test and print its result."""
    version, reason = None, None
    try:
        import torch

        version = str(torch.__version__)
        reason = _try()
    except ImportError as problem:
        reason = f"the interpreter {sys.executable} cannot import torch: {problem}"
    except Exception as problem:  # noqa: BLE001  # whatever it is, it must come out as a sentence
        first_line = (str(problem).splitlines() or [""])[0]
        reason = f"the simulated device does not work here: {type(problem).__name__}: {first_line}"
    sys.stdout.write(json.dumps({"ok": reason is None, "reason": reason, "torch": version}) + "\n")
    sys.stdout.flush()
    os._exit(0)


def _try() -> str | None:
    """One backward pass on four elements, an optimizer step and an OutOfMemoryError.

    The reason of a failure.
    """
    from .session import refusal

    reason = refusal()
    if reason is not None:
        return reason
    import torch

    from . import start

    start({"device": "1GiB"}, lambda record: None)
    layer = torch.nn.Linear(2, 2, bias=False).to("cuda")
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    layer(torch.ones(2, 2, device="cuda")).sum().backward()
    optimizer.step()
    if layer.weight.grad is None or layer.weight.device.type != "cuda":
        return "the simulated device gave no gradient"
    if torch.cuda.memory_allocated() <= 0:
        return "the simulated device counted no memory"
    try:
        torch.empty(1 << 40, device="cuda")
    except torch.OutOfMemoryError:
        return None
    return "the simulated device did not run out of memory"


if __name__ == "__main__":
    main()
