"""Steps, micro-steps, losses and allocator readings, seen from outside the script.

A step ends when an optimizer steps (torch's public global hook); further optimizers belong to the same step
until one of them steps again, so the fastest one counts. A micro-step is one outermost `backward`.
"""

from __future__ import annotations

import functools
import time
import weakref
from typing import TYPE_CHECKING, Any, Callable

from .guard import OFF, failed, guarded
from .loss import LossReader
from .patching import Patches
from .readings import DeviceMemory, HostMemory
from .stop import StopTraining

if TYPE_CHECKING:
    from .holders import HolderProbe
    from .phases import ModuleProbe


class Progress:
    """Where the script is: read by the recorder and the simulated device, written by the probes.

    Attributes:
        step: the step that runs, counted from 0; equals the number of completed steps.
        micro_step: completed backward calls of this step.
        phase: one of `protocol.records.PHASES`.
        watch: called with (old, new) at each change of phase, before it.
    """

    __slots__ = ("in_backward", "micro_step", "phase", "step", "watch")

    def __init__(self) -> None:
        self.step = 0
        self.micro_step = 0
        self.phase = "other"
        self.in_backward = 0
        self.watch: Callable[[str, str], None] | None = None

    def enter(self, phase: str) -> str:
        """Change the phase; returns the one that ran until now."""
        before = self.phase
        if self.watch is not None and phase != before:
            self.watch(before, phase)
        self.phase = phase
        return before

    def current(self) -> tuple[int, str]:
        """(step, phase) now."""
        return self.step, self.phase


