"""float16 autocast with a gradient scaler around a loop that knows of neither.

The loss is scaled in `backward`; gradients are unscaled before the script clips them, at the latest before
the step; a step with infinite gradients is skipped and the scale halved, as `torch.amp.GradScaler` does in a
prepared loop.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch import nn

from . import autocast
from .runtime import REFUSED, Runtime

FIX = "amp-fp16"


def install(runtime: Runtime, options: dict[str, Any]) -> None:
    """Scale, unscale and skip around the script's own optimizer steps.

    Args:
        runtime: hooks and reporting.
        options: `init_scale` (default 65536), `device` (default "cuda" where there is one).
    """
    _Scaled(runtime, options).start()


class _Scaled:
    def __init__(self, runtime: Runtime, options: dict[str, Any]) -> None:
        self.runtime = runtime
        self.options = options
        device = str(options.get("device") or ("cuda" if torch.cuda.is_available() else "cpu"))
        self.scaler = torch.amp.GradScaler(device, init_scale=float(options.get("init_scale", 65536.0)))
        self.theirs = False
        self.unscaled: set[int] = set()

    def start(self) -> None:
        runtime = self.runtime
        self._watch_own_scaler()
        autocast.install(runtime, {"dtype": "float16"}, FIX)
        runtime.watch_backward()
        runtime.on_backward.append(self._scale)
        runtime.watch_optimizers()
        runtime.on_optimizer.append(self._gate)
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            self._unscale_before(name)

    def _watch_own_scaler(self) -> None:
        """A script with a scaler of its own keeps it."""
        original = torch.amp.GradScaler.scale
        owner = self

        @functools.wraps(original)
        def scale(self: Any, outputs: Any) -> Any:
            if self is not owner.scaler:
                owner.theirs = True
                owner.runtime.report(FIX, REFUSED, "already active: the script uses a GradScaler")
            return original(self, outputs)

        self.runtime.patches.attr(torch.amp.GradScaler, "scale", scale)

    def _scale(self, loss: torch.Tensor) -> torch.Tensor | None:
        return None if self.theirs else self.scaler.scale(loss)

    def _unscale_before(self, name: str) -> None:
        original = getattr(nn.utils.clip_grad, name)

        @functools.wraps(original)
        def clip(*args: Any, **kwargs: Any) -> Any:
            for optimizer in list(self.runtime.optimizers):
                self._unscale(optimizer)
            return original(*args, **kwargs)

        for place in (nn.utils.clip_grad, nn.utils):
            self.runtime.patches.attr(place, name, clip)

    def _unscale(self, optimizer: Any) -> None:
        has_gradients = any(p.grad is not None for group in optimizer.param_groups for p in group["params"])
        if not self.theirs and id(optimizer) not in self.unscaled and has_gradients:
            self.unscaled.add(id(optimizer))
            self.scaler.unscale_(optimizer)

    def _gate(self, optimizer: Any) -> None:
        plain = optimizer.step
        owner = self

        def step(self: Any, *args: Any, **kwargs: Any) -> Any:
            if isinstance(self, torch.optim.LBFGS):
                owner.theirs = True
                owner.runtime.report(FIX, REFUSED, "the optimizer calls its closure several times a step")
            if owner.theirs:
                return plain(*args, **kwargs)
            closure = args[0] if args else kwargs.get("closure")
            if not callable(closure):
                return owner._step(self, functools.partial(plain, *args, **kwargs))
            with torch.enable_grad():
                loss = closure()
            rest = {name: value for name, value in kwargs.items() if name != "closure"}
            owner._step(self, functools.partial(plain, *args[1:], **rest))
            return loss

        # LRScheduler reads `step.__func__`: it must be a bound method.
        self.runtime.patches.attr(optimizer, "step", types.MethodType(step, optimizer))

    def _step(self, optimizer: Any, plain: Any) -> Any:
        self._unscale(optimizer)
        if id(optimizer) not in self.unscaled:
            return plain()
        self.unscaled.discard(id(optimizer))
        found = self.scaler._per_optimizer_states[id(optimizer)]["found_inf_per_device"].values()
        finite = not sum(float(each.item()) for each in found)
        result = plain() if finite else None
        self.scaler.update()
        return result
