"""Records what a rerun must reproduce: learning rates, and sums of buffers and parameters, at the first steps.

Sums are taken at steps 1, 2, 4, 8 … only, so that the cost vanishes; a simulated device has no values to sum.
"""

from __future__ import annotations

from typing import Any, Callable

import torch
from torch import nn

from .runtime import Runtime, trains

#: No more is recorded after so many steps.
_LAST_STEP = 1024


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """Emit a record `fingerprint` after the optimizer steps 1, 2, 4, 8 …, counted from 1."""
    _Fingerprints(runtime).start()


class _Fingerprints:
    def __init__(self, runtime: Runtime) -> None:
        self.runtime = runtime
        self.model: Any = None
        self.size = -1
        self.steps: dict[int, int] = {}

    def start(self) -> None:
        self.runtime.around(self._around)
        self.runtime.watch_optimizers()
        self.runtime.on_step.append(self._on_step)

    def _around(self, module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module is not self.model and trains(module):
            size = sum(parameter.numel() for parameter in module.parameters())
            if size > self.size:
                self.model, self.size = module, size
        return call(*args, **kwargs)

    def _on_step(self, optimizer: Any) -> None:
        done = self.steps[id(optimizer)] = self.steps.get(id(optimizer), 0) + 1
        if done == max(self.steps.values()) and done <= _LAST_STEP and done & (done - 1) == 0:
            self.runtime.guarded("fingerprint", lambda: self._emit(done, optimizer))

    def _emit(self, done: int, optimizer: Any) -> None:
        rates = [float(group["lr"]) for group in optimizer.param_groups if "lr" in group]
        self.runtime.emit(
            {
                "k": "fingerprint",
                "step": done - 1,
                "learning_rates": rates,
                "buffers": _sum(self.model.buffers()) if self.model is not None else None,
                "parameters": _sum(self.model.parameters()) if self.model is not None else None,
            }
        )


def _sum(tensors: Any) -> float | None:
    """Sum of all values in float64; None where there are none to read (fake and sharded tensors)."""
    total = 0.0
    for tensor in tensors:
        if type(tensor) not in (torch.Tensor, nn.Parameter):
            return None
        total += float(tensor.detach().double().sum())
    return total
