"""Exact replay: rings, readings, reservations, contradictions."""

from __future__ import annotations

from typing import Any

import pytest

from oomscope.core.allocator.history import History, action_name, read_history
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig
from oomscope.core.allocator.operations import Reading, read_operations
from oomscope.core.allocator.reconstruct import Intervals, reconstruct
from oomscope.core.allocator.replay import Replayer, replay
from oomscope.core.allocator.synth import SyntheticProcess, frame
from oomscope.core.allocator.synth_workloads import (
    fragmented_oom,
    graph_pool,
    random_stream,
    shortage_oom,
    side_stream,
    training,
)
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.units import GIB, MIB

from .helpers import check_invariants, history_of, loaded, without_frames

A, B = [frame("a.py", 1, "a")], [frame("b.py", 2, "b")]


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
@pytest.mark.parametrize("version", [(2, 0), (2, 1), (2, 4), (2, 13)])
def test_workloads_replay_exactly(conf: str, version: tuple[int, int]) -> None:
    if version < (2, 1) and conf.startswith("expandable"):
        pytest.skip("2.0 had no expandable segments")
    process = SyntheticProcess(conf, torch_version=version)
    training(process)
    side_stream(process)
    graph_pool(process)
    if version < (2, 1):
        process.device.allocator.pools.pop((1, 0), None)
    result = replay(history_of(process), process.config)
    if version >= (2, 1):
        assert result.exact, result.divergence
        assert result.capacity_low == process.device.allocator.peak_reserved_bytes


@pytest.mark.parametrize("workload", [fragmented_oom, shortage_oom])
@pytest.mark.parametrize("frames", [True, False])
def test_out_of_memory_rows_tell_the_capacity(workload: Any, frames: bool) -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    workload(process)
    snapshot = loaded(process, edit=None if frames else without_frames)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert result.exact, result.divergence
    assert result.capacity_at_oom == 500 * MIB
    assert result.capacity_high is not None
    assert result.capacity_high > 500 * MIB


def test_without_an_oom_no_capacity_is_known() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)
    result = replay(history_of(process), process.config)
    assert result.capacity_at_oom is None
    assert result.capacity_high is None
    assert result.matched == result.rows


@pytest.mark.parametrize("cut", [1, 50, 200, 431, 500])
@pytest.mark.parametrize("conf", ["", "expandable_segments:True"])
def test_a_history_that_starts_in_the_middle(cut: int, conf: str) -> None:
    process = SyntheticProcess(conf)
    training(process)
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=cut)
    result = replay(history, process.config)
    assert result.exact, result.divergence
    assert result.initial_reserved_bytes > 0


def test_the_state_at_any_row_is_the_recorded_one() -> None:
    process = SyntheticProcess()
    random_stream(process, 11, requests=300)
    history = history_of(process)
    for stop in range(0, len(history), 37):
        result = Replayer(history, process.config, stop=stop).run()
        assert result.exact
        live: dict[int, int] = {}
        for row in range(stop):
            if action_name(history.action[row]) == "alloc":
                live[history.address[row]] = history.size[row]
            elif action_name(history.action[row]) == "free_completed":
                live.pop(history.address[row])
        found = {address: block.requested for address, block in result.allocator.live.items()}
        if result.operations.rows:  # rows of one allocation are applied together
            assert found == live or len(found) in (len(live) - 1, len(live) + 1)
        check = result.allocator
        check.driver.used_bytes = check.reserved_bytes
        check_invariants(check, process.config)


def test_a_wrong_address_is_found_at_its_row() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)

    def shift(raw: Any) -> None:
        rows = raw["device_traces"][0]
        for row in rows:
            if row["action"] == "alloc" and row["size"] == 4:
                row["addr"] += 512
                return

    snapshot = loaded(process, edit=shift)
    history = read_history(snapshot, snapshot.devices[0])
    result = replay(history, process.config)
    assert not result.exact
    assert result.divergence is not None
    assert "4 bytes" in result.divergence.recorded
    assert result.problems  # and its free no longer belongs to it


