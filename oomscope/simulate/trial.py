"""The self-test itself, in the process that `selftest.command` starts."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    """Run the test and print its result; whatever goes wrong comes out as a sentence."""
    sys.excepthook = _unexpected
    try:
        import torch
    except ImportError as problem:
        _tell(f"the interpreter {sys.executable} cannot import torch: {problem}", None)
    else:
        _tell(_try(), str(torch.__version__))


def _unexpected(kind: type[BaseException], problem: BaseException, _traceback: Any) -> None:
    first_line = (str(problem).splitlines() or [""])[0]
    version = getattr(sys.modules.get("torch"), "__version__", None)
    _tell(f"the simulated device does not work here: {kind.__name__}: {first_line}", version and str(version))


def _tell(reason: str | None, version: str | None) -> None:
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
