"""The self-test itself, in the process that `selftest.command` starts."""

from __future__ import annotations

import json
import os
import sys


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
