"""Rare paths: damaged final states, reservations nobody sees, failures that the model does not share."""

from __future__ import annotations

from typing import Any

import pytest

from oomscope.core.allocator.history import History, read_history
from oomscope.core.allocator.initial import describe_ambiguity
from oomscope.core.allocator.measures import at_oom
from oomscope.core.allocator.model import (
    AllocatorConfig,
    AllocatorOutOfMemory,
    CachingAllocator,
    VirtualDriver,
)
from oomscope.core.allocator.reconstruct import reconstruct
from oomscope.core.allocator.replay import Replay, Replayer, replay
from oomscope.core.allocator.replay_driver import RecordedDriver
from oomscope.core.allocator.requests import DONE, GIVE_LATER, RequestTrace, requests_of
from oomscope.core.allocator.simulate import run
from oomscope.core.allocator.synth import SyntheticProcess, frame
from oomscope.core.allocator.synth_workloads import fragmented_oom, shortage_oom, training
from oomscope.core.allocator.verify import verify
from oomscope.core.snapshot.model import Snapshot
from oomscope.units import GIB, MIB

from .helpers import history_of, loaded, without_frames

A, B = [frame("a.py", 1, "a")], [frame("b.py", 2, "b")]


def replayed(
    process: SyntheticProcess, edit: Any = None, *, start: int = 0, conf: AllocatorConfig | None = None
) -> Replay:
    snapshot = loaded(process, edit=edit)
    return replay(read_history(snapshot, snapshot.devices[0], start=start), conf or process.config)


@pytest.mark.parametrize("key", ["size", "requested_size", "address"])
def test_impossible_final_blocks(key: str) -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)

    def damage(raw: Any) -> None:
        raw["segments"][0]["blocks"][0][key] = -512

    result = replayed(process, damage)
    assert not result.exact
    assert result.divergence is not None
    assert result.divergence.row == result.rows
    assert result.problems


def test_impossible_oom_rows() -> None:
    process = SyntheticProcess(capacity=300 * MIB)
    shortage_oom(process)

    def damage(raw: Any) -> None:
        raw["device_traces"][0][-1]["size"] = -1

    assert not replayed(process, damage).exact


def test_a_failure_the_model_does_not_share() -> None:
    process = SyntheticProcess(capacity=300 * MIB)
    shortage_oom(process)

    def smaller(raw: Any) -> None:
        raw["device_traces"][0][-1]["size"] = 300  # rounds to something else

    result = replayed(process, smaller)
    assert result.divergence is not None
    assert "oom for 512 bytes" in result.divergence.predicted

    def reachable(raw: Any) -> None:
        rows = raw["device_traces"][0]
        keep = rows[:2]
        keep.append({"action": "free_requested", **{k: rows[1][k] for k in ("addr", "size", "stream")}})
        keep.append({"action": "free_completed", **{k: rows[1][k] for k in ("addr", "size", "stream")}})
        keep.append({**rows[-1], "size": 512 * 4096})
        raw["device_traces"][0] = keep

    result = replayed(process, reachable)
    assert not result.exact


def test_a_success_where_the_model_sees_a_failure() -> None:
    """Rows of a returned segment before an allocation that got no new one."""
    process = SyntheticProcess(capacity=200 * MIB)
    gpu = process.device
    gpu.free(gpu.malloc(30 * MIB, A))
    gpu.malloc(180 * MIB, B)

    def unmake(raw: Any) -> None:
        rows = raw["device_traces"][0]
        raw["device_traces"][0] = [
            row for row in rows if not (row["action"] == "segment_alloc" and row["size"] == 180 * MIB)
        ]

    assert not replayed(process, unmake).exact


def test_segments_of_another_size_than_the_model_asks_for() -> None:
    process = SyntheticProcess()
    process.device.malloc(3 * MIB, A)
    process.device.malloc(100, A)
    result = replayed(process, conf=AllocatorConfig.parse("large_segment_size_mb:40"))
    assert result.divergence is not None
    assert result.divergence.predicted == f"segment_alloc of {40 * MIB} bytes"


