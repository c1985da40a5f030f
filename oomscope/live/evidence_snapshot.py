"""A snapshot of the failing rank as facts: the live set at the failure, survivors of earlier steps, settings, pools."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oomscope.core.diagnosis.evidence import (
    AllocatorFact,
    GrowthGroup,
    LiveGroup,
    OomFact,
    Settings,
    StepRow,
)
from oomscope.errors import SnapshotError
from oomscope.live.evidence_source import source_line


@dataclass(frozen=True)
class SnapshotFacts:
    """What one snapshot contributes; `note` says why there is nothing."""

    live: tuple[LiveGroup, ...] = ()
    growth: GrowthGroup | None = None
    allocator: AllocatorFact | None = None
    settings: Settings | None = None
    oom: OomFact | None = None
    """From the history's own `oom` row, for snapshots without a session."""
    torch_version: str | None = None
    notes: tuple[str, ...] = ()


def settings_of(found: dict[str, Any]) -> Settings | None:
    """The allocator's settings as the snapshot records them; None before torch 2.3."""
    if not found:
        return None
    split, threshold = found.get("max_split_size"), found.get("garbage_collection_threshold")
    return Settings(
        raw=str(found.get("PYTORCH_CUDA_ALLOC_CONF") or ""),
        expandable=found.get("expandable_segments")
        if isinstance(found.get("expandable_segments"), bool)
        else None,
        max_split=isinstance(split, int) and split > 0 if split is not None else None,
        gc_threshold=isinstance(threshold, (int, float)) and threshold > 0 if threshold is not None else None,
    )


def read_snapshot(
    path: Path,
    *,
    device: int | None,
    steps: Sequence[StepRow],
    oom: OomFact | None,
    strict: bool = False,
) -> SnapshotFacts:
    """Facts from the snapshot at `path`.

    Args:
        path: the file.
        device: CUDA ordinal to look at; None = the busiest.
        steps: rows of the rank, for the birth of survivors.
        oom: the failure as the observer saw it, for the capacity.
        strict: raise when the file cannot be read, instead of noting it.

    Raises:
        SnapshotError: with `strict`: not a snapshot, damaged, or beyond the limits.
    """
    from oomscope.core.diagnosis.survivors import StepEnds, growth, live_groups
    from oomscope.core.snapshot.analysis import DeviceAnalysis
    from oomscope.store.snapshots import load_snapshot

    try:
        snapshot = load_snapshot(path)
    except SnapshotError as error:
        if strict:
            raise
        return SnapshotFacts(notes=(f"snapshot not read: {error.message}",))
    chosen = snapshot.busiest()
    if device is not None and device < len(snapshot.devices):
        chosen = snapshot.devices[device]
    if chosen is None:
        return SnapshotFacts(settings=settings_of(snapshot.settings), notes=("the snapshot is empty",))
    analysis = DeviceAnalysis(snapshot, chosen)
    ended = [(row.step, row.end_ns // 1000) for row in steps if row.end_ns is not None]
    ends = StepEnds(tuple(step for step, _ in ended), tuple(end for _, end in ended))
    event = _oom_of(analysis)
    from oomscope.live.evidence_allocator import allocator_facts

    allocator, notes = allocator_facts(analysis, oom or event)
    return SnapshotFacts(
        live=live_groups(analysis, source_line),
        growth=growth(analysis, ends, source_line),
        allocator=allocator,
        settings=settings_of(snapshot.settings),
        oom=event,
        torch_version=snapshot.torch_version,
        notes=(*(warning.message for warning in snapshot.warnings), *notes),
    )


def _oom_of(analysis: Any) -> OomFact | None:
    """The failure as the history records it."""
    from oomscope.core.diagnosis.message import Frame

    if not analysis.ooms:
        return None
    event = analysis.ooms[-1]
    frames = analysis.snapshot.stacks[event.stack] if event.stack >= 0 else []
    return OomFact(
        device=analysis.device.device,
        requested_bytes=event.requested_bytes,
        device_free_bytes=event.device_free_bytes,
        allocated_bytes=event.live_bytes,
        reserved_bytes=event.reserved_bytes,
        # Not the card's size, which a snapshot does not say, but what this process could have had of it.
        capacity_bytes=None
        if event.device_free_bytes is None
        else event.reserved_bytes + event.device_free_bytes,
        frames=tuple(Frame(f.file, f.line, f.function) for f in frames),
        count=len(analysis.ooms),
        source="snapshot",
    )
