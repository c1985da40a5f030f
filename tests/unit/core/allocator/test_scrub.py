"""Moving through a history: the state before any row is that of a replay stopped there."""

from __future__ import annotations

import random

import pytest

from oomscope.core.allocator import scrub
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.replay import Replayer, replay
from oomscope.core.allocator.scrub import Scrubber
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import fragmented_oom, random_stream
from oomscope.units import GIB, MIB

from .helpers import history_of


@pytest.mark.parametrize("conf", ["", "expandable_segments:True", "max_split_size_mb:64"])
def test_any_row_in_any_order(conf: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scrub, "SPACING", 11)
    monkeypatch.setattr(scrub, "MAX_STATES", 1000)
    process = SyntheticProcess(conf, capacity=700 * MIB, total_bytes=4 * GIB)
    random_stream(process, 6, requests=500)
    history = history_of(process)
    found = replay(history, process.config)
    assert found.exact
    scrubber = Scrubber(history, found)
    rows = [0, len(history), *random.Random(1).sample(range(len(history)), 30)]
    for row in rows:
        reached = scrubber.at(row)
        direct = Replayer(history, process.config, stop=row, readings=found.readings).run().allocator
        assert sorted(reached.live) == sorted(direct.live), row
        assert sorted(reached.free_blocks) == sorted(direct.free_blocks), row
        assert reached.reserved_bytes == direct.reserved_bytes


def test_the_last_state_is_the_recorded_one() -> None:
    process = SyntheticProcess()
    random_stream(process, 6, requests=300)
    process.device.record_stream(process.device.malloc(3 * MIB), 5)
    history = history_of(process)
    views = Scrubber(history, replay(history, process.config)).segments(len(history))
    recorded = process.device.allocator.segments()
    assert [(view.address, view.size, view.stream, view.pool) for view in views] == [
        (each["address"], each["total_size"], each["stream"], each["segment_pool_id"]) for each in recorded
    ]
    for view, each in zip(views, recorded, strict=True):
        assert view.small == (each["segment_type"] == "small")
        assert view.expandable == each["is_expandable"]
        assert [(b.address, b.size, b.state) for b in view.blocks] == [
            (b["address"], b["size"], b["state"]) for b in each["blocks"]
        ]
        for block in view.blocks:
            if block.state != "inactive":
                assert block.row is not None
                assert history.address[block.row] == block.address
                assert block.requested == history.size[block.row]


def test_the_map_at_a_failure() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    fragmented_oom(process)
    history = history_of(process)
    scrubber = Scrubber(history, replay(history, process.config))
    views = scrubber.segments(len(history) - 1)
    assert [view.free_bytes for view in views] == [18 * MIB] * 12


def test_without_an_exact_replay_there_is_nothing_to_show() -> None:
    process = SyntheticProcess("max_split_size_mb:64", capacity=700 * MIB)
    random_stream(process, 6, requests=500)
    history = history_of(process)
    found = replay(history, AllocatorConfig())
    assert not found.exact
    with pytest.raises(ValueError, match="only an exact replay"):
        Scrubber(history, found)


def test_an_empty_history() -> None:
    history = history_of(SyntheticProcess())
    assert Scrubber(history, replay(history, AllocatorConfig())).segments(0) == []
