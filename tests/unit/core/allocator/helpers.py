"""Synthetic histories, loaded as a file would be."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from oomscope.core.allocator.history import History, read_history
from oomscope.core.allocator.model import AllocatorConfig, CachingAllocator
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.parse import parse_snapshot

CONFS = (
    "",
    "expandable_segments:True",
    "max_split_size_mb:64",
    "max_split_size_mb:20",
    "roundup_power2_divisions:8",
    "large_segment_size_mb:40",
    "expandable_segments:True,large_segment_size_mb:12",
    "expandable_segments:True,max_split_size_mb:64",
    "garbage_collection_threshold:0.6,per_process_memory_fraction:0.6",
)


def loaded(
    process: SyntheticProcess, *, drop: Sequence[str] = (), edit: Callable[[Any], None] | None = None
) -> Snapshot:
    """The snapshot of `process` after parsing; `edit` may change the raw object first."""
    raw = process.snapshot()
    for key in drop:
        raw.pop(key, None)
    if edit is not None:
        edit(raw)
    return parse_snapshot(raw, name="synthetic.pickle")


def history_of(process: SyntheticProcess, device: int = 0) -> History:
    snapshot = loaded(process)
    return read_history(snapshot, snapshot.devices[device])


def without_frames(raw: Any) -> None:
    """Remove all stacks, as with `context=None`."""
    for rows in raw["device_traces"]:
        for row in rows:
            row.pop("frames", None)


def check_invariants(allocator: CachingAllocator, config: AllocatorConfig) -> None:
    """What must hold in any state: bytes conserved, blocks sorted, disjoint and joined, totals right."""
    segments = allocator.segments()
    assert segments == sorted(segments, key=lambda each: each["address"])
    live = pending = free = requested = 0
    for segment, following in zip(segments, [*segments[1:], None], strict=False):
        position = segment["address"]
        before = ""
        for block in segment["blocks"]:
            assert block["address"] == position
            assert block["size"] > 0
            assert block["size"] % 512 == 0
            assert not (before == "inactive" == block["state"]), "two free neighbours"
            before = block["state"]
            position += block["size"]
            if block["state"] == "inactive":
                free += block["size"]
            else:
                assert 0 < block["requested_size"] <= block["size"]
                requested += block["requested_size"]
                live += block["size"]
                pending += block["size"] if block["state"] == "active_pending_free" else 0
        assert position - segment["address"] == segment["total_size"]
        assert following is None or position <= following["address"], "segments overlap"
    assert allocator.reserved_bytes == live + free
    assert allocator.active_bytes == live
    assert allocator.allocated_bytes == live - pending
    assert allocator.requested_bytes == requested
    assert allocator.driver.used_bytes == allocator.reserved_bytes
    for name in ("allocated", "active", "reserved", "requested"):
        assert getattr(allocator, f"peak_{name}_bytes") >= getattr(allocator, f"{name}_bytes") >= 0
    for pool in allocator.pools.values():
        for free_list in (*pool.lists(True), *pool.lists(False)):
            assert free_list.keys == sorted(free_list.keys)
            assert free_list.unmapped == sorted(free_list.unmapped)
    if allocator.stats is not None:
        _check_statistics(allocator)


def _check_statistics(allocator: CachingAllocator) -> None:
    stats = allocator.memory_stats()
    for name in ("allocated", "active", "reserved", "requested"):
        entry = stats[f"{name}_bytes"]["all"]
        assert entry["current"] == getattr(allocator, f"{name}_bytes")
        assert entry["peak"] == getattr(allocator, f"peak_{name}_bytes")
        assert entry["allocated"] - entry["freed"] == entry["current"]
    split = sum(
        block.size for block in allocator.free_blocks.values() if block.reservation is None and block.is_split
    )
    assert stats["inactive_split_bytes"]["all"]["current"] == split
