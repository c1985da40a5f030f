"""Evidence at an out-of-memory row: shortfall, pieces, pins, and the fewest blocks in the way."""

from __future__ import annotations

import numpy as np
import pytest

from oomscope.core.allocator.autopsy import autopsy
from oomscope.core.allocator.bounds import MAX_ALLOCATIONS, Lifetimes, offline_placement
from oomscope.core.allocator.measures import at_oom, measure
from oomscope.core.allocator.model import AllocatorConfig, CachingAllocator, VirtualDriver
from oomscope.core.allocator.replay import replay
from oomscope.core.allocator.requests import TRY, RequestTrace, requests_of
from oomscope.core.allocator.synth import SyntheticProcess, frame
from oomscope.core.allocator.synth_workloads import fragmented_oom, random_stream, shortage_oom, training
from oomscope.core.snapshot.columns import NO_STACK
from oomscope.units import GIB, MIB

from .helpers import history_of, loaded

A, PIN = [frame("a.py", 1, "a")], [frame("pin.py", 7, "keep")]


def test_fragmentation_proper() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)
    for address in list(process.device.allocator.live):  # the exception unwinds: the end of the file misleads
        process.device.free(address)
    snapshot = loaded(process)
    found = at_oom(snapshot, snapshot.devices[0])
    assert found is not None
    assert found.row < len(snapshot.devices[0].events) - 1
    assert (found.request_bytes, found.stream, found.pool) == (60 * MIB, 0, (0, 0))
    assert (found.reserved_bytes, found.active_bytes, found.allocated_bytes) == (
        480 * MIB,
        264 * MIB,
        264 * MIB,
    )
    assert found.capacity_bytes == 500 * MIB
    assert found.device_free_bytes == 20 * MIB
    assert found.shortfall0_bytes == 264 * MIB + 60 * MIB - 500 * MIB < 0
    assert found.enough_but_split
    assert (found.usable_free_bytes, found.largest_usable_bytes) == (216 * MIB, 18 * MIB)
    assert found.stranded_bytes == found.free_bytes == 216 * MIB
    assert (found.other_free_bytes, found.pending_free_bytes, found.rounding_bytes) == (0, 0, 0)
    assert found.autopsy is not None
    assert found.autopsy.way == "segments"
    (block,) = found.autopsy.blocks
    assert block.size == 22 * MIB == found.autopsy.live_bytes
    assert snapshot.stacks[block.stack][0].function == "keep_result"
    assert block.row is not None
    assert block.age_rows == found.row - block.row


def test_a_shortage_no_setting_can_help() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    shortage_oom(process)
    snapshot = loaded(process)
    found = at_oom(snapshot, snapshot.devices[0])
    assert found is not None
    assert found.shortfall0_bytes == 544 * MIB - 500 * MIB
    assert not found.enough_but_split
    larger = at_oom(snapshot, snapshot.devices[0], capacity=GIB)
    assert larger is not None
    assert larger.shortfall0_bytes == 544 * MIB - GIB


def test_pins_hold_more_free_memory_than_they_use() -> None:
    process = SyntheticProcess(capacity=130 * MIB)
    gpu = process.device
    whole = gpu.malloc(60 * MIB, A)
    gpu.free(whole)
    gpu.malloc(2 * MIB, PIN)
    waiting = gpu.malloc(20 * MIB, A, stream=3)
    gpu.record_stream(waiting, 0)
    gpu.free(waiting)
    gpu.free(gpu.malloc(1000, A))
    with pytest.raises(MemoryError):
        gpu.malloc(118 * MIB, A)
    snapshot = loaded(process)
    found = at_oom(snapshot, snapshot.devices[0])
    assert found is not None
    (pin,) = found.pins
    assert (pin.free_bytes, pin.live_bytes, pin.live_blocks) == (58 * MIB, 2 * MIB, 1)
    assert snapshot.stacks[pin.holder.stack][0].function == "keep"
    assert found.pending_free_bytes == 20 * MIB
    assert found.free_whole_segments_bytes == 2 * MIB
    assert found.other_free_bytes == 2 * MIB  # of the small pool
    assert found.autopsy is not None
    assert [block.size for block in found.autopsy.blocks] == [2 * MIB]


def test_granules_that_could_be_unmapped() -> None:
    allocator = CachingAllocator(AllocatorConfig.parse("expandable_segments:True"), VirtualDriver(None))
    first = [allocator.malloc(16 * MIB) for _ in range(5)]
    allocator.free(first[1])
    allocator.free(first[2])
    found = measure(allocator)
    assert found.free_bytes == 32 * MIB
    assert found.free_unmappable_bytes == 20 * MIB
    assert found.stranded_bytes == 12 * MIB
    assert found.largest_free_bytes == 32 * MIB