class StepProbe:
    """Hooks the optimizer, `backward` and `zero_grad`; emits one `step` record per step.

    Args:
        emit: takes records.
        on_first_use: called when training visibly begins (an optimizer is built): the process is a rank.
        on_step: called after each step's record, with the number of completed steps.
        stop_after: raise `StopTraining` after this many steps.
    """

    def __init__(
        self,
        torch: Any,
        progress: Progress,
        device: DeviceMemory,
        host: HostMemory,
        emit: Callable[[dict[str, Any]], None],
        *,
        on_first_use: Callable[[], None],
        on_step: Callable[[int], None],
        stop_after: int | None,
        simulated: bool,
    ) -> None:
        self.progress = progress
        self.modules: ModuleProbe | None = None
        self.holders: HolderProbe | None = None
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self._window: weakref.WeakSet[Any] = weakref.WeakSet()
        self.loss = LossReader(torch, simulated)
        self._torch = torch
        self._device = device
        self._host = host
        self._emit = emit
        self._on_first_use = on_first_use
        self._on_step = on_step
        self._stop_after = stop_after
        self._last_ns = time.monotonic_ns()
        self._low: int | None = None
        self._before_optimizer = "other"
        self._stepping = 0

    def install(self, patches: Patches) -> None:
        """Arm the hooks."""
        from torch.optim import Optimizer
        from torch.optim.optimizer import (
            register_optimizer_step_post_hook,
            register_optimizer_step_pre_hook,
        )

        patches.handle(register_optimizer_step_pre_hook(self._before_step))
        patches.handle(register_optimizer_step_post_hook(self._after_step))
        self._patch_optimizer(patches, Optimizer)
        self._patch_backward(patches)
        self._patch_scaler(patches)

    # -- hooks

    def _patch_optimizer(self, patches: Patches, optimizer: Any) -> None:
        build, zero = optimizer.__init__, optimizer.zero_grad
        probe = self

        @functools.wraps(build)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            build(self, *args, **kwargs)
            probe._built(self)

        @functools.wraps(zero)
        def zero_grad(self: Any, *args: Any, **kwargs: Any) -> Any:
            result = zero(self, *args, **kwargs)
            probe.note_low()
            return result

        patches.attribute(optimizer, "__init__", __init__)
        patches.attribute(optimizer, "zero_grad", zero_grad)

    def _patch_backward(self, patches: Patches) -> None:
        autograd = self._torch.autograd
        inner = autograd.backward
        progress, saw, first = self.progress, self._saw_backward, guarded("start")(self._on_first_use)

        @functools.wraps(inner)
        def backward(tensors: Any, *args: Any, **kwargs: Any) -> Any:
            if progress.in_backward:  # reentrant checkpointing calls backward inside backward
                return inner(tensors, *args, **kwargs)
            before = progress.enter("backward")
            progress.in_backward = 1
            if progress.step == 0:
                first()
            saw(tensors)
            try:
                result = inner(tensors, *args, **kwargs)
                progress.micro_step += 1
                return result
            finally:
                progress.in_backward = 0
                progress.enter("other" if before == "forward" else before)

        patches.attribute(autograd, "backward", backward)

    def _patch_scaler(self, patches: Patches) -> None:
        scaler = getattr(getattr(self._torch, "amp", None), "GradScaler", None)
        if scaler is None:
            return
        inner, saw = scaler.scale, guarded("loss")(self.loss.saw_scaling)
        tensor_type = self._torch.Tensor

        @functools.wraps(inner)
        def scale(self: Any, outputs: Any) -> Any:
            result = inner(self, outputs)
            if isinstance(outputs, tensor_type):
                saw(result, outputs)
            return result

        patches.attribute(scaler, "scale", scale)

    @guarded("optimizers")
    def _built(self, optimizer: Any) -> None:
        self.optimizers.add(optimizer)
        self._on_first_use()

    @guarded("loss")
    def _saw_backward(self, tensors: Any) -> None:
        if isinstance(tensors, (tuple, list)):
            if len(tensors) != 1:
                return
            tensors = tensors[0]
        self.loss.saw_backward(tensors)

    def _before_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        self._stepping += 1
        self._before_optimizer = self.progress.enter("optimizer")

    def _after_step(self, optimizer: Any, args: Any, kwargs: Any) -> None:
        progress = self.progress
        if not self._stepping:  # we came while it stepped, and know nothing of this step
            return
        self._stepping -= 1
        progress.enter(
            "other" if self._before_optimizer in ("forward", "optimizer") else self._before_optimizer
        )
        if "steps" in OFF:
            return
        try:
            if self._window and optimizer not in self._window:
                self._window.add(optimizer)  # another one of the same step: a GAN has two
                return
            self._window.clear()
            self._window.add(optimizer)
            self._finish_step()
        except StopTraining:
            raise
        except Exception:  # noqa: BLE001  # the agent guard, inlined: this path runs at every step
            failed("steps")
        if self._stop_after is not None and progress.step >= self._stop_after:
            raise StopTraining(progress.step)

    # -- readings

    @guarded("loss")
    def finish(self) -> None:
        """At the end: take the losses that have arrived since the last step."""
        self.loss.collect()

    def note_low(self) -> None:
        """Remember the fewest allocated bytes of this step; called where tensors have just been dropped."""
        if "low" in OFF:
            return
        try:
            current = self._device.allocated_bytes()
            if current is not None and (self._low is None or current < self._low):
                self._low = current
        except Exception:  # noqa: BLE001  # the agent guard, inlined
            failed("low")

    def _finish_step(self) -> None:
        progress = self.progress
        if progress.step == 0:
            self._on_first_use()
        now = time.monotonic_ns()
        reading = self._device.step()
        current = reading["allocated_bytes"]
        low = current if self._low is None or current is None else min(self._low, current)
        rss = self._host.rss_bytes()
        self._emit(
            {
                "k": "step",
                "step": progress.step,
                "micro_steps": progress.micro_step,
                "low_allocated_bytes": low,
                "peak_allocated_bytes": reading["peak_allocated_bytes"],
                "peak_reserved_bytes": reading["peak_reserved_bytes"],
                "reserved_bytes": reading["reserved_bytes"],
                "rss_bytes": rss,
                "peak_rss_bytes": self._host.peak_rss_bytes,
                "loss": self.loss.finish_step(),
                "input_numel": self.modules.take_input_numel() if self.modules is not None else None,
                "duration_ns": now - self._last_ns,
                "retries": reading["retries"],
            }
        )
        if self.modules is not None:
            self.modules.finish_step(progress.step)
        if self.holders is not None:
            self.holders.after_step(progress.step, low, rss)
        self._last_ns = now
        self._low = None
        progress.micro_step = 0
        progress.step += 1
        self._on_step(progress.step)
