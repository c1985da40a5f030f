"""Every age of torch's schema, missing keys, odd values, and what is no snapshot."""

from __future__ import annotations

import contextlib
import copy
from typing import Any

import numpy as np
import pytest
from made_snapshots import MIB, STACKS, Allocator, like_torch_2_0, like_torch_2_13, training, wrap

from oomscope.core.snapshot.columns import Action, BlockState
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.errors import SnapshotError


def codes(raw: Any) -> set[str]:
    return {each.code for each in parse_snapshot(raw).warnings}


def test_rows_become_columns() -> None:
    raw = training(steps=2)
    snapshot = parse_snapshot(raw, name="x")
    events = snapshot.devices[0].events
    rows = raw["device_traces"][0]
    assert [Action(code).name.lower() for code in events.action.tolist()] == [row["action"] for row in rows]
    assert events.address.tolist() == [row["addr"] for row in rows]
    assert events.size.tolist() == [row["size"] for row in rows]
    assert events.time_us.tolist() == [row["time_us"] for row in rows]
    frames = [[each.line for each in snapshot.stacks[stack]] for stack in events.stack.tolist()]
    assert frames == [[each["line"] for each in row["frames"]] for row in rows]
    assert len(snapshot.stacks) < 20
    assert snapshot.torch_version == "2.6"
    assert snapshot.warnings == []


def test_oldest_and_newest_schema_say_the_same() -> None:
    old = parse_snapshot(like_torch_2_0(training()))
    new = parse_snapshot(like_torch_2_13(training()))
    assert old.torch_version == "2.0"
    for one, other in zip(old.devices, new.devices, strict=True):
        assert one.blocks.address.tolist() == other.blocks.address.tolist()
        assert one.blocks.requested_size.tolist() == other.blocks.requested_size.tolist()
        assert one.events.size.tolist() == other.events.size.tolist()
    events = new.devices[0].events
    assert events.pool is not None
    assert [new.pools[pool] for pool in events.pool[:2].tolist()] == [(0, 0), (0, 1)]
    assert events.compile_context is not None
    assert new.texts[int(events.compile_context[0])] == "N/A"
    assert events.forward_stack is not None
    forward = events.forward_stack[events.action == Action.ALLOC][0]
    assert [str(each) for each in new.stacks[int(forward)]] == ["/home/alice/work/model.py:42 forward"]


def test_bare_list_of_segments() -> None:
    raw = training()
    snapshot = parse_snapshot(raw["segments"])
    assert snapshot.n_events == 0
    assert int(snapshot.devices[0].segments.total_size.sum()) == sum(
        each["total_size"] for each in raw["segments"]
    )


@pytest.mark.parametrize("spelling", ["active_pending_free", "active_awaiting_free"])
def test_both_spellings_of_pending_free(spelling: str) -> None:
    raw = training()
    raw["segments"][0]["blocks"][0]["state"] = spelling
    assert parse_snapshot(raw).devices[0].blocks.state[0] == BlockState.PENDING_FREE


def test_oom_row_keeps_the_free_bytes() -> None:
    events = parse_snapshot(training(oom=True)).devices[0].events
    row = int(np.flatnonzero(events.action == Action.OOM)[0])
    assert int(events.address[row]) == 5 * MIB


def test_unknown_keys_and_actions_are_kept_apart() -> None:
    raw = training()
    raw["something_new"] = object
    raw["device_traces"][0][3]["action"] = "teleport"
    raw["device_traces"][0][4]["new_key"] = 1
    snapshot = parse_snapshot(raw)
    assert "something_new" in snapshot.keys
    assert snapshot.devices[0].events.action[3] == Action.UNKNOWN
    assert [each.code for each in snapshot.warnings] == ["unknown-action"]