@pytest.mark.parametrize(
    ("action", "problem"),
    [
        ("alloc", "a free is completed that was not requested"),
        ("free_requested", "a free is completed that was not requested"),
        ("free_completed", "a block is allocated twice without being freed"),
    ],
)
def test_rows_left_out_are_noticed(action: str, problem: str) -> None:
    process = SyntheticProcess()
    training(process, layers=3, steps=2)

    def drop(raw: Any) -> None:
        rows = raw["device_traces"][0]
        index = next(i for i, row in enumerate(rows) if row["action"] == action and i > len(rows) // 3)
        del rows[index]

    snapshot = loaded(process, edit=drop)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert not result.exact
    assert any(problem in each or "freed twice" in each for each in result.problems), result.problems


def test_only_free_completed_rows_stand_for_whole_frees() -> None:
    process = SyntheticProcess()
    training(process, layers=3, steps=2)

    def drop(raw: Any) -> None:
        raw["device_traces"][0] = [
            row for row in raw["device_traces"][0] if row["action"] != "free_requested"
        ]

    snapshot = loaded(process, edit=drop)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert result.exact, result.divergence


def test_segment_rows_without_an_allocation_are_strays() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)

    def cut(raw: Any) -> None:
        rows = raw["device_traces"][0]
        last = max(index for index, row in enumerate(rows) if row["action"] == "segment_alloc")
        raw["device_traces"][0] = rows[: last + 1]

    snapshot = loaded(process, edit=cut)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert not result.exact
    assert result.divergence is not None
    assert result.divergence.predicted == "no allocation that needs it"


def test_more_segments_at_the_end_than_the_rows_explain() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)

    def drop(raw: Any) -> None:
        del raw["segments"][-1]

    snapshot = loaded(process, edit=drop)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert not result.exact


@pytest.mark.parametrize(
    ("key", "value"), [("size", 1024), ("state", "inactive"), ("state", "active_pending_free")]
)
def test_a_final_block_that_differs(key: str, value: object) -> None:
    process = SyntheticProcess()
    process.device.malloc(512, A)
    process.device.malloc(512, A)
    process.device.malloc(512, A)

    def change(raw: Any) -> None:
        raw["segments"][0]["blocks"][1][key] = value

    snapshot = loaded(process, edit=change)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert not result.exact
    assert result.divergence is not None


def test_a_snapshot_row_in_between_changes_nothing() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)

    def insert(raw: Any) -> None:
        row = {"action": "snapshot", "addr": 0, "size": 0, "stream": 0}
        raw["device_traces"][0].insert(20, row)
        raw["device_traces"][0].insert(1, row)

    snapshot = loaded(process, edit=insert)
    assert replay(read_history(snapshot, snapshot.devices[0]), process.config).exact


# ---- readings of ambiguous rows


def _retry_after_events(frames: bool) -> History:
    """A retry right after frees completed: by asking events, or by the synchronisation of the retry."""
    process = SyntheticProcess(capacity=100 * MIB)
    gpu = process.device
    first, second = gpu.malloc(30 * MIB, A), gpu.malloc(40 * MIB, A)
    gpu.record_stream(first, 9)
    gpu.free(first)
    gpu.free(second)
    gpu.malloc(80 * MIB, B)
    snapshot = loaded(process, edit=None if frames else without_frames)
    return read_history(snapshot, snapshot.devices[0])


@pytest.mark.parametrize("frames", [True, False])
def test_frees_of_a_synchronisation(frames: bool) -> None:
    history = _retry_after_events(frames)
    result = replay(history, AllocatorConfig())
    assert result.exact
    (growth,) = [each for each in result.operations.growths if len(each.readings) > 1]
    assert [action_name(history.action[row]) for row in growth.lead] == ["free_completed", "free_completed"][
        : len(growth.lead)
    ]
    assert growth.readings[0].completed_before < len(growth.lead)


def test_frees_by_asking_events_are_found_by_trying() -> None:
    """The search succeeds only if the frees had completed before it, so no driver call may follow."""
    process = SyntheticProcess("max_split_size_mb:64", capacity=330 * MIB)
    gpu = process.device
    big, small = gpu.malloc(200 * MIB, A), gpu.malloc(70 * MIB, A)
    gpu.record_stream(small, 9)
    gpu.free(small)
    gpu.free(big)
    gpu.process_events(B)
    gpu.malloc(240 * MIB, B)
    snapshot = loaded(process, edit=without_frames)
    history = read_history(snapshot, snapshot.devices[0])
    result = replay(history, process.config)
    assert result.exact, result.divergence
    (growth,) = [each for each in result.operations.growths if each.row in result.readings]
    assert result.readings[growth.row] == Reading(completed_before=len(growth.lead))