def test_a_segment_in_place_of_a_map_and_the_reverse() -> None:
    plain, expandable = SyntheticProcess(), SyntheticProcess("expandable_segments:True")
    for process in (plain, expandable):
        process.device.malloc(3 * MIB, A)
        process.device.malloc(100, A)
        process.device.malloc(30 * MIB, A)
    first = replayed(plain, conf=expandable.config).divergence
    second = replayed(expandable, conf=plain.config).divergence
    assert first is not None
    assert second is not None
    assert first.recorded.startswith("segment_alloc")
    assert first.predicted.startswith("segment_map")
    assert second.recorded.startswith("segment_map")


def test_a_map_of_another_size() -> None:
    process = SyntheticProcess("expandable_segments:True")
    process.device.malloc(30 * MIB, A)
    process.device.malloc(100, A)
    process.device.malloc(90 * MIB, A)

    def enlarge(raw: Any) -> None:
        rows = [row for row in raw["device_traces"][0] if row["action"] == "segment_map"]
        rows[-1]["size"] += 20 * MIB
        raw["segments"][0]["total_size"] += 20 * MIB
        raw["segments"][0]["blocks"][-1]["size"] += 20 * MIB

    result = replayed(process, enlarge)
    assert result.divergence is not None
    assert "segment_map" in result.divergence.predicted


def test_reservations_that_no_row_ever_shows() -> None:
    process = SyntheticProcess("expandable_segments:True", capacity=100 * MIB, total_bytes=4 * GIB)
    gpu = process.device
    gpu.malloc(90 * MIB, A)
    for stream in (3, 4):
        with pytest.raises(AllocatorOutOfMemory):
            gpu.malloc(30 * MIB, B, stream=stream)
    result = replayed(process)
    assert result.exact, result.divergence
    assert len(result.allocator.reservations) == 3


def test_a_synchronisation_completes_only_what_waits() -> None:
    process = SyntheticProcess(capacity=100 * MIB)
    gpu = process.device
    first = gpu.malloc(30 * MIB, A)
    gpu.record_stream(first, 5)
    gpu.malloc(20 * MIB, A)
    gpu.free(first)
    gpu.malloc(60 * MIB, B)

    def confuse(raw: Any) -> None:
        rows = raw["device_traces"][0]
        row = next(row for row in rows if row["action"] == "free_completed")
        row["addr"] = rows[3]["addr"]

    assert not replayed(process, confuse).exact


def test_completions_of_frees_that_were_never_requested() -> None:
    process = SyntheticProcess()
    gpu = process.device
    first = gpu.malloc(30 * MIB, A)
    gpu.malloc(30 * MIB, A)
    gpu.record_stream(first, 5)
    gpu.free(first)
    gpu.malloc(512, A)
    gpu.process_events(A)
    gpu.malloc(512, A)

    def forget(raw: Any) -> None:
        rows = raw["device_traces"][0]
        rows[:] = [row for row in rows if row["action"] != "free_requested"]
        rows.append({**rows[1], "action": "free_requested", "addr": rows[3]["addr"]})

    result = replayed(process, forget)
    assert not result.exact


def test_unmapping_what_was_never_mapped_is_no_crash() -> None:
    rows = [
        ("segment_unmap", 0x7F0000000000, 20 * MIB),
        ("segment_unmap", 0x7E0000000000, 20 * MIB),
        ("segment_map", 0x7F0000000000, 20 * MIB),
        ("alloc", 0x7F0000000000, 3 * MIB),
    ]
    names = {"segment_unmap": 6, "segment_map": 5, "alloc": 0}
    history = History(
        0,
        [names[action] for action, _, _ in rows],
        [address for _, address, _ in rows],
        [size for _, _, size in rows],
        [0] * 4,
        [-1] * 4,
        None,
        [],
        frozenset(),
    )
    result = replay(history, AllocatorConfig(expandable_segments=True))
    assert not result.exact
    assert result.problems


