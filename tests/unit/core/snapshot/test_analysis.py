"""Curves, lifetimes, categories, steps, segments: against brute force and against what was put in."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made_snapshots import MIB, Allocator, like_torch_2_13, training, wrap

from oomscope.core.snapshot.analysis import DeviceAnalysis, analyse
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import Action
from oomscope.core.snapshot.groups import by_line, by_module, by_size
from oomscope.core.snapshot.history import History
from oomscope.core.snapshot.moments import moment
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.errors import UsageError


def first(raw: dict[str, Any]) -> DeviceAnalysis:
    return analyse(parse_snapshot(raw))[0]


@st.composite
def histories(draw: Any) -> tuple[dict[str, Any], list[int], list[int]]:
    """A random history with, per row, the live bytes and the reserved bytes that it should show."""
    memory = Allocator()
    memory.recording = False
    for _ in range(draw(st.integers(0, 3))):
        memory.malloc(draw(st.integers(1, 5 * MIB)), "parameters")
    memory.recording = True
    live, reserved = [], []
    for _ in range(draw(st.integers(1, 40))):
        before = len(memory.rows)
        if memory.live and draw(st.booleans()):
            memory.free(draw(st.sampled_from(sorted(memory.live))))
        else:
            memory.malloc(
                draw(st.integers(1, 5 * MIB)), draw(st.sampled_from(["forward", "backward", "leak"]))
            )
        for row in memory.rows[before:]:
            level = sum(size for size, _, _ in memory.live.values())
            if row["action"] == "segment_alloc":
                level = live[-1] if live else level - memory.rows[-1]["size"]
            elif row["action"] == "free_requested":
                level += row["size"]
            live.append(level)
            reserved.append(sum(memory.segments.values()))
    return wrap(memory), live, reserved


@settings(max_examples=150, deadline=None)
@given(histories())
def test_levels_are_those_of_the_allocator(made: tuple[dict[str, Any], list[int], list[int]]) -> None:
    raw, live, reserved = made
    analysis = first(raw)
    assert analysis.live.after.tolist() == live
    assert analysis.reserved.after.tolist() == reserved
    assert analysis.live.before >= 0
    peak, row = analysis.peak
    assert peak == max([analysis.live.before, *live])
    assert row == -1 or live[row] == peak
    for row in {0, len(live) // 2, len(live) - 1}:
        alive = analysis.alive(row)
        assert int(analysis.lives.size[alive].sum()) == live[row]
        assert sum(share.bytes for share in analysis.composition(row)) == live[row]
        assert sum(size for _, size, _ in analysis.top(row)) == live[row]


@settings(max_examples=100, deadline=None)
@given(histories())
def test_live_at_the_end_are_the_final_blocks(made: tuple[dict[str, Any], list[int], list[int]]) -> None:
    analysis = first(made[0])
    lives = analysis.lives
    alive = lives.death >= lives.n_events
    found = dict(zip(lives.address[alive].tolist(), lives.size[alive].tolist(), strict=True))
    blocks = analysis.device.blocks
    used = blocks.state != 0
    assert found == dict(
        zip(blocks.address[used].tolist(), blocks.requested_size[used].tolist(), strict=True)
    )
    assert (lives.block[alive] >= 0).all()


@settings(max_examples=100, deadline=None)
@given(histories())
def test_segments_at_the_end_and_curves_by_group(made: tuple[dict[str, Any], list[int], list[int]]) -> None:
    analysis = first(made[0])
    last = len(analysis.device.events) - 1
    at = analysis.segments_at(last)
    assert at.address.tolist() == analysis.device.segments.address.tolist()
    assert at.size.tolist() == analysis.device.segments.total_size.tolist()
    assert (at.segment >= 0).all()
    rows = np.arange(last + 1)
    levels = analysis.category_curves(rows)
    assert levels.sum(axis=0).tolist() == analysis.live.after.tolist()
    early = analysis.segments_at(0)
    assert int(early.size.sum()) == analysis.reserved.at(0)


def test_categories_of_a_training_loop() -> None:
    analysis = first(training(steps=4, layers=3))
    assert analysis.history is History.FULL
    shares = {share.category: share for share in analysis.composition(analysis.focus.row)}
    assert shares[Category.PARAMETERS].bytes == 3 * 8 * MIB
    assert shares[Category.OPTIMIZER_STATE].bytes == 6 * 8 * MIB
    assert shares[Category.ACTIVATIONS].bytes >= 3 * 16 * MIB
    assert "optimizer" in shares[Category.OPTIMIZER_STATE].evidence
    peak = analysis.peak[1]
    assert sum(share.bytes for share in shares.values()) == analysis.live.at(peak)


def test_history_that_began_late_says_so() -> None:
    analysis = first(training(late=True))
    assert analysis.history is History.BEGAN_LATE
    # The blocks are alive at the end with their stack, so even what is older than the history has a category.
    shares = {share.category: share.bytes for share in analysis.composition(analysis.focus.row)}
    assert shares[Category.PARAMETERS] == 3 * 8 * MIB


@pytest.mark.parametrize(("keep", "expected"), [(0, History.NONE), (1, History.RING), (2, History.RING)])
def test_short_histories_are_no_histories(keep: int, expected: History) -> None:
    raw = training()
    raw["device_traces"] = [raw["device_traces"][0][len(raw["device_traces"][0]) - keep :]]
    assert first(raw).history is expected


def test_cut_history_is_found() -> None:
    raw = training(steps=6)
    raw["segments"] = []
    analysis = first(raw)
    assert analysis.history is History.CUT
    assert analysis.composition(analysis.focus.row) == []


def test_oom_looks_at_the_state_just_before_it() -> None:
    analysis = first(training(oom=True))
    (oom,) = analysis.ooms
    assert oom.requested_bytes == 64 * MIB
    assert oom.device_free_bytes == 5 * MIB
    assert analysis.focus.reason == "oom"
    assert analysis.focus.row == oom.event_index - 1
    live = int(analysis.lives.size[analysis.alive(analysis.focus.row)].sum())
    assert live == oom.live_bytes > analysis.totals.requested


def test_leak_is_a_steady_survivor() -> None:
    analysis = first(training(steps=8, leak=True))
    assert analysis.steps.source == "backward" or analysis.steps.source == "optimizer"
    (leak,) = [each for each in analysis.survivors if each.is_steady]
    assert leak.bytes_per_step == 5 * MIB
    frames = analysis.snapshot.stacks[leak.stack]
    assert any(each.function == "log_loss" for each in frames)
    assert not [each for each in first(training(steps=8)).survivors if each.is_steady]


def test_steps_come_from_annotations_when_there_are_any() -> None:
    raw = training(steps=3)
    times = [row["time_us"] for row in raw["device_traces"][0]]
    marks = [times[len(times) // 3], times[2 * len(times) // 3]]
    raw["external_annotations"] = [
        {"stage": stage, "name": "Optimizer.step#AdamW.step", "device": 0, "time_us": time + (stage == "END")}
        for time in marks
        for stage in ("START", "END")
    ]
    steps = first(raw).steps
    assert steps.source == "annotations"
    assert steps.count == 3


def test_groups_add_up() -> None:
    analysis = first(training())
    alive = analysis.alive(analysis.focus.row)
    stacks, lives = analysis.snapshot.stacks, analysis.lives
    total = int(lives.size[alive].sum())
    lines = by_line(stacks, lives, alive)
    assert sum(each.bytes for each in lines) == total
    assert "work/model.py:42 forward" in {each.label for each in lines}
    assert sum(each.bytes for each in by_module(stacks, lives, alive)) == total
    assert sum(size for _, size, _ in by_size(lives, alive)) == total


def test_pools_and_pins() -> None:
    memory = Allocator()
    small = memory.malloc(1000, "forward")
    big = memory.malloc(10 * MIB, "forward")
    memory.free(big)
    analysis = first(wrap(memory))
    totals = analysis.totals
    assert totals.whole_free == 10 * MIB
    assert totals.largest_inactive == 10 * MIB
    (pin,) = analysis.pins
    assert (pin.address, pin.live_bytes, pin.free_bytes) == (small, 1024, 2 * MIB - 1024)
    uses = {each.is_large: each for each in analysis.pools}
    assert uses[False].stranded_bytes == 2 * MIB - 1024
    assert uses[True].whole_free_bytes == 10 * MIB
    assert uses[True].stranded_bytes == 0


def test_missing_free_completed_rows_still_give_lifetimes() -> None:
    raw = training()
    raw["device_traces"] = [[row for row in raw["device_traces"][0] if row["action"] != "free_completed"]]
    analysis = first(raw)
    assert analysis.live.before == 0
    assert sum(share.bytes for share in analysis.composition(10)) == analysis.live.at(10)


def test_moments() -> None:
    analysis = first(training(oom=True))
    assert moment(analysis, "auto").reason == "oom"
    assert moment(analysis, "peak").row == analysis.peak[1]
    assert moment(analysis, "end").row == len(analysis.device.events) - 1
    assert moment(analysis, "event:5").row == 5
    per_step = defaultdict(int)
    edges = analysis.steps.of(np.arange(len(analysis.device.events)))
    for step, level in zip(edges.tolist(), analysis.live.after.tolist(), strict=True):
        per_step[step] = max(per_step[step], level)
    assert analysis.live.at(moment(analysis, "step:1").row) == per_step[1]
    for bad in ("nonsense", "event:99999", "step:99", "event:", "step:-1"):
        with pytest.raises(UsageError):
            moment(analysis, bad)


def test_one_stream_and_one_size_class() -> None:
    analysis = first(training())
    both = analysis.curve(is_large=True).after + analysis.curve(is_large=False).after
    assert both.tolist() == analysis.live.after.tolist()
    assert analysis.curve(stream=0).after.tolist() == analysis.live.after.tolist()
    assert analysis.curve(pool=0).after[-1] == analysis.live.after[-1]
    assert (analysis.device.events.action == Action.ALLOC).any()


def test_pool_is_not_known_where_the_segment_was_given_back() -> None:
    raw = training()
    kept = raw["segments"][0]
    kept["segment_pool_id"] = (0, 7)
    # Another segment lay at this address before, with an allocation that came and went with it.
    size, address = kept["total_size"], kept["address"]
    older = [
        ("segment_alloc", size),
        ("alloc", 512),
        ("free_requested", 512),
        ("free_completed", 512),
        ("segment_free", size),
    ]
    rows = raw["device_traces"][0]
    rows[:0] = [
        {"action": action, "addr": address, "size": bytes_, "stream": 0, "time_us": 1 + n, "frames": []}
        for n, (action, bytes_) in enumerate(older)
    ]
    analysis = first(raw)
    pools = {
        int(birth): int(pool)
        for birth, pool, at in zip(analysis.lives.birth, analysis.pool, analysis.lives.address, strict=True)
        if at == address
    }
    assert pools.pop(1) == -1
    assert {analysis.snapshot.pools[pool] for pool in pools.values()} == {(0, 7)}


def test_pool_comes_from_the_rows_when_they_have_it() -> None:
    raw = like_torch_2_13(training())
    analysis = first(raw)
    pools = [analysis.snapshot.pools[number] for number in analysis.pool]
    rows = raw["device_traces"][0]
    assert pools == [rows[birth]["pool_id"] for birth in analysis.lives.birth.tolist()]
