"""A loaded memory snapshot: devices, tables that they share, and what the loader had to say about it.

The names are torch's own (segment, block, requested_size, frames); the arrays are described in `columns`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from oomscope.core.snapshot.columns import Annotations, Blocks, Events, Segments, StackTable
from oomscope.core.snapshot.identity import Identity

DEFAULT_POOL = (0, 0)


@dataclass(frozen=True, slots=True)
class SnapshotWarning:
    """Something about the file that limits what can be said about it."""

    code: str
    """Stable and greppable: "history-cut", "segment-sum"."""
    message: str


@dataclass(slots=True)
class DeviceSnapshot:
    """State and history of one device."""

    device: int
    """CUDA ordinal inside the process."""
    segments: Segments
    blocks: Blocks
    events: Events
    skipped_events: int = 0
    """Older rows that the caller chose not to load; they come before row 0 of `events`."""
    window: int | None = None
    """Analyse rows before this one only (`--range`); later rows stay, because the segments are the state
    after them."""

    @property
    def n_analysed(self) -> int:
        """Number of rows to look at, from row 0."""
        return len(self.events) if self.window is None else min(self.window, len(self.events))


@dataclass(slots=True)
class Snapshot:
    """One snapshot file."""

    name: str
    """File name, for people."""
    devices: list[DeviceSnapshot]
    """Index = CUDA ordinal; devices without segments and events are empty, not absent."""
    stacks: StackTable
    streams: list[int]
    """Stream handles; 0 is the default stream. Rows refer to them by index."""
    pools: list[tuple[int, int]]
    """Pool ids; (0, 0) is the default pool. Rows refer to them by index."""
    texts: list[str]
    """Annotation names, compile contexts, user metadata, categories. Rows refer to them by index."""
    settings: dict[str, Any] = field(default_factory=dict)
    """`allocator_settings` as found; empty before torch 2.3."""
    annotations: Annotations = field(default_factory=Annotations)
    torch_at_least: str | None = None
    """The oldest release that writes what the file holds; None when nothing in it tells."""
    torch_version: str | None = None
    """"2.6" when the file itself shows it, else None."""
    keys: tuple[str, ...] = ()
    """Top-level keys of the file, also those that nothing here reads."""
    identity: Identity = field(default_factory=Identity)
    warnings: list[SnapshotWarning] = field(default_factory=list)

    @property
    def n_events(self) -> int:
        return sum(len(each.events) for each in self.devices)

    def busiest(self) -> DeviceSnapshot | None:
        """The device with the largest history, else with the most reserved bytes; None for an empty file."""
        if not self.devices:
            return None
        return max(
            self.devices,
            key=lambda each: (len(each.events), int(each.segments.total_size.sum()), -each.device),
        )
