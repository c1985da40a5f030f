"""The run-time side of the fixes: reversible changes to torch and to the model, inside the training process.

The plan reaches this package as data. Each fix reports what became of it as a record of kind `fix`:
`applied`, `refused` with the reason, or `no_effect`.
"""

from __future__ import annotations

from typing import Any, Callable

from . import (
    autocast,
    checkpointing,
    chunked,
    fingerprint,
    frameworks,
    gradients,
    observe,
    optimizers,
    precision,
    sharding,
    vocabulary,
)
from .runtime import REFUSED, Refused, Runtime

Install = Callable[[Runtime, "dict[str, Any]"], None]

#: What a plan may name, and how it is installed. The order of a plan does not matter; this order is the one
#: used.
INSTALLERS: dict[str, Install] = {
    "zero-none": gradients.install_zero_none,
    "bucket-view": gradients.install_bucket_view,
    "eval-no-grad": gradients.install_eval_no_grad,
    "optim-fused": optimizers.install_fused,
    "optim-8bit": optimizers.install_eight_bit,
    "zero1": optimizers.install_zero1,
    "optim-in-bwd": optimizers.install_in_backward,
    "fused-ce": vocabulary.install,
    "ckpt": checkpointing.install,
    "ckpt-selective": lambda runtime, options: checkpointing.install(
        runtime, {"selective": True, **options}, "ckpt-selective"
    ),
    "ckpt-half": lambda runtime, options: checkpointing.install(
        runtime, {"every": 2, **options}, "ckpt-half"
    ),
    "offload-activations": lambda runtime, options: checkpointing.install(
        runtime, {"offload": True, **options}, "offload-activations"
    ),
    "amp-bf16": autocast.install,
    "amp-fp16": precision.install,
    "fsdp2": sharding.install,
    "hf-arguments": frameworks.install_hf_arguments,
    "lightning-arguments": frameworks.install_lightning_arguments,
    "deepspeed-config": frameworks.install_deepspeed_config,
    "microbatch-exact": chunked.install,
    "observe": observe.install,
    "fingerprint": fingerprint.install,
}


def apply(plan: dict[str, Any], emit: Callable[[dict[str, Any]], None]) -> Runtime:
    """Install the run-time fixes of `plan`; called right after `import torch`.

    Args:
        plan: `{"fixes": [{"id": "ckpt", "options": {}}]}`; ids that have no run-time side are skipped.
        emit: takes one record.

    Returns:
        The runtime, whose `undo()` takes everything back.
    """
    runtime = Runtime(emit)
    wanted = {str(each["id"]): dict(each.get("options") or {}) for each in plan.get("fixes") or ()}
    for fix in sorted(wanted, key=_position):
        install = INSTALLERS.get(fix)
        if install is not None:
            _install(runtime, fix, install, wanted[fix])
    return runtime


def _install(runtime: Runtime, fix: str, install: Install, options: dict[str, Any]) -> None:
    try:
        install(runtime, options)
    except Refused as reason:
        runtime.report(fix, REFUSED, str(reason))
    except Exception as error:  # noqa: BLE001  # the agent guard: the job goes on without the fix
        runtime.report(fix, REFUSED, f"could not be applied: {type(error).__name__}: {error}")


def _position(fix: str) -> int:
    order = list(INSTALLERS)
    return order.index(fix) if fix in order else len(order)
