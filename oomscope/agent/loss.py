"""The loss of a step: the value of the tensor on which backward was called, without making the device wait.

On the CPU the value is read at once. On CUDA it is copied to pinned host memory behind the work that computes
it, with an event after the copy; a later step of the training thread finds the event done and takes the
value. The training thread never waits, and nothing keeps the user's tensor alive. During a CUDA graph
capture, and on a simulated device, there is no value. Several backward calls in one step (gradient
accumulation) add up: scripts divide the loss by the number of micro-steps.
"""

from __future__ import annotations

import weakref
from collections import deque
from typing import Any

from .writer import PendingValue

#: Copies in flight; more than this many steps behind, the oldest is given up.
_MAX_IN_FLIGHT = 64
#: Pinned numbers per dtype; a step with more micro-steps than this in flight has no loss.
_SLOTS = 1024


class LossReader:
    """Collects the losses of the micro-steps of one step."""

    def __init__(self, torch: Any, simulated: bool) -> None:
        self._torch = torch
        self._simulated = simulated
        self._plain = (torch.Tensor,)
        self._sum = 0.0
        self._parts: list[tuple[Any, Any]] = []
        self._seen = 0
        self._flying: deque[tuple[PendingValue, float, list[tuple[Any, Any]]]] = deque()
        self._buffers: dict[Any, tuple[Any, int]] = {}
        self._unscaled: tuple[int, Any] | None = None

    def saw_scaling(self, scaled: Any, original: Any) -> None:
        """GradScaler.scale made `scaled` of `original`: the loss is the original."""
        self._unscaled = (id(scaled), weakref.ref(original))

    def saw_backward(self, tensor: Any) -> None:
        """Take the value of `tensor` if it is one number of a plain tensor."""
        if self._unscaled is not None:
            identity, reference = self._unscaled
            self._unscaled = None
            original = reference()
            if identity == id(tensor) and original is not None:
                tensor = original
        if type(tensor) not in self._plain or tensor.numel() != 1 or not tensor.dtype.is_floating_point:
            return
        kind = tensor.device.type
        if kind == "cpu":
            self._sum += tensor.item()
            self._seen += 1
        elif kind == "cuda" and not self._simulated and not self._torch.cuda.is_current_stream_capturing():
            self._seen += self._copy(tensor)

    def finish_step(self) -> float | PendingValue | None:
        """The loss of the step that ended; None when there was none."""
        self.collect()
        total, parts, seen = self._sum, self._parts, self._seen
        self._sum, self._parts, self._seen = 0.0, [], 0
        if not seen:
            return None
        if not parts:
            return total
        if len(parts) + sum(len(each) for _, _, each in self._flying) > _SLOTS:
            return None
        pending = PendingValue()
        self._flying.append((pending, total, parts))
        if len(self._flying) > _MAX_IN_FLIGHT:
            self._flying.popleft()[0].ready = True
        return pending

    def _copy(self, tensor: Any) -> bool:
        """Start the copy to the host; False when the tensor is on another device than the current stream."""
        torch = self._torch
        if tensor.device.index != torch.cuda.current_device():
            return False
        host = self._slot(tensor.dtype)
        host.copy_(tensor.detach().reshape(()), non_blocking=True)
        event = torch.cuda.Event()
        event.record()
        self._parts.append((host, event))
        return True

    def _slot(self, dtype: Any) -> Any:
        """The next element of a pinned buffer, made once per dtype.

        Pinning memory is slow and waits for the device.
        """
        buffer, position = self._buffers.get(dtype, (None, 0))
        if buffer is None:
            buffer = self._torch.empty(_SLOTS, dtype=dtype, device="cpu", pin_memory=True)
        self._buffers[dtype] = (buffer, (position + 1) % _SLOTS)
        return buffer[position]

    def collect(self) -> None:
        """Take the values whose copies are done; nothing is asked during a graph capture."""
        if not self._flying or self._torch.cuda.is_current_stream_capturing():
            return
        while self._flying:
            pending, total, parts = self._flying[0]
            if not all(event.query() for _, event in parts):
                return
            pending.value = total + sum(float(host) for host, _ in parts)
            pending.ready = True
            self._flying.popleft()
