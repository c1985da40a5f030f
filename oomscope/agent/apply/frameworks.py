"""Fixes for scripts that leave the loop to a framework: its own switches, set where they are constructed."""

from __future__ import annotations

import functools
import math
from typing import Any

from .runtime import APPLIED, REFUSED, Runtime

_LIGHTNING = ("lightning.pytorch.trainer.trainer", "pytorch_lightning.trainer.trainer")


def install_hf_arguments(runtime: Runtime, options: dict[str, Any]) -> None:
    """Override fields of Transformers' `TrainingArguments`.

    Args:
        runtime: hooks and reporting.
        options: field -> value; `divide_batch` divides the batch of a device and multiplies the accumulation
            steps, so that the number of samples in an optimizer step stays.
    """
    fix = "hf-arguments"

    def patch(module: Any) -> None:
        cls = module.TrainingArguments
        # Subclasses (Seq2SeqTrainingArguments, SFTConfig) are dataclasses with an __init__ of their own, which ends in
        # __post_init__: there all fields stand as the script gave them, and none was looked at yet.
        original = cls.__post_init__

        @functools.wraps(original)
        def __post_init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            changes = _hf_changes(vars(self), options)
            told = ", ".join(f"{name}={value}" for name, value in changes.items())
            runtime.report(fix, APPLIED if changes else REFUSED, told or "already active")
            vars(self).update(changes)
            original(self, *args, **kwargs)

        runtime.patches.attr(cls, "__post_init__", __post_init__)

    runtime.imports.when("transformers.training_args", patch)
    runtime.patches.call(runtime.imports.remove)


def _hf_changes(current: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    wanted = {name: value for name, value in options.items() if name != "divide_batch"}
    factor = math.gcd(
        int(current.get("per_device_train_batch_size") or 1), int(options.get("divide_batch") or 1)
    )
    if factor > 1:
        wanted["per_device_train_batch_size"] = current["per_device_train_batch_size"] // factor
        wanted["gradient_accumulation_steps"] = int(current.get("gradient_accumulation_steps") or 1) * factor
    return {name: value for name, value in wanted.items() if name in current and current[name] != value}


def install_lightning_arguments(runtime: Runtime, options: dict[str, Any]) -> None:
    """Override arguments of Lightning's `Trainer`."""
    fix = "lightning-arguments"

    def patch(module: Any) -> None:
        cls = module.Trainer
        original = cls.__init__

        @functools.wraps(original)
        def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
            changes = {name: value for name, value in options.items() if kwargs.get(name) != value}
            told = ", ".join(f"{name}={value}" for name, value in changes.items())
            runtime.report(fix, APPLIED if changes else REFUSED, told or "already active")
            original(self, *args, **{**kwargs, **options})

        runtime.patches.attr(cls, "__init__", __init__)

    for name in _LIGHTNING:
        runtime.imports.when(name, patch)
    runtime.patches.call(runtime.imports.remove)