def test_initial_ranges_from_rows_that_name_their_pool() -> None:
    process = SyntheticProcess("expandable_segments:True", total_bytes=4 * GIB, torch_version=(2, 13))
    gpu = process.device
    inside = gpu.malloc(30 * MIB, A, pool=(1, 0))
    outside = gpu.malloc(30 * MIB, A)
    start = len(gpu.rows)
    gpu.free(inside)
    gpu.free(outside)
    gpu.malloc(25 * MIB, A, pool=(1, 0))
    gpu.malloc(90 * MIB, A)
    result = replayed(process, start=start)
    assert result.exact, result.divergence
    assert {span.kind.pool for span in _reservations(result).spans} == {(0, 0), (1, 0)}


def _reservations(result: Replay) -> Any:
    driver = result.allocator.driver
    assert isinstance(driver, RecordedDriver)
    return driver.reservations


def test_older_blocks_in_the_wrong_order_overlap() -> None:
    process = SyntheticProcess()
    gpu = process.device
    blocks = [gpu.malloc(3 * MIB, A) for _ in range(4)]
    start = len(gpu.rows)
    gpu.free(blocks[0])
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=start)
    for each in history.segments:
        for block in each.blocks:
            if block.live:
                block.size = 9 * MIB
    result = replay(history, AllocatorConfig())
    assert not result.exact
    assert "overlap" in describe_ambiguity("overlap")


def test_frees_of_old_blocks_by_completion_alone_are_pending() -> None:
    process = SyntheticProcess()
    gpu = process.device
    address = gpu.malloc(30 * MIB, A)
    gpu.record_stream(address, 5)
    gpu.free(address)
    start = len(gpu.rows)
    gpu.process_events(A)
    gpu.malloc(512, A)
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=start)
    state = reconstruct(history)
    assert state.free_requests_recorded
    assert [block.pending for block in state.live.values()] == [True]


def test_small_requests_with_divisions_round_up_to_512() -> None:
    assert AllocatorConfig.parse("roundup_power2_divisions:8").round_size(100) == 512


def test_messages_without_processes() -> None:
    from oomscope.core.allocator.model import oom_message

    allocator = CachingAllocator(AllocatorConfig(), VirtualDriver(10 * MIB))
    with pytest.raises(AllocatorOutOfMemory) as caught:
        allocator.malloc(30 * MIB)
    assert "is free. Of the allocated memory 0 bytes" in oom_message(caught.value, total_bytes=GIB)


def test_rows_of_the_tracer_as_requests() -> None:
    process = SyntheticProcess(capacity=100 * MIB)
    gpu = process.device
    waiting = gpu.malloc(30 * MIB, A)
    gpu.record_stream(waiting, 4)
    gpu.free(waiting)
    gpu.free(gpu.malloc(20 * MIB, A))
    gpu.process_events(A)
    gpu.empty_cache()
    with pytest.raises(AllocatorOutOfMemory):
        gpu.malloc(120 * MIB, A)
    rows = list(gpu.rows)
    trace = RequestTrace.from_rows(rows)
    assert trace.live_peak()[0] == 120 * MIB
    outcome = run(trace, AllocatorConfig(), capacity=100 * MIB)
    assert (outcome.ooms, outcome.first_oom_row) == (1, len(rows) - 1)
    late = RequestTrace.from_rows(rows[1 + 1 :])  # frees of what was never asked for are left out
    assert late.n_slots == 2


def test_requests_up_to_a_row() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)
    history = history_of(process)
    found = replay(history, process.config)
    whole = requests_of(found, history)
    assert len(requests_of(found, history, stop=20)) < len(whole)


def test_expandable_and_limit_in_the_fast_loop() -> None:
    trace = RequestTrace()
    trace.ask(64 * MIB)
    for _ in range(10):
        first, second = trace.ask(91 * MIB), trace.ask(45 * MIB)
        trace.ask(2 * MIB)
        trace.give(first)
        trace.give(second)
    config = AllocatorConfig.parse("expandable_segments:True,max_split_size_mb:128")
    assert (
        run(trace, config).peak_reserved_bytes
        > run(trace, AllocatorConfig(expandable_segments=True)).peak_reserved_bytes
    )