def test_sums_and_gaps_are_warnings() -> None:
    raw = training()
    raw["segments"][0]["total_size"] += 512
    assert codes(raw) == {"segment-sum"}
    raw = training()
    raw["segments"][0]["blocks"][-1]["address"] += 512
    assert codes(raw) == {"not-contiguous"}


def test_devices_without_anything_are_listed() -> None:
    memory = Allocator(device=2)
    memory.malloc(MIB, "forward")
    raw = wrap(Allocator(0), Allocator(1), memory, Allocator(3))
    snapshot = parse_snapshot(raw)
    assert [len(each.events) for each in snapshot.devices] == [0, 0, 2, 0]
    assert snapshot.busiest() is snapshot.devices[2]


def test_frames_are_interned_by_content() -> None:
    raw = training()
    unshared = copy.deepcopy(raw)
    unshared["device_traces"] = [[copy.deepcopy(row) for row in rows] for rows in raw["device_traces"]]
    assert len(parse_snapshot(unshared).stacks) == len(parse_snapshot(raw).stacks) <= len(STACKS) + 1


def test_lone_surrogates_cannot_break_output() -> None:
    raw = training()
    raw["device_traces"][0][1]["frames"][-1] = {"name": "\udcff", "filename": "a\udc80.py", "line": 1}
    for each in parse_snapshot(raw).stacks.frames:
        str(each).encode()


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        (None, "nothing"),
        (5, "type int"),
        ({}, "neither"),
        ({"segments": 5}, "segments is of type int"),
        ({"segments": [5]}, r"segments\[0\]"),
        ({"segments": [{"blocks": 3}]}, "blocks is of type int"),
        ({"segments": [{"blocks": [3]}]}, r"blocks\[0\]"),
        ({"segments": [{"device": 10**9}]}, "device is"),
        ({"segments": [{"address": 1 << 900}]}, "900|901 bits"),
        ({"segments": [{"stream": "x"}]}, "stream is"),
        ({"segments": [{"segment_pool_id": [1]}]}, "pool id"),
        ({"device_traces": 5}, "device_traces is"),
        ({"device_traces": [5]}, r"device_traces\[0\]"),
        ({"device_traces": [[5]]}, r"device_traces\[0\]\[0\]"),
        ({"device_traces": [[{"action": "alloc", "addr": "x"}]]}, "addr is"),
        ({"device_traces": [[]] * 5000}, "5000 devices"),
    ],
)
def test_what_is_no_snapshot(raw: Any, words: str) -> None:
    with pytest.raises(SnapshotError, match=words):
        parse_snapshot(raw)


def test_deep_and_exploding_values_are_not_followed() -> None:
    deep: list[Any] = []
    for _ in range(100_000):
        deep = [deep]
    laughs: list[Any] = []
    for _ in range(60):
        laughs = [laughs] * 10
    for bad in (deep, laughs):
        for raw in (
            {"segments": bad},
            {"device_traces": [bad]},
            {"device_traces": [[{"action": bad, "frames": bad}]]},
        ):
            with contextlib.suppress(SnapshotError, RecursionError):
                parse_snapshot(raw)
        assert parse_snapshot({"segments": [], "allocator_settings": {"a": bad}}).settings == {"a": "<list>"}
    while deep:  # so that the garbage collector need not recurse
        deep = deep[0]


@pytest.mark.parametrize(
    ("make", "release"),
    [
        (like_torch_2_13, "2.12"),
        (lambda raw: raw, "2.5"),
        (lambda raw: {"segments": raw["segments"]}, "2.1"),
        (lambda raw: {"segments": []}, None),
    ],
    ids=["newest", "plain", "segments", "nothing"],
)
def test_keys_tell_the_oldest_release_that_writes_them(make: Any, release: str | None) -> None:
    assert parse_snapshot(make(training())).torch_at_least == release


def test_a_list_of_something_else_is_no_snapshot() -> None:
    with pytest.raises(SnapshotError, match="holds a list of tuple, not a memory snapshot"):
        parse_snapshot([("a", "b")])
