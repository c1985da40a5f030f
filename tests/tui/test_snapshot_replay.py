"""The Snapshot screen's exact segments, what stood in a failed request's way, and its What-if overlay."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from snapshot_pilot import app_for, made, press, settled

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.synth import SyntheticProcess, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom
from oomscope.core.snapshot.categories import Category
from oomscope.tui.screens import snapshot_work
from oomscope.tui.screens.whatif import WhatIfScreen
from oomscope.tui.widgets.allocations import Allocations
from oomscope.tui.widgets.segments import SegmentMap, cover
from oomscope.tui.widgets.stackpane import StackPane
from oomscope.units import MIB


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    process = SyntheticProcess(AllocatorConfig(), capacity=12 * 42 * MIB)
    fragmented_oom(process)
    path = tmp_path / "r00000-step000000-oom.pickle"
    path.write_bytes(to_bytes(process.snapshot()))
    return path


async def test_blocks_in_the_way_are_marked_with_their_code(
    failed: Path, text_of: Callable[..., str]
) -> None:
    async with app_for(failed).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        text = text_of(pilot.app)
        assert "1 block, 22.00 MiB, stands in the way of 60.00 MiB" in text
        assert "exact replay of 61 events" in text
        assert "▲ in the way" in text
        segments = view.query_one(SegmentMap)
        assert view._picture is not None
        assert list(view._picture.segments.in_the_way) == [segments.selected]
        assert segments.allocation_at(1) == segments.selected
        frame = view.query_one(StackPane).frame
        assert frame is not None
        assert frame.function == "keep_result"


async def test_marks_go_with_the_moment_and_come_back(failed: Path, text_of: Callable[..., str]) -> None:
    async with app_for(failed).run_test(size=(80, 24)) as pilot:
        view = await settled(pilot)
        await press(pilot, "v", "v")
        assert "▲ in the way" in text_of(pilot.app)
        await press(pilot, "left")
        assert "▲ in the way" not in text_of(pilot.app)
        assert "stands in the way" in text_of(pilot.app)  # the alert line speaks of the last error still
        assert "exact replay" in text_of(pilot.app)
        await press(pilot, "right")
        assert "▲ in the way" in text_of(pilot.app)
        view.query_one(SegmentMap).focus()
        await press(pilot, "end", "home")
        assert view.query_one(Allocations).allocation == view.query_one(SegmentMap).allocation_at(0)


async def test_file_that_is_not_reproduced_says_requested_sizes(
    tmp_path: Path, text_of: Callable[..., str]
) -> None:
    from made_snapshots import training

    async with app_for(made(tmp_path, "a.pickle", training())).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await press(pilot, "v", "v")
        assert "requested sizes: the replay is not exact" in text_of(pilot.app)


async def test_replay_that_breaks_leaves_the_screen_working(
    failed: Path, text_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(_: Any) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(snapshot_work, "ExactReplay", broken)
    async with app_for(failed).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await press(pilot, "v", "v")
        assert "requested sizes: the replay failed" in text_of(pilot.app)


async def test_what_if_opens_here_too(failed: Path, text_of: Callable[..., str]) -> None:
    async with app_for(failed).run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        await pilot.press("w")
        await pilot.pause()
        assert isinstance(pilot.app.screen, WhatIfScreen)
        await pilot.app.workers.wait_for_complete()
        await pilot.pause()
        assert "expandable_segments:True" in text_of(pilot.app)
        await pilot.press("w")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, WhatIfScreen)


async def test_what_if_needs_a_history(tmp_path: Path) -> None:
    from made_snapshots import training

    path = made(tmp_path, "a.pickle", {**training(), "device_traces": [[]]})
    async with app_for(path).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("w")
        await pilot.pause()
        assert not isinstance(pilot.app.screen, WhatIfScreen)
        assert any("no history" in note.message for note in pilot.app._notifications)


def test_cells_show_what_covers_most() -> None:
    one, two = int(Category.ACTIVATIONS), int(Category.PARAMETERS)
    kinds = np.array([one, two, one], np.int64)
    cells, share = cover(np.array([0.0, 1.25, 1.5]), np.array([1.25, 1.5, 3.75]), kinds, 5)
    assert cells.tolist() == [one, one, one, one, -1]
    assert share.tolist() == [1.0, 0.75, 1.0, 0.75, 0.0]


def test_many_small_blocks_in_one_cell_add_up() -> None:
    one, two = int(Category.ACTIVATIONS), int(Category.PARAMETERS)
    starts = np.arange(0, 1, 0.1)
    kinds = np.array([one] * 6 + [two] * 4, np.int64)
    cells, share = cover(starts, starts + 0.1, kinds, 1)
    assert cells.tolist() == [one]
    assert share[0] == pytest.approx(0.6)
