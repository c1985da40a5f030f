"""Fixes for scripts that leave the loop to a framework: its own switches, set where they are constructed."""

from __future__ import annotations

import copy
import functools
import json
import math
import os
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


def install_deepspeed_config(runtime: Runtime, options: dict[str, Any]) -> None:
    """Another ZeRO stage, or offload, in the configuration that the script gives to `deepspeed.initialize`.

    Args:
        runtime: hooks and reporting.
        options: `stage` (1 to 3: at least that stage), `offload` ("optimizer", "param").
    """
    fix = "deepspeed-config"

    def patch(module: Any) -> None:
        original = module.initialize

        @functools.wraps(original)
        def initialize(args: Any = None, *rest: Any, **kwargs: Any) -> Any:
            given = (
                kwargs.get("config") or kwargs.get("config_params") or getattr(args, "deepspeed_config", None)
            )
            config = _deepspeed_config(given)
            if config is not None and not isinstance(config.get("zero_optimization") or {}, dict):
                config = None
            if config is None or len(rest) >= _DEEPSPEED_CONFIG_POSITION:
                runtime.report(fix, REFUSED, "the configuration is in no form that is understood")
                return original(args, *rest, **kwargs)
            told = _with_zero(config, int(options.get("stage", 0)), tuple(options.get("offload") or ()))
            runtime.report(fix, APPLIED if told else REFUSED, told or f"already active: {_zero_of(config)}")
            if not told:
                return original(args, *rest, **kwargs)
            kwargs.pop("config_params", None)
            if getattr(args, "deepspeed_config", None) is not None:
                args = copy.copy(args)
                args.deepspeed_config = None
            return original(args, *rest, **{**kwargs, "config": config})

        runtime.patches.attr(module, "initialize", initialize)

    runtime.imports.when("deepspeed", patch)
    runtime.patches.call(runtime.imports.remove)
    runtime.settle(
        lambda: (
            None
            if runtime.state(fix)
            else runtime.report(fix, REFUSED, "deepspeed.initialize was not called")
        )
    )


#: Place of `config` among the positional arguments of `deepspeed.initialize`, `args` not counted (0.19).
_DEEPSPEED_CONFIG_POSITION = 10


def _deepspeed_config(given: Any) -> dict[str, Any] | None:
    """A copy of a configuration that is a dictionary or the path of a JSON file."""
    if isinstance(given, dict):
        return copy.deepcopy(given)
    if isinstance(given, (str, os.PathLike)) and os.path.isfile(given):
        try:
            with open(given, encoding="utf-8") as file:
                loaded = json.load(file)
        except (OSError, ValueError):  # DeepSpeed reads more than strict JSON
            return None
        return loaded if isinstance(loaded, dict) else None
    return None


def _zero_of(config: dict[str, Any]) -> str:
    zero = config.get("zero_optimization") or {}
    offloads = [f"offload_{name}" for name in ("optimizer", "param") if zero.get(f"offload_{name}")]
    return " with ".join([f"ZeRO stage {zero.get('stage', 0)}", *offloads])


def _with_zero(config: dict[str, Any], stage: int, offload: tuple[str, ...]) -> str:
    """Change `config` in place and say what it is now; empty when all of it was there."""
    zero = config["zero_optimization"] = config.get("zero_optimization") or {}
    before = copy.deepcopy(zero)
    present = zero.get("stage", 0)
    zero["stage"] = max(stage, present if isinstance(present, int) else 0)
    for name in offload:
        if not zero.get(f"offload_{name}"):
            zero[f"offload_{name}"] = {"device": "cpu"}
    return "" if zero == before else _zero_of(config)
