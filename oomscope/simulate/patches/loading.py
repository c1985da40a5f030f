"""Data loader workers are ordinary processes: nothing is simulated in them."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker


def install(mode: Any) -> None:
    """Switch the mode off in forked workers, and on in threads that the script starts."""
    loop = worker._worker_loop

    def worker_loop(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return loop(*args, **kwargs)

    worker._worker_loop = worker_loop
    _threads(mode)


def _threads(mode: Any) -> None:
    import threading

    run = threading.Thread.run

    def run_simulated(self: Any) -> None:
        # Not `with mode`: that also keeps flags of the whole process, which threads would mix up.
        torch._C._push_on_torch_dispatch_stack(mode)
        try:
            run(self)
        finally:
            torch._C._pop_torch_dispatch_stack(None)

    threading.Thread.run = run_simulated  # type: ignore[method-assign]
