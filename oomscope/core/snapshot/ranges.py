"""Annotated ranges (record_function) paired from their START and END rows, and signs of torch.compile."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from oomscope.core.snapshot.model import Snapshot

COMPILE_MARK = "(dynamo_timed)"
"""torch.compile's own internals carry this in their name; they come in thousands and hide the program's
ranges."""


@dataclass(frozen=True, slots=True)
class Range:
    """One annotated range; a missing side is None."""

    name: str
    device: int
    start_us: int | None
    end_us: int | None


def paired_ranges(snapshot: Snapshot, *, with_compile: bool = False) -> list[Range]:
    """Ranges in order of their start, innermost pairs first matched by a stack per device and name."""
    notes = snapshot.annotations
    opened: dict[tuple[int, int], list[int]] = defaultdict(list)
    found: list[Range] = []
    rows = zip(
        notes.is_start.tolist(),
        notes.name.tolist(),
        notes.device.tolist(),
        notes.time_us.tolist(),
        strict=True,
    )
    for is_start, name, device, time in rows:
        text = snapshot.texts[name] if name >= 0 else ""
        if not with_compile and COMPILE_MARK in text:
            continue
        waiting = opened[device, name]
        if is_start:
            waiting.append(time)
        else:
            found.append(Range(text, device, waiting.pop() if waiting else None, time))
    for (device, name), waiting in opened.items():
        text = snapshot.texts[name] if name >= 0 else ""
        found.extend(Range(text, device, time, None) for time in waiting)
    return sorted(
        found, key=lambda one: (one.start_us if one.start_us is not None else one.end_us or 0, one.name)
    )


def uses_compile(snapshot: Snapshot) -> bool:
    """Whether the program ran code that torch.compile made."""
    if any(COMPILE_MARK in text or text.startswith("## Call CompiledFxGraph") for text in snapshot.texts):
        return True
    return any(
        "torchinductor_" in frame.file or "_inductor" in frame.file for frame in snapshot.stacks.frames
    )
