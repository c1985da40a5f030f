"""What views need of the live objects, as structural types: any object with these fields will do."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol


class Series(Protocol):
    """Per-step history in buckets of `span` steps; the last bucket may be partly filled."""

    @property
    def first_step(self) -> int: ...
    @property
    def span(self) -> int: ...
    @property
    def low(self) -> Sequence[int]: ...
    @property
    def peak(self) -> Sequence[int]: ...
    @property
    def reserved(self) -> Sequence[int]: ...
    @property
    def on_host(self) -> bool: ...


class Rank(Protocol):
    """One rank as last heard of; sizes in bytes, None where the job has no such thing (a CPU job)."""

    rank: int
    state: str
    host: str
    pid: int
    gpu_uuid: str | None
    step: int | None
    phase: str | None
    simulated: bool
    gpu_name: str | None
    allocated_bytes: int | None
    reserved_bytes: int | None
    peak_allocated_bytes: int | None
    peak_reserved_bytes: int | None
    capacity_bytes: int | None
    device_used_bytes: int | None
    rss_bytes: int | None
    peak_rss_bytes: int | None
    retries: int | None
    ooms: int | None
    loss: float | None
    oom: Mapping[str, Any] | None
    exception: Mapping[str, Any] | None
