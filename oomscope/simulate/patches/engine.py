"""Phases of a training step, and eligibility for the multi-tensor optimizers."""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from .. import accumulate
from ..composition import mark_gradients, mark_optimizer


def install(mode: Any) -> None:
    """Follow backward passes and optimizer steps."""
    tracker = mode.tracker
    engine = torch.autograd.graph._engine_run_backward

    calibrated = [False]

    def run_backward(*args: Any, **kwargs: Any) -> Any:
        if not calibrated[0]:
            calibrated[0] = True
            accumulate.calibrate(mode)
        before = tracker.enter("backward")
        try:
            return engine(*args, **kwargs)
        finally:
            tracker.enter("forward" if before == "init" else before)
            for optimizer in list(tracker.optimizers):
                mark_gradients(tracker, optimizer)

    torch.autograd._engine_run_backward = run_backward
    torch.autograd.graph._engine_run_backward = run_backward

    def before_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mark_optimizer(tracker, optimizer)
        tracker.enter("optimizer")

    def after_step(optimizer: Any, _args: Any, _kwargs: Any) -> None:
        mark_optimizer(tracker, optimizer)
        tracker.enter("forward")
        tracker.sequence.clear()

    register_optimizer_step_pre_hook(before_step)
    register_optimizer_step_post_hook(after_step)
    _remember_optimizers(mode)
    # Both lists decide by `type(parameter)` whether the fast multi-tensor form is used, as it is for CUDA
    # tensors.
    for name in ("torch.optim.optimizer", "torch.utils._foreach_utils"):
        types = importlib.import_module(name)._foreach_supported_types
        if FakeTensor not in types:
            types.append(FakeTensor)


def _remember_optimizers(mode: Any) -> None:
    optimizer_class = torch.optim.Optimizer
    original = optimizer_class.add_param_group

    def add_param_group(self: Any, param_group: Any) -> None:
        original(self, param_group)
        mode.tracker.optimizers.add(self)

    optimizer_class.add_param_group = add_param_group
