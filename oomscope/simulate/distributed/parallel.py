"""DistributedDataParallel on the fake group: its C++ reducer needs a communication hook and a logger."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, ClassVar

import torch


def install() -> None:
    """Patch `DistributedDataParallel`."""
    dist = torch.distributed
    ddp = torch.nn.parallel.DistributedDataParallel
    plain_init, plain_pre_forward = ddp.__init__, ddp._pre_forward

    def average(_state: Any, bucket: Any) -> Any:
        """The gradients as they are: every rank has the same."""
        buffer = bucket.buffer()
        buffer.div_(dist.get_world_size())
        return _done(buffer)

    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        with _communication():
            plain_init(self, *args, **kwargs)
        self._simulated_hook = average
        dist._register_comm_hook(self.reducer, self, _call_hook)
        self.logger = _Silent()

    def pre_forward(self: Any, *inputs: Any, **kwargs: Any) -> Any:
        with _communication():  # after the first step the buckets are built anew here
            return plain_pre_forward(self, *inputs, **kwargs)

    def register_comm_hook(self: Any, state: Any, hook: Any) -> None:
        self._simulated_hook = lambda _module, bucket: hook(state, bucket)

    ddp.__init__ = init
    ddp._pre_forward = pre_forward
    if getattr(torch._C, "_has_cuda", False):
        # It starts a CUDA timer, which needs a driver, and counts iterations, by which timers are used later on.
        dist.Reducer.prepare_for_forward = lambda _self: None
    ddp.register_comm_hook = register_comm_hook
    dist._verify_params_across_processes = lambda *_args, **_kwargs: None
    torch.nn.parallel.distributed._verify_param_shape_across_processes = lambda *_args, **_kwargs: True


@contextlib.contextmanager
def _communication() -> Iterator[None]:
    """What is allocated inside is for communication."""
    from ..session import current

    session = current()
    if session is None:
        yield
        return
    tracker = session.tracker
    before, tracker.hint = tracker.hint, "communication"
    try:
        yield
    finally:
        tracker.hint = before


def _call_hook(module: Any, bucket: Any) -> Any:
    """The one hook that the reducer takes; users may register theirs later."""
    return module._simulated_hook(module, bucket)


def _done(value: Any) -> Any:
    future: Any = torch.futures.Future()
    future.set_result(value)
    return future


class _Silent:
    """Stands for the C++ logger, which wants a CUDA timer."""

    strs_map: ClassVar[dict[str, str]] = {}
    ints_map: ClassVar[dict[str, int]] = {}

    def _get_ddp_logging_data(self) -> _Silent:
        """Nothing was logged; Lightning reads it when training has ended."""
        return self

    def __getattr__(self, _name: str) -> Any:
        return lambda *_args, **_kwargs: None
