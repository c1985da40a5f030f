"""The requests that a job made of its allocator, replayed under other settings and other capacities.

A prediction run writes every request to a flat file of 64-bit integers. Replaying them through the allocator
model gives the peak of reserved bytes under any setting, and whether the real capacity is enough, without
another run.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from oomscope.core.allocator.model import (
    ADDRESS_MODELS,
    AllocatorConfig,
    AllocatorOutOfMemory,
    CachingAllocator,
    VirtualDriver,
)

#: Integers of one event: address, then bytes (> 0: request, or one of the codes below), then the stream.
EVENT_INTEGERS = 3
FREE = 0
EMPTY_CACHE = -1


@dataclass(frozen=True, slots=True)
class Replayed:
    """One replay. `oom_event` is the number of the request that could not be served, None when all were."""

    peak_reserved_bytes: int
    peak_allocated_bytes: int
    oom_event: int | None = None

    @property
    def fits(self) -> bool:
        return self.oom_event is None


@dataclass(frozen=True, slots=True)
class Range:
    """Peaks of reserved bytes over the address models, and whether the job fits under all of them."""

    middle_bytes: int
    """Under the first address model, which is the one of the simulated device."""
    low_bytes: int
    high_bytes: int
    peak_allocated_bytes: int
    fits: bool | None


def read_requests(data: bytes) -> array[int]:
    """Events as a flat array; a torn last event is dropped."""
    whole = len(data) // (8 * EVENT_INTEGERS) * (8 * EVENT_INTEGERS)
    events = array("q")
    events.frombytes(data[:whole])
    return events


def _triples(events: array[int]) -> Iterator[tuple[int, int, int]]:
    each = iter(events)
    return zip(each, each, each, strict=False)


def replay(
    events: array[int],
    config: AllocatorConfig,
    *,
    capacity_bytes: int | None = None,
    addresses: str = ADDRESS_MODELS[0],
) -> Replayed:
    """Serve the recorded requests from an allocator of `config`; stops at the first that cannot be served."""
    allocator = CachingAllocator(
        config, VirtualDriver(capacity_bytes, addresses=addresses), detailed_stats=False
    )
    blocks: dict[int, int] = {}
    failed = None
    malloc, free = allocator.malloc, allocator.free
    for number, (key, size, stream) in enumerate(_triples(events)):
        if size > 0:
            try:
                blocks[key] = malloc(size, stream)
            except AllocatorOutOfMemory:
                failed = number
                break
        elif size == FREE:
            address = blocks.pop(key, None)
            if address is not None:
                free(address)
        elif size == EMPTY_CACHE:
            allocator.empty_cache()
    return Replayed(
        allocator.peak_reserved_bytes,
        allocator.peak_allocated_bytes,
        failed,
    )


def predict_range(
    events: array[int],
    config: AllocatorConfig,
    *,
    capacity_bytes: int | None,
    models: Sequence[str] = ("holes", "up"),
) -> Range:
    """The peak that a run on the card would reach, under several address models, and whether it fits.

    Near the limit the allocator gives unused segments back before it fails. So when the recorded requests can be served
    within `capacity_bytes`, the peak is that of a replay with the limit; when not, it is what the job would need.
    """
    if capacity_bytes is not None:
        limited = [replay(events, config, capacity_bytes=capacity_bytes, addresses=model) for model in models]
        if all(each.fits for each in limited):
            return _span(limited, fits=True)
    free = [replay(events, config, addresses=model) for model in models]
    return _span(free, fits=None if capacity_bytes is None else False)


def _span(replays: Sequence[Replayed], *, fits: bool | None) -> Range:
    peaks = [each.peak_reserved_bytes for each in replays]
    return Range(peaks[0], min(peaks), max(peaks), replays[0].peak_allocated_bytes, fits)
