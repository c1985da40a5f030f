"""Fixes of what holds gradients: `zero_grad`, DistributedDataParallel's buckets, evaluation with a graph."""

from __future__ import annotations

import functools
from typing import Any, Callable

import torch
from torch import nn

from .runtime import APPLIED, NO_EFFECT, REFUSED, Runtime, has_trainable


def install_zero_none(runtime: Runtime, options: dict[str, Any]) -> None:
    """`zero_grad` frees the gradients although the script asks to fill them with zeros."""
    changed = []

    def replace(owner: type) -> None:
        original = owner.zero_grad  # type: ignore[attr-defined]

        @functools.wraps(original)
        def zero_grad(self: Any, set_to_none: bool = True) -> Any:
            if not set_to_none:
                changed.append(True)
                runtime.report(
                    "zero-none", APPLIED, f"{type(self).__qualname__}.zero_grad(set_to_none=False)"
                )
            return original(self, True)

        runtime.patches.attr(owner, "zero_grad", zero_grad)

    replace(torch.optim.Optimizer)
    replace(nn.Module)
    runtime.settle(
        lambda: (
            None
            if changed
            else runtime.report("zero-none", NO_EFFECT, "the script frees its gradients already")
        )
    )


def install_bucket_view(runtime: Runtime, options: dict[str, Any]) -> None:
    """DistributedDataParallel keeps the gradients in its communication buckets, not beside them."""
    wrapper = nn.parallel.DistributedDataParallel
    original = wrapper.__init__
    seen = []

    @functools.wraps(original)
    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        seen.append(True)
        if kwargs.get("gradient_as_bucket_view"):
            runtime.report("bucket-view", REFUSED, "already active: gradient_as_bucket_view=True")
        else:
            runtime.report("bucket-view", APPLIED, "gradient_as_bucket_view=True")
            kwargs["gradient_as_bucket_view"] = True
        original(self, *args, **kwargs)

    runtime.patches.attr(wrapper, "__init__", __init__)
    runtime.settle(
        lambda: None if seen else runtime.report("bucket-view", REFUSED, "no DistributedDataParallel model")
    )


def install_eval_no_grad(runtime: Runtime, options: dict[str, Any]) -> None:
    """Calls of a model in evaluation mode run without a graph."""

    def around(module: nn.Module, call: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if module.training or not torch.is_grad_enabled() or not has_trainable(module):
            return call(*args, **kwargs)
        if any(
            isinstance(value, torch.Tensor) and value.requires_grad for value in (*args, *kwargs.values())
        ):
            return call(*args, **kwargs)  # the gradient of an input is wanted (attacks, inversion)
        runtime.report("eval-no-grad", APPLIED, f"{type(module).__qualname__} in evaluation mode")
        with torch.no_grad():
            return call(*args, **kwargs)

    runtime.around(around)
    runtime.at_end(
        lambda: (
            None
            if runtime.state("eval-no-grad")
            else runtime.report("eval-no-grad", NO_EFFECT, "no model ran in evaluation mode with a graph")
        )
    )