@pytest.mark.parametrize("frames", [True, False])
def test_an_emptied_cache_before_an_allocation(frames: bool) -> None:
    process = SyntheticProcess(capacity=200 * MIB)
    gpu = process.device
    gpu.free(gpu.malloc(30 * MIB, A))
    keep = gpu.malloc(100 * MIB, A)
    gpu.empty_cache()
    gpu.malloc(30 * MIB, B)
    gpu.free(keep)
    gpu.empty_cache()
    snapshot = loaded(process, edit=None if frames else without_frames)
    result = replay(read_history(snapshot, snapshot.devices[0]), process.config)
    assert result.exact, result.divergence
    if frames:
        assert len(result.operations.bursts) == 2


def test_rows_of_a_retry_with_the_stack_of_the_segment() -> None:
    """Old releases gave a returned segment the stack of its cudaMalloc: not an emptied cache for sure."""
    process = SyntheticProcess("max_split_size_mb:64", capacity=300 * MIB)
    gpu = process.device
    gpu.free(gpu.malloc(100 * MIB, A))
    gpu.free(gpu.malloc(150 * MIB, A))
    gpu.malloc(70 * MIB, B)

    def restack(raw: Any) -> None:
        for row in raw["device_traces"][0]:
            if row["action"] == "segment_free":
                row["frames"] = A

    snapshot = loaded(process, edit=restack)
    history = read_history(snapshot, snapshot.devices[0])
    result = replay(history, process.config)
    assert result.exact, result.divergence
    assert [reading.emptied for reading in result.readings.values()] == [0]


def test_operations_of_an_empty_history() -> None:
    empty = History(0, [], [], [], [], [], None, [], frozenset())
    assert read_operations(empty).kinds == []
    assert reconstruct(empty).reserved_bytes == 0
    assert replay(empty, AllocatorConfig()).exact
    assert empty.describe(0) == "end of the history"
    assert not empty.has_rows


# ---- expandable segments


def test_reservations_made_in_failed_allocations_are_found_later() -> None:
    process = SyntheticProcess("expandable_segments:True", capacity=100 * MIB, total_bytes=4 * GIB)
    gpu = process.device
    kept = gpu.malloc(90 * MIB, A)
    for stream in (3, 4):
        with pytest.raises(MemoryError):
            gpu.malloc(30 * MIB, B, stream=stream)
    gpu.free(kept)
    gpu.malloc(30 * MIB, B, stream=4)
    gpu.malloc(30 * MIB, B, stream=3)
    result = replay(history_of(process), process.config)
    assert result.exact, result.divergence


def test_a_reservation_whose_first_part_was_unmapped_before_the_history() -> None:
    process = SyntheticProcess("expandable_segments:True", total_bytes=4 * GIB)
    gpu = process.device
    blocks = [gpu.malloc(20 * MIB, A) for _ in range(6)]
    gpu.malloc(1000, A)
    for address in blocks[:3]:
        gpu.free(address)
    gpu.empty_cache()
    snapshot_rows = len(gpu.rows)
    gpu.malloc(40 * MIB, B)
    gpu.malloc(700, B)
    snapshot = loaded(process)
    result = replay(read_history(snapshot, snapshot.devices[0], start=snapshot_rows), process.config)
    assert result.exact, result.divergence


def test_address_space_is_reused_by_another_stream() -> None:
    process = SyntheticProcess("expandable_segments:True", total_bytes=4 * GIB)
    gpu = process.device
    for stream in (0, 5, 0, 6):
        gpu.free(gpu.malloc(30 * MIB, A, stream=stream))
        gpu.malloc(100, A, stream=stream)
        gpu.empty_cache()
    result = replay(history_of(process), process.config)
    assert result.exact, result.divergence


def test_ranges_mapped_before_and_unmapped_within_show_their_kind() -> None:
    process = SyntheticProcess("expandable_segments:True", total_bytes=4 * GIB)
    gpu = process.device
    large, small = gpu.malloc(60 * MIB, A), [gpu.malloc(MIB, A) for _ in range(8)]
    other = gpu.malloc(30 * MIB, A, stream=7)
    start = len(gpu.rows)
    for address in (large, other, *small):
        gpu.free(address)
    gpu.empty_cache()
    for stream in (0, 7):
        gpu.malloc(30 * MIB, B, stream=stream)
    snapshot = loaded(process)
    result = replay(read_history(snapshot, snapshot.devices[0], start=start), process.config)
    assert result.exact, result.divergence
    # Cut where nothing is live and nothing but the unmapping touches the ranges.
    start = next(i for i, row in enumerate(gpu.rows) if row.action == "segment_unmap")
    result = replay(read_history(snapshot, snapshot.devices[0], start=start), process.config)
    assert result.exact, result.divergence


# ---- older blocks