def test_meaning_when_nothing_else_explains_it() -> None:
    process = SyntheticProcess(max_entries=60)
    gpu = process.device
    whole = gpu.malloc(40 * MIB, A)
    gpu.free(whole)
    first = gpu.malloc(15 * MIB, A)
    gpu.free(gpu.malloc(25 * MIB, A))
    start = len(gpu.rows)
    gpu.free(first)
    for size in (12, 30, 3):
        gpu.free(gpu.malloc(size * MIB, B))
    snapshot: Snapshot = loaded(process)
    device = snapshot.devices[0]
    result = verify(snapshot, device, start=start, config=AllocatorConfig.parse("max_split_size_mb:20"))
    if result.exact is False:
        assert "older than the history" in (result.meaning or "") or "other settings" in (
            result.meaning or ""
        )


def test_events_without_a_context_have_no_frames() -> None:
    process = SyntheticProcess()
    process.device.allocator.malloc(512)
    assert "frames" not in process.snapshot()["device_traces"][0][0]


def test_callbacks_and_overflow_pools_may_not_be_enough() -> None:
    allocator = CachingAllocator(AllocatorConfig(), VirtualDriver(100 * MIB))
    small = allocator.malloc(12 * MIB)
    inside = allocator.malloc(12 * MIB, pool=(1, 0))
    allocator.pool((1, 0)).use_on_oom = True
    allocator.free(inside)
    held = [small]

    def let_go() -> bool:
        if held:
            allocator.free(held.pop())
            return True
        return False

    allocator.release_callbacks.append(let_go)
    allocator.malloc(50 * MIB)
    assert allocator.reserved_bytes == 74 * MIB
    with pytest.raises(AllocatorOutOfMemory):
        allocator.malloc(60 * MIB)


def test_an_oom_row_without_the_free_bytes() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)

    def forget(raw: Any) -> None:
        del raw["device_traces"][0][-1]["device_free"]

    snapshot = loaded(process, edit=forget)
    found = at_oom(snapshot, snapshot.devices[0])
    assert found is not None
    assert (found.capacity_bytes, found.shortfall0_bytes, found.device_free_bytes) == (None, None, None)
    assert found.autopsy is None  # no segment is large enough, and of the device nothing is known


def test_segments_that_overlap_are_not_followed() -> None:
    process = SyntheticProcess()
    first = process.device.malloc(12 * MIB, A)
    process.device.malloc(100, A)
    process.device.malloc(100, A)

    def move(raw: Any) -> None:
        segment = raw["segments"][-1]
        shift = first + MIB - segment["address"]
        segment["address"] += shift
        for block in segment["blocks"]:
            block["address"] += shift
        for row in raw["device_traces"][0]:
            if row["size"] in (100, 2 * MIB):
                row["addr"] += shift

    result = replayed(process, move)
    assert not result.exact
    assert result.divergence is not None
    assert "in use" in result.divergence.predicted
    late = replayed(process, move, start=2)
    assert not late.exact


def test_segments_that_overlap_before_the_first_row() -> None:
    process = SyntheticProcess()
    gpu = process.device
    first, second = gpu.malloc(12 * MIB, A), gpu.malloc(14 * MIB, A)
    start = len(gpu.rows)
    for _ in range(3):
        gpu.free(gpu.malloc(100, A))
    snapshot = loaded(process)
    history = read_history(snapshot, snapshot.devices[0], start=start)
    for segment in history.segments:
        if segment.address == second:
            segment.address = first + MIB
            segment.blocks[0].address = first + MIB
    result = replay(history, AllocatorConfig())
    assert result.problems["segments overlap"] == 1
    assert not result.exact


def test_a_stop_before_an_emptied_cache() -> None:
    process = SyntheticProcess()
    gpu = process.device
    gpu.free(gpu.malloc(12 * MIB, A))
    before = len(gpu.rows)
    gpu.empty_cache()
    waiting = gpu.malloc(12 * MIB, A)
    gpu.record_stream(waiting, 4)
    gpu.free(waiting)
    gpu.free(gpu.malloc(100, A))
    gpu.empty_cache()
    gpu.process_events(A)
    history = history_of(process)
    stopped = Replayer(history, process.config, stop=before).run()
    assert stopped.allocator.reserved_bytes == 12 * MIB
    assert replay(history, process.config).exact


