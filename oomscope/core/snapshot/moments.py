"""Names for moments of a history: "peak", "end", "oom", "step:12", "event:5000"."""

from __future__ import annotations

import numpy as np

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.words import FORMS
from oomscope.errors import UsageError


def moment(analysis: DeviceAnalysis, text: str) -> Focus:
    """The moment that `text` names.

    Args:
        analysis: the device.
        text: "auto" (just before the last OOM, else the peak, else the end), "peak", "end", "oom", "step:N"
        (the peak of that step) or
            "event:N" (just after that row, numbered as in the file).

    Raises:
        UsageError: another form, or the snapshot has no such moment.
    """
    device = analysis.device
    name, _, number = text.partition(":")
    if name == "auto" and not number:
        return analysis.focus
    if name == "end" and not number:
        return Focus(device.n_analysed - 1, "end")
    if name == "oom" and not number:
        if not analysis.ooms:
            raise UsageError(f"device {device.device} has no out-of-memory event", hint="use --at peak")
        return Focus(analysis.ooms[-1].event_index - 1, "oom")
    if not analysis.history.is_usable:
        raise UsageError(
            f"device {device.device} has no usable history ({analysis.history.value})", hint="use --at end"
        )
    if name == "peak" and not number:
        return Focus(analysis.peak[1], "peak")
    if name in ("step", "event") and number.isascii() and number.isdigit() and len(number) < 16:
        return _step(analysis, int(number)) if name == "step" else _event(analysis, int(number))
    raise UsageError(f"no moment {text!r}", hint=f"moments are {FORMS}")


def _step(analysis: DeviceAnalysis, number: int) -> Focus:
    steps = analysis.steps
    if steps.source == "none":
        raise UsageError(
            "no step boundaries were found in this history", hint="use --at peak or --at event:N"
        )
    if number >= steps.count:
        raise UsageError(f"step {number}: the history has steps 0 to {steps.count - 1}")
    edges = [0, *steps.rows.tolist(), len(analysis.live.after)]
    part = analysis.live.after[edges[number] : edges[number + 1]]
    return Focus(edges[number] + int(np.argmax(part)) if len(part) else edges[number] - 1, f"step {number}")


def _event(analysis: DeviceAnalysis, number: int) -> Focus:
    first = analysis.device.skipped_events
    if not first <= number < first + len(analysis.device.events):
        raise UsageError(
            f"event {number}: the loaded events are {first} to {first + len(analysis.device.events) - 1}"
        )
    return Focus(number - first, f"event {number}")
