"""Processes and threads that the script starts: helpers are left alone, all others get the device.

Data loader workers, pools and managers are helpers: nothing is simulated in them.
"""

from __future__ import annotations

import functools
import os
from multiprocessing.process import BaseProcess
from multiprocessing.reduction import ForkingPickler
from typing import Any, Callable

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.data._utils import worker

from ...protocol.env import OWN_DEVICE, SIMULATED_RANK
from ..distributed.spawn import Worker

_HELPERS = ("torch.utils.data.", "multiprocessing.", "multiprocess.", "concurrent.")
"""Modules whose functions are no training."""


def install(mode: Any) -> None:
    """Switch the mode off in forked workers, and on in threads that the script starts."""
    loop = worker._worker_loop

    @functools.wraps(loop)  # under its own name, so that it can be sent to a new process
    def worker_loop(*args: Any, **kwargs: Any) -> Any:
        with _disable_current_modes():
            return loop(*args, **kwargs)

    worker._worker_loop = worker_loop
    _threads(mode)
    _processes()


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


def _processes() -> None:
    """Tell every process that is started whether it has a device, and which rank it stands for."""
    start = BaseProcess.start

    def start_told(self: Any) -> None:
        from ..session import current

        session = current()
        target, args = self._target, self._args
        before = os.environ.pop(SIMULATED_RANK, None)
        if not str(getattr(target, "__module__", "")).startswith(_HELPERS) or _is_rank(args):
            os.environ[SIMULATED_RANK] = args[0].mark(args[1]) if _is_rank(args) else OWN_DEVICE
            if session is not None and session.starter is not None and target is not None:
                self._target = Started(session.starter, target)
        try:
            start(self)
        finally:
            os.environ.pop(SIMULATED_RANK, None)
            if before is not None:
                os.environ[SIMULATED_RANK] = before

    BaseProcess.start = start_told  # type: ignore[method-assign]
    ForkingPickler.register(FakeTensor, _send)


def _send(tensor: Any) -> Any:
    """A simulated tensor for another process: its shape."""
    kind = isinstance(tensor, torch.nn.Parameter)
    return _receive, (tuple(tensor.shape), tensor.stride(), tensor.dtype, str(tensor.fake_device), kind,
                      tensor.requires_grad)  # fmt: skip


def _receive(
    shape: Any, stride: Any, dtype: Any, device: str, is_parameter: bool, requires_grad: bool
) -> Any:
    """The tensor in the other process; its memory stays the sender's, as with CUDA's handles."""
    from ..session import current

    session = current()
    if session is None:
        return torch.empty_strided(shape, stride, dtype=dtype, device="meta")
    with session.mode.fake:
        made: Any = torch.empty_strided(shape, stride, dtype=dtype, device=device)
    session.tracker.know(made)
    return torch.nn.Parameter(made, requires_grad) if is_parameter else made.requires_grad_(requires_grad)


def _is_rank(args: Any) -> bool:
    return bool(args) and isinstance(args[0], Worker)


class Started:
    """What a process runs, after its device was started."""

    def __init__(self, starter: Callable[[], None], target: Any) -> None:
        self.starter = starter
        self.target = target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.starter()
        return self.target(*args, **kwargs)