def test_an_emptied_cache_followed_by_completions() -> None:
    """Returned segments, completed frees, and then no allocation: the frees stand for themselves."""
    process = SyntheticProcess()
    gpu = process.device
    keep = gpu.malloc(30 * MIB, A)
    waiting = gpu.malloc(12 * MIB, A, pool=(1, 0))
    gpu.free(gpu.malloc(50 * MIB, A))
    gpu.record_stream(waiting, 4)
    gpu.allocator.begin_capture((2, 0))
    gpu.free(waiting)
    gpu.allocator.end_capture((2, 0))
    rows = list(gpu.rows)
    gpu.empty_cache()
    gpu.free(keep)
    history = history_of(process)
    assert len(history) > len(rows)
    completed = [row for row, action in enumerate(history.action) if action == 2]
    released = [row for row, action in enumerate(history.action) if action == 4]
    # Put the completion behind the returned segment, as another thread could.
    assert completed[1] + 1 == released[0]
    columns: list[Any] = [
        history.action, history.address, history.size, history.stream, history.stack, history.pool,
    ]  # fmt: skip
    for column in columns:
        column[completed[1]], column[released[0]] = column[released[0]], column[completed[1]]
    assert replay(history, process.config).exact


def test_more_blocks_than_the_file_has() -> None:
    process = SyntheticProcess()
    process.device.malloc(12 * MIB, A)
    process.device.malloc(14 * MIB, A)
    process.device.free(process.device.malloc(16 * MIB, A))
    history = history_of(process)
    del history.segments[-1]
    result = replay(history, process.config)
    assert not result.exact


def test_frees_that_wait_in_requests() -> None:
    trace = RequestTrace()
    lost = trace.ask(500 * MIB)
    trace.give(lost, kind=GIVE_LATER)
    trace.give(lost, kind=DONE)
    kept = trace.ask(30 * MIB)
    trace.give(kept, kind=GIVE_LATER)
    trace.ask(80 * MIB)  # the retry waits for it
    trace.give(kept, kind=DONE)
    outcome = run(trace, AllocatorConfig(), capacity=100 * MIB)
    assert (outcome.ooms, outcome.peak_reserved_bytes) == (1, 80 * MIB)


def test_requests_of_histories_with_waiting_frees_and_emptied_caches() -> None:
    process = SyntheticProcess(capacity=100 * MIB)
    gpu = process.device
    first = gpu.malloc(30 * MIB, A)
    gpu.record_stream(first, 4)
    gpu.free(gpu.malloc(20 * MIB, A))
    gpu.free(first)
    start = len(gpu.rows)
    gpu.malloc(80 * MIB, B)  # waits for the free, returns both
    snapshot = loaded(process, edit=without_frames)
    history = read_history(snapshot, snapshot.devices[0])
    found = replay(history, process.config)
    assert found.exact
    whole = requests_of(found, history)
    assert run(whole, process.config, capacity=100 * MIB).fits
    before = Replayer(history, process.config, stop=start, readings=found.readings).run()
    window = requests_of(before, history, start=start)
    assert run(window, process.config, capacity=100 * MIB).fits
    emptied = SyntheticProcess()
    emptied.device.free(emptied.device.malloc(30 * MIB, A))
    emptied.device.empty_cache()
    emptied.device.malloc(40 * MIB, B)
    snapshot = loaded(emptied, edit=without_frames)
    history = read_history(snapshot, snapshot.devices[0])
    assert requests_of(replay(history, AllocatorConfig()), history).n_slots == 2


def test_rows_of_the_tracer_may_start_late() -> None:
    process = SyntheticProcess()
    gpu = process.device
    first = gpu.malloc(512, A)
    gpu.free(first)
    rows = list(gpu.rows)
    assert RequestTrace.from_rows(rows[2:]).n_slots == 0
    assert len(RequestTrace.from_rows(rows[3:])) == 0
    assert RequestTrace.from_rows([rows[0]._replace(action="segment_free", context=None)]).n_slots == 0
