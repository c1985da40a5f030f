"""The run-time side of the fixes: changes to torch and to the model, inside the training process, all of them reversible.

The plan reaches this package as data. Each fix reports what became of it as a record of kind `fix`: `applied`, `refused`
with the reason, or `no_effect`.
"""

from __future__ import annotations

from typing import Any, Callable, Dict

from . import autocast, checkpointing
from .runtime import REFUSED, Refused, Runtime

Install = Callable[[Runtime, Dict[str, Any]], None]

#: What a plan may name, and how it is installed. The order of a plan does not matter; this order is the one used.
INSTALLERS: Dict[str, Install] = {
    "ckpt": checkpointing.install,
    "amp-bf16": autocast.install,
}


def apply(plan: Dict[str, Any], emit: Callable[[Dict[str, Any]], None]) -> Runtime:
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


def _install(runtime: Runtime, fix: str, install: Install, options: Dict[str, Any]) -> None:
    try:
        install(runtime, options)
    except Refused as reason:
        runtime.report(fix, REFUSED, str(reason))
    except Exception as error:  # noqa: BLE001  # the agent guard: the job goes on without the fix
        runtime.report(fix, REFUSED, f"could not be applied: {type(error).__name__}: {error}")


def _position(fix: str) -> int:
    order = list(INSTALLERS)
    return order.index(fix) if fix in order else len(order)
