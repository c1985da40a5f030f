"""The rule that the agent never harms the job.

An error of ours is recorded once, and that probe is off afterwards.
"""

from __future__ import annotations

import functools
import os
import sys
import traceback
from typing import Any, Callable, TypeVar

_Call = TypeVar("_Call", bound=Callable[..., Any])

#: Names of the probes that failed and are off.
OFF: set[str] = set()

_report: list[Callable[[dict[str, Any]], None]] = []
_debug = bool(os.environ.get("OOMSCOPE_DEBUG"))


def report_to(emit: Callable[[dict[str, Any]], None] | None) -> None:
    """Send `agent_error` records to `emit`; None forgets it."""
    _report[:] = [] if emit is None else [emit]


def failed(probe: str) -> None:
    """Record the exception being handled and switch `probe` off. Never raises."""
    OFF.add(probe)
    try:
        text = "".join(traceback.format_exception(*sys.exc_info())[-6:])
        for emit in _report:
            emit({"k": "agent_error", "probe": probe, "error": text[-4000:]})
        if _debug:
            sys.stderr.write(f"oomscope agent: {probe}: {text}")
    except Exception:  # noqa: BLE001  # the guard itself: there is nobody left to tell
        return


def guarded(probe: str, default: Any = None) -> Callable[[_Call], _Call]:
    """Decorator: run the function unless `probe` is off.

    An `Exception` inside it returns `default` and turns it off.

    `BaseException`s that are no `Exception` (the requested end of the job, Ctrl-C) pass through.
    """

    def decorate(function: _Call) -> _Call:
        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            if probe in OFF:
                return default
            try:
                return function(*args, **kwargs)
            except Exception:  # noqa: BLE001  # the agent guard
                failed(probe)
                return default

        return call  # type: ignore[return-value]

    return decorate