def test_the_tail_of_an_old_block_shows_in_a_later_allocation() -> None:
    process = SyntheticProcess()
    gpu = process.device
    whole = gpu.malloc(40 * MIB, A)
    gpu.free(whole)
    first = gpu.malloc(15 * MIB, A)
    second = gpu.malloc(24 * MIB + 512 * 1024, A)  # takes the rest of 25 MiB: half a MiB more than it needs
    gpu.free(first)
    third = gpu.malloc(14 * MIB + 256 * 1024, A)  # keeps a tail of 0.75 MiB
    start = len(gpu.rows)
    gpu.free(second)
    gpu.malloc(20 * MIB, B)
    gpu.free(third)
    snapshot = loaded(process)
    result = replay(read_history(snapshot, snapshot.devices[0], start=start), process.config)
    assert result.exact, result.divergence
    assert not result.ambiguities


def test_what_stays_open_about_an_old_block_is_counted() -> None:
    process = SyntheticProcess()
    gpu = process.device
    whole = gpu.malloc(40 * MIB, A)
    gpu.free(whole)
    first = gpu.malloc(15 * MIB, A)
    rest = gpu.malloc(25 * MIB, A)
    gpu.free(rest)
    start = len(gpu.rows)
    gpu.free(first)
    gpu.malloc(100, B)
    snapshot = loaded(process)
    result = replay(read_history(snapshot, snapshot.devices[0], start=start), process.config)
    assert result.exact
    assert dict(result.ambiguities) == {"unknown-tail": 1}


def test_blocks_that_overlap_are_counted() -> None:
    process = SyntheticProcess()
    gpu = process.device
    first, second = gpu.malloc(15 * MIB, A), gpu.malloc(15 * MIB, A)
    start = len(gpu.rows)
    gpu.free(first)
    gpu.free(second)
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=start)
    history.size[0] = history.size[1] = 60 * MIB
    history.address[2] = history.address[3] = first + MIB
    result = replay(history, process.config)
    assert not result.exact
    assert result.ambiguities["overlap"] > 0


def test_live_blocks_outside_all_segments_are_a_problem() -> None:
    process = SyntheticProcess()
    gpu = process.device
    address = gpu.malloc(15 * MIB, A)
    gpu.malloc(100, A)
    start = len(gpu.rows)
    gpu.free(address)
    gpu.malloc(100, A)
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=start)
    history.address[0] = history.address[1] = 0x1000
    result = replay(history, process.config)
    assert result.problems["live blocks lie outside all segments"] == 1


# ---- pools before 2.12


def test_pools_of_old_files_come_from_the_final_segments() -> None:
    process = SyntheticProcess(torch_version=(2, 6))
    graph_pool(process)
    history = history_of(process)
    assert history.pool is None
    result = replay(history, process.config)
    assert result.exact, result.divergence
    assert any(block.owner.pool.id != DEFAULT_POOL for block in result.allocator.live.values())


def test_returned_segments_of_unknown_pools_are_counted() -> None:
    process = SyntheticProcess(torch_version=(2, 6))
    gpu = process.device
    gpu.malloc(12 * MIB, A, pool=(1, 0))
    gpu.free(gpu.malloc(12 * MIB, A))
    gpu.empty_cache()
    result = replay(history_of(process), process.config)
    assert result.ambiguities["unknown-pool"] == 1


# ---- intervals


def test_intervals_join_and_part() -> None:
    ranges = Intervals()
    for start, end in ((0, 10), (20, 30), (10, 20)):
        ranges.add(start, end)
    assert (ranges.starts, ranges.ends) == ([0], [30])
    assert ranges.remove(5, 10)
    assert not ranges.remove(8, 12)
    assert not ranges.remove(40, 50)
    assert (ranges.starts, ranges.ends) == ([0, 10], [5, 30])
    assert ranges.total == 25
    assert ranges.remove(0, 5)
    ranges.add(30, 40)
    ranges.add(0, 100)
    assert (ranges.starts, ranges.ends) == ([0], [100])


def test_hostile_rows_do_not_crash() -> None:
    raw = {
        "segments": [],
        "device_traces": [
            [
                {"action": action, "addr": address, "size": size, "stream": 0}
                for action in (
                    "segment_map",
                    "segment_free",
                    "alloc",
                    "free_completed",
                    "oom",
                    "segment_unmap",
                )
                for address, size in ((0, 0), (-5, 7), (1 << 62, 1 << 62), (4096, -1))
            ]
        ],
    }
    snapshot = parse_snapshot(raw)
    history = read_history(snapshot, snapshot.devices[0])
    assert not replay(history, AllocatorConfig()).exact