def test_blocks_older_than_the_history_have_the_stack_of_the_end() -> None:
    process = SyntheticProcess(capacity=130 * MIB, max_entries=3)
    gpu = process.device
    gpu.free(gpu.malloc(100 * MIB, A))
    gpu.malloc(2 * MIB, PIN)
    for _ in range(3):
        with pytest.raises(MemoryError):
            gpu.malloc(110 * MIB, A)
    snapshot = loaded(process)
    found = at_oom(snapshot, snapshot.devices[0])
    assert found is not None
    (pin,) = found.pins
    assert pin.holder.row is None
    assert pin.holder.age_rows is None
    assert snapshot.stacks[pin.holder.stack][0].function == "keep"
    assert at_oom(snapshot, snapshot.devices[0], row=0) is not None


def test_no_oom_row_no_measures() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)
    snapshot = loaded(process)
    assert at_oom(snapshot, snapshot.devices[0]) is None
    process = SyntheticProcess(capacity=500 * MIB)
    shortage_oom(process)
    snapshot = loaded(process)
    assert at_oom(snapshot, snapshot.devices[0], row=1) is None  # that is another row

    snapshot = loaded(process, edit=lambda raw: raw["device_traces"][0].pop(3))
    assert at_oom(snapshot, snapshot.devices[0]) is None


# ---- autopsy


def make(conf: str = "", capacity: int | None = None) -> CachingAllocator:
    return CachingAllocator(AllocatorConfig.parse(conf), VirtualDriver(capacity))


def test_the_stretch_with_the_fewest_live_blocks() -> None:
    allocator = make("expandable_segments:True")
    blocks = [allocator.malloc(20 * MIB) for _ in range(8)]
    for index in (0, 2, 3, 5, 7):
        allocator.free(blocks[index])
    found = autopsy(allocator, 75 * MIB)
    assert found is not None
    assert found.way == "stretch"
    assert [block.address for block in found.blocks] == [blocks[1]] or [
        block.address for block in found.blocks
    ] == [blocks[4]]
    assert found.blocks[0].stack == NO_STACK
    more = autopsy(allocator, 135 * MIB)
    assert more is not None
    assert {block.address for block in more.blocks} >= {blocks[4], blocks[6]} or len(more.blocks) == 2


def test_several_segments_when_none_is_large_enough() -> None:
    allocator = make(capacity=200 * MIB)
    kept = [allocator.malloc(40 * MIB) for _ in range(4)]
    allocator.free(allocator.malloc(30 * MIB, stream=1))
    found = autopsy(allocator, 120 * MIB, capacity=200 * MIB)
    assert found is not None
    assert found.way == "segments"
    assert len(found.blocks) == 2
    assert {block.address for block in found.blocks} <= set(kept)
    assert autopsy(allocator, 220 * MIB, capacity=200 * MIB) is None
    assert autopsy(allocator, 220 * MIB) is None


def test_other_streams_and_pools_do_not_help() -> None:
    allocator = make()
    allocator.malloc(40 * MIB, stream=1)
    allocator.malloc(40 * MIB, pool=(1, 0))
    assert autopsy(allocator, 30 * MIB) is None
    assert autopsy(allocator, 30 * MIB, stream=1) is not None
    assert autopsy(allocator, 30 * MIB, pool=(1, 0)) is not None


# ---- offline placement


def test_placement_with_knowledge_of_the_future() -> None:
    trace = RequestTrace()
    first, second = trace.ask(10 * MIB), trace.ask(20 * MIB)
    trace.give(first)
    third = trace.ask(20 * MIB)
    trace.give(second)
    trace.ask(10 * MIB)
    trace.ask(30 * MIB, kind=TRY)
    trace.give(third)
    lifetimes = Lifetimes.of(trace)
    assert len(lifetimes) == 5
    bound = offline_placement(lifetimes)
    peak, row = trace.live_peak()
    assert bound is not None
    assert peak <= bound <= 70 * MIB
    assert row == -1
    assert offline_placement(Lifetimes.of(RequestTrace())) == 0


def test_the_bound_lies_between_the_live_peak_and_the_allocator() -> None:
    process = SyntheticProcess()
    random_stream(process, 2, requests=500)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    bound = offline_placement(Lifetimes.of(trace))
    assert bound is not None
    assert trace.live_peak()[0] <= bound <= process.device.allocator.peak_reserved_bytes * 1.2


def test_too_many_allocations_have_no_bound() -> None:
    many = np.zeros(MAX_ALLOCATIONS + 1, np.int64)
    assert offline_placement(Lifetimes(many, many, many)) is None
