"""Synthetic snapshots: torch's shapes through the releases, and what the workloads are made for."""

from __future__ import annotations

import pickle

import pytest

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.synth import SyntheticProcess, frame, stripped, to_bytes
from oomscope.core.allocator.synth_workloads import (
    fragmented_oom,
    graph_pool,
    shortage_oom,
    side_stream,
    training,
)
from oomscope.units import MIB

from .helpers import loaded

SINCE = {
    # key of a row, a block, a segment or the top level -> first release that has it
    ("row", "time_us"): (2, 2),
    ("row", "compile_context"): (2, 8),
    ("row", "user_metadata"): (2, 10),
    ("row", "pool_id"): (2, 13),
    ("block", "address"): (2, 1),
    ("block", "frames"): (2, 1),
    ("segment", "segment_pool_id"): (2, 1),
    ("segment", "is_expandable"): (2, 1),
    ("segment", "frames"): (2, 1),
    ("top", "allocator_settings"): (2, 3),
    ("top", "external_annotations"): (2, 5),
}


@pytest.mark.parametrize("minor", range(14))
def test_keys_by_release(minor: int) -> None:
    version = (2, minor)
    process = SyntheticProcess(torch_version=version)
    training(process, layers=2, steps=1)
    raw = process.snapshot()
    places = {
        "top": raw,
        "row": raw["device_traces"][0][0],
        "segment": raw["segments"][0],
        "block": raw["segments"][0]["blocks"][0],
    }
    for (place, key), since in SINCE.items():
        assert (key in places[place]) == (version >= since), (place, key)
    assert ("history" in places["block"]) == (version < (2, 1))
    if version >= (2, 9):
        assert "graph_capture_record_stream_reuse" in raw["allocator_settings"]
    snapshot = loaded(process)
    assert not snapshot.warnings
    assert len(snapshot.devices[0].events) == len(process.device.rows)


def test_unknown_releases_are_refused() -> None:
    with pytest.raises(ValueError, match=r"known shapes are \(2, 0\) to"):
        SyntheticProcess(torch_version=(1, 13))


def test_several_devices_and_metadata() -> None:
    process = SyntheticProcess(devices=3)
    process.devices[2].user_metadata = "warm-up"
    training(process, layers=2, steps=2, device=2)
    snapshot = loaded(process)
    assert [len(each.events) > 0 for each in snapshot.devices] == [False, False, True]
    assert "warm-up" in snapshot.texts
    assert len(snapshot.annotations) == 4


def test_the_ring_keeps_the_last_rows() -> None:
    process = SyntheticProcess(max_entries=50)
    training(process)
    assert len(process.snapshot()["device_traces"][0]) == 50


def test_torchs_own_viewer_reads_it() -> None:
    viewer = pytest.importorskip("torch.cuda._memory_viz")
    process = SyntheticProcess()
    training(process, layers=2, steps=1)
    raw = process.snapshot()
    assert "allocated" in viewer.segsum(raw)
    assert "alloc" in viewer.trace(raw)


def test_bytes_are_a_pickle_of_protocol_4() -> None:
    process = SyntheticProcess()
    training(process, layers=2, steps=1)
    data = to_bytes(process.snapshot())
    assert data[:2] == b"\x80\x04"
    assert pickle.loads(data) == process.snapshot()
    assert "allocator_settings" not in stripped(process.snapshot())
    assert "allocator_settings" not in process.snapshot(settings=False)


def test_fragmentation_fails_with_enough_free_memory_in_pieces() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    failed = fragmented_oom(process)
    allocator = process.device.allocator
    free = allocator.reserved_bytes - allocator.active_bytes
    assert free > 3 * failed
    assert max(block.size for block in allocator.free_blocks.values()) < failed
    assert process.device.rows[-1].action == "oom"
    with pytest.raises(ValueError, match="less capacity"):
        fragmented_oom(SyntheticProcess(capacity=900 * MIB))
    with pytest.raises(ValueError, match="less capacity"):
        fragmented_oom(SyntheticProcess("expandable_segments:True", capacity=500 * MIB))


def test_a_shortage_fails_with_nothing_free() -> None:
    process = SyntheticProcess(AllocatorConfig(), capacity=500 * MIB)
    shortage_oom(process)
    allocator = process.device.allocator
    assert allocator.reserved_bytes == allocator.active_bytes


def test_side_streams_leave_pending_frees() -> None:
    process = SyntheticProcess()
    side_stream(process)
    states = {block["state"] for each in process.snapshot()["segments"] for block in each["blocks"]}
    assert "active_pending_free" in states


def test_graph_pools_hold_the_blocks_of_the_capture() -> None:
    process = SyntheticProcess()
    graph_pool(process)
    pools = {each["segment_pool_id"] for each in process.snapshot()["segments"]}
    assert pools == {(0, 0), (1, 0)}


def test_free_rows_carry_the_stack_of_the_free_when_given() -> None:
    process = SyntheticProcess()
    stack = [frame("a.py", 1, "f")]
    address = process.device.malloc(512, stack)
    process.device.free(address, [frame("b.py", 2, "g")])
    names = [row["frames"][0]["name"] for row in process.snapshot()["device_traces"][0]]
    assert names == ["f", "f", "g", "g"]
