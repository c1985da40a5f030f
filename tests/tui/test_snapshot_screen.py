"""The Snapshot screen: what its keys do, and how it looks."""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from made_snapshots import MIB, Allocator, training, wrap
from snapshot_pilot import app_for, made, press, settled
from textual import events

from oomscope.core.snapshot.curves import column_rows
from oomscope.core.snapshot.flame import Node
from oomscope.tui.widgets.allocations import Allocations
from oomscope.tui.widgets.icicle import Icicle, boxes
from oomscope.tui.widgets.segments import SegmentMap
from oomscope.tui.widgets.snapshot_timeline import AXIS
from oomscope.tui.widgets.stackpane import StackPane

GOLDENS = Path(__file__).parent / "goldens"
CONSTRAINTS = (Path(__file__).parents[2] / "constraints-dev.txt").read_text().splitlines()
PINNED = next(line.partition("==")[2].strip() for line in CONSTRAINTS if line.startswith("textual=="))
UPDATE = bool(os.environ.get("OOMSCOPE_UPDATE_GOLDENS"))


@pytest.fixture
def leaking(tmp_path: Path) -> Path:
    return made(tmp_path, "rank_3_step_7.pickle", training(steps=6, leak=True))


async def test_opens_at_the_peak_with_all_views_linked(leaking: Path, text_of: Callable[..., str]) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        assert view._painter is not None
        assert view._wish.row == view._painter.analysis.peak[1]
        text = text_of(pilot.app)
        for words in ("rank_3_step_7.pickle", "rank 3", "MiB live", "optimizer state", "model.py:42 forward"):
            assert words in text
        chosen = view.query_one(Allocations).allocation
        assert chosen is not None
        assert view.query_one(SegmentMap).selected == chosen
        await press(pilot, "tab", "tab", "tab")
        view.query_one(Allocations).focus()
        await press(pilot, "down")
        assert view.query_one(Allocations).allocation != chosen
        assert view.query_one(SegmentMap).selected == view.query_one(Allocations).allocation


async def test_moment_moves_and_returns_to_the_peak(leaking: Path) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        view.query_one(Allocations).focus()
        await pilot.pause()
        peak = view._wish.row
        await press(pilot, "left", "left", "left")
        assert view._wish.row < peak
        live = view._picture.live_bytes if view._picture else 0
        assert view._painter is not None
        assert live == view._painter.analysis.live.at(view._wish.row)
        await press(pilot, "p")
        assert view._wish.row == peak
        await press(pilot, "left_square_bracket")
        assert view._wish.row in view._painter.analysis.steps.rows


async def test_zoom_marks_and_range(leaking: Path) -> None:
    async with app_for(leaking).run_test(size=(120, 40)) as pilot:
        view = await settled(pilot)
        view.query_one(Allocations).focus()
        whole = view._wish.stop
        await press(pilot, "plus", "plus")
        assert view._wish.stop - view._wish.start == whole // 4
        assert view._wish.start <= view._wish.row < view._wish.stop
        await press(pilot, "equals_sign", "m", "left", "left", "m")
        first, last = sorted(view._marks)
        await press(pilot, "equals_sign")
        assert (view._wish.start, view._wish.stop) == (first, last + 1)
        await press(pilot, "apostrophe", "equals_sign")
        assert view._wish.stop == whole


async def test_filter_and_escape(leaking: Path, text_of: Callable[..., str]) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        every = view.query_one(Allocations).count()
        await pilot.press("slash", *"LOG_LOSS", "enter")
        await settled(pilot)
        table = view.query_one(Allocations)
        assert 0 < table.count() < every
        assert view._painter is not None
        lives = view._painter.analysis.lives
        chosen = view._picture.allocations if view._picture else np.zeros(0, np.int64)
        assert set(lives.size[chosen].tolist()) == {5 * MIB}
        assert "/LOG_LOSS" in text_of(pilot.app)
        await press(pilot, "escape")
        assert table.count() == every


async def test_only_the_selected_box(leaking: Path) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        view.query_one(Icicle).focus()
        await press(pilot, "down", "f")
        node = view.query_one(Icicle).selected
        assert view._picture is not None
        assert view._picture.shown_bytes == node.bytes
        await press(pilot, "f")
        assert view._picture.shown_bytes == view._picture.live_bytes


async def test_icicle_zooms_and_esc_zooms_out(leaking: Path) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        icicle = view.query_one(Icicle)
        icicle.focus()
        await press(pilot, "down", "down", "enter")
        assert icicle.zoomed is icicle.selected
        assert icicle.zoomed.parent is not None
        await press(pilot, "escape", "escape")
        assert icicle.zoomed.parent is None


async def test_sort_reverse_group_and_fold(leaking: Path) -> None:
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        assert view._painter is not None
        lives = view._painter.analysis.lives

        def order() -> list[int]:
            return view._picture.allocations.tolist() if view._picture else []

        assert lives.size[order()].tolist() == sorted(lives.size[order()].tolist(), reverse=True)
        await press(pilot, "o")
        assert lives.birth[order()].tolist() == sorted(lives.birth[order()].tolist())
        await press(pilot, "O")
        assert lives.birth[order()].tolist() == sorted(lives.birth[order()].tolist(), reverse=True)
        labels = [child.label for child in view._picture.tree.ordered()] if view._picture else []
        assert "parameters" in labels
        await press(pilot, "b", "b", "x")
        assert view._picture is not None
        assert not view._wish.folded
        assert "work/train.py:88 main" in view._picture.tree.children


async def test_small_screen_shows_one_view_at_a_time(leaking: Path, text_of: Callable[..., str]) -> None:
    async with app_for(leaking).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        seen = []
        for _ in range(4):
            text = text_of(pilot.app)
            seen.append(
                [name for name in ("Icicle", "Allocations", "Segments", "Stack") if f"[{name}]" in text]
            )
            await press(pilot, "v")
        assert seen == [["Icicle"], ["Allocations"], ["Segments"], ["Stack"]]


async def test_enter_on_an_allocation_shows_its_stack(leaking: Path, text_of: Callable[..., str]) -> None:
    async with app_for(leaking).run_test(size=(80, 24)) as pilot:
        view = await settled(pilot)
        await press(pilot, "v", "enter")
        assert "[Stack]" in text_of(pilot.app)
        frame = view.query_one(StackPane).frame
        assert frame is not None
        assert frame.file.endswith(".py")
        await press(pilot, "escape")
        assert "[Allocations]" in text_of(pilot.app)


async def test_folder_of_ranks_is_walked(tmp_path: Path, text_of: Callable[..., str]) -> None:
    for rank in range(3):
        made(tmp_path, f"rank_{rank}.pickle", training(steps=2 + rank))
    async with app_for(tmp_path).run_test(size=(120, 40)) as pilot:
        view = await settled(pilot)
        assert "‹ rank 0 ›" in text_of(pilot.app)
        await press(pilot, "full_stop", "full_stop")
        assert view._path is not None
        assert view._path.name == "rank_2.pickle"
        await press(pilot, "full_stop")
        assert view._path.name == "rank_0.pickle"


async def test_devices_are_walked(tmp_path: Path, text_of: Callable[..., str]) -> None:
    devices = [Allocator(0), Allocator(1)]
    for number, memory in enumerate(devices):
        for _ in range(4 + number):
            memory.malloc(3 * MIB, "forward")
    path = made(tmp_path, "a.pickle", wrap(*devices))
    async with app_for(path).run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "device 1" in text_of(pilot.app)
        await press(pilot, "d")
        assert "device 0" in text_of(pilot.app)


async def test_the_filter_shows_while_it_is_typed(tmp_path: Path) -> None:
    async with app_for(made(tmp_path, "a.pickle", training())).run_test(size=(120, 36)) as pilot:
        view = await settled(pilot)
        assert view._picture is not None
        whole = len(view._picture.allocations)
        await press(pilot, "slash", *"optim")
        part = len(view._picture.allocations)
        assert 0 < part < whole
        await press(pilot, "escape")  # as it was before
        assert len(view._picture.allocations) == whole
        await press(pilot, "slash", *"optim", "enter")
        assert len(view._picture.allocations) == part
        await press(pilot, "slash", "backspace", "x", "escape")
        assert view._wish.needle == "optim"


async def test_the_mouse_marks_a_range_and_zooms(tmp_path: Path) -> None:
    async with app_for(made(tmp_path, "a.pickle", training(steps=20))).run_test(size=(120, 36)) as pilot:
        view = await settled(pilot)
        assert view._picture is not None
        rows = view._picture.timeline.rows.tolist()
        await pilot.mouse_down("#timeline", offset=(AXIS + 10, 3))
        await pilot.hover("#timeline", offset=(AXIS + 20, 3))
        await pilot.hover("#timeline", offset=(AXIS + 30, 3))
        await pilot.mouse_up("#timeline", offset=(AXIS + 30, 3))
        await settled(pilot)
        assert sorted(view._marks) == [rows[10], rows[30]]
        assert not view.selections, "dragging selects no text"
        assert view._wish.row == rows[30]
        await press(pilot, "equals_sign")
        assert (view._wish.start, view._wish.stop) == (rows[10], rows[30] + 1)
        await press(pilot, "escape", "equals_sign")
        assert view._painter is not None
        chart, whole = view.query_one("#timeline"), len(view._painter.analysis.live.after)
        for turn, span in ((events.MouseScrollUp, whole // 2), (events.MouseScrollDown, whole // 2 * 2)):
            chart.post_message(turn(chart, AXIS + 10, 3, 0, 0, 0, shift=False, meta=False, ctrl=True))
            await settled(pilot)
            assert view._wish.stop - view._wish.start == span
            assert view._wish.start <= rows[10] < view._wish.stop


async def test_pools_are_walked_after_streams(tmp_path: Path, text_of: Callable[..., str]) -> None:
    raw = training()
    raw["segments"][0]["segment_pool_id"] = (0, 3)
    async with app_for(made(tmp_path, "a.pickle", raw)).run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        shown = []
        for _ in range(4):
            await press(pilot, "W")
            shown.append(
                [
                    name
                    for name in ("default pool", "pool 0.3", "pool not known")
                    if name in text_of(pilot.app)
                ]
            )
        assert ["default pool"] in shown
        assert ["pool 0.3"] in shown


async def test_streams_are_walked(tmp_path: Path, text_of: Callable[..., str]) -> None:
    raw = training()
    for row in raw["device_traces"][0]:
        row["stream"] = 77 if row["size"] == 3 * MIB else 0
    async with app_for(made(tmp_path, "a.pickle", raw)).run_test(size=(120, 40)) as pilot:
        view = await settled(pilot)
        assert view._picture is not None
        whole = view._picture.live_bytes
        await press(pilot, "W")
        first = view._picture.live_bytes
        assert "stream 0" in text_of(pilot.app)
        await press(pilot, "W")
        assert first + view._picture.live_bytes == whole
        await press(pilot, "escape")
        assert view._picture.live_bytes == whole


async def test_out_of_memory_is_the_first_thing_said(tmp_path: Path, text_of: Callable[..., str]) -> None:
    path = made(tmp_path, "a.pickle", training(oom=True))
    async with app_for(path).run_test(size=(80, 24)) as pilot:
        view = await settled(pilot)
        assert "out of memory at event" in text_of(pilot.app)
        assert view._painter is not None
        assert view._wish.row == view._painter.analysis.ooms[-1].event_index - 1


@pytest.mark.parametrize(
    ("raw", "words"),
    [
        ({**training(), "device_traces": [[]]}, "There is no history"),
        ({"segments": [], "device_traces": []}, "holds no memory"),
        ({"something": 1}, "neither"),
    ],
)
async def test_what_is_missing_is_said(
    raw: Any, words: str, tmp_path: Path, text_of: Callable[..., str]
) -> None:
    async with app_for(made(tmp_path, "a.pickle", raw)).run_test(size=(120, 36)) as pilot:
        await settled(pilot)
        assert words in text_of(pilot.app)
        await pilot.press("left", "p", "plus", "m", "v", "o", "x", "f", "y", "left_square_bracket")
        await settled(pilot)


async def test_session_shows_the_snapshot_of_the_rank(
    home: Path, opened: Any, sessions: Any, text_of: Callable[..., str]
) -> None:
    session = sessions.waiting(home)
    folder = session.path / "attempts" / "001" / "snapshots"
    folder.mkdir(exist_ok=True)
    for path in folder.iterdir():
        path.unlink()
    made(folder, "r00000-step000003-oom.pickle", training(oom=True))
    async with opened(session, start="snapshot", size=(120, 40)) as pilot:
        await settled(pilot)
        assert "r00000-step000003-oom.pickle" in text_of(pilot.app)
        await pilot.press("escape")
        await pilot.pause()
        assert pilot.app.view.MODE == "oom"


async def test_copying_gives_text_and_a_command(leaking: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    async with app_for(leaking).run_test(size=(160, 48)) as pilot:
        monkeypatch.setattr(pilot.app, "copy_to_clipboard", copied.append)
        view = await settled(pilot)
        for widget in (Icicle, Allocations, SegmentMap, StackPane):
            view.query_one(widget).focus()
            await press(pilot, "y")
        await press(pilot, "Y")
    assert len(copied) == 5
    assert all(len(text) > 20 for text in copied)
    assert copied[-1].endswith(f"--at event:{view._wish.row}")


async def test_a_hundred_thousand_allocations_scroll(tmp_path: Path) -> None:
    memory = Allocator()
    address = memory.malloc(2 * MIB, "forward")
    row = memory.rows[-1]
    memory.rows += [{**row, "addr": address + 512 * n, "size": 512 + n % 7} for n in range(1, 100_003)]
    path = made(tmp_path, "a.pickle", {"segments": [], "device_traces": [memory.rows]})
    async with app_for(path).run_test(size=(160, 48)) as pilot:
        view = await settled(pilot)
        view._wish = view._wish.__class__(row=100_002, width=80)
        view._ask()
        await settled(pilot)
        table = view.query_one(Allocations)
        table.focus()
        await press(pilot, "G")
        assert table.cursor == table.count() - 1 >= 100_000
        await press(pilot, "pageup", "g")
        assert table.cursor == 0


def test_columns_show_the_highest_row_of_each_stretch() -> None:
    after = np.array([1, 9, 2, 3, 8, 1, 0, 7], np.int64)
    assert column_rows(after, 0, 8, 4).tolist() == [1, 3, 4, 7]
    assert column_rows(after, 2, 5, 6).tolist() == [2, 2, 3, 3, 4, 4]
    assert column_rows(after, 0, 0, 3).tolist() == [-1, -1, -1]


def test_boxes_never_overlap_and_gaps_say_how_many() -> None:
    root = Node("all", bytes=1000)
    for number in range(40):
        size = 400 if number == 0 else 300 if number == 1 else 300 // 38
        root.children[str(number)] = Node(str(number), bytes=size, parent=root)
    for width in (10, 37, 120):
        for line in boxes(root, width):
            ends = [(box.x, box.x + box.width) for box in line]
            assert all(a[1] <= b[0] for a, b in pairwise(ends))
            assert ends[-1][1] <= width
    hidden = [box for line in boxes(root, 37) for box in line if box.node is None]
    assert [box.hidden for box in hidden] == [38]


LOOKS: dict[str, tuple[Callable[[], Any], tuple[str, ...]]] = {
    "snapshot": (lambda: training(steps=6, leak=True), ()),
    "snapshot-oom": (lambda: training(steps=4, oom=True), ()),
    "snapshot-allocations": (lambda: training(steps=6, leak=True), ("v", "down")),
    "snapshot-segments": (lambda: training(steps=6, leak=True), ("v", "v")),
    "snapshot-stack": (lambda: training(steps=6, leak=True), ("v", "enter")),
    "snapshot-no-history": (lambda: {**training(), "device_traces": [[]]}, ()),
}


def check(name: str, text: str) -> None:
    path = GOLDENS / f"{name}.txt"
    if UPDATE:
        path.write_text(text, encoding="utf-8")
        return
    assert path.is_file(), f"no golden file {path.name}: run with OOMSCOPE_UPDATE_GOLDENS=1"
    assert text == path.read_text(encoding="utf-8")


pinned = pytest.mark.skipif(
    version("textual") != PINNED, reason=f"the golden files were made with textual {PINNED}"
)


@pinned
@pytest.mark.parametrize("size", [(80, 24), (120, 36), (160, 48)], ids=lambda size: f"{size[0]}x{size[1]}")
@pytest.mark.parametrize("name", LOOKS)
async def test_looks(name: str, size: tuple[int, int], tmp_path: Path, text_of: Callable[..., str]) -> None:
    make, keys = LOOKS[name]
    async with app_for(made(tmp_path, "r00003-step000005.pickle", make())).run_test(size=size) as pilot:
        await settled(pilot)
        await press(pilot, *keys)
        check(f"{name}-{size[0]}x{size[1]}", text_of(pilot.app))


@pinned
@pytest.mark.parametrize("name", ["snapshot", "snapshot-segments"])
async def test_looks_without_colour(
    name: str, tmp_path: Path, text_of: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    make, keys = LOOKS[name]
    async with app_for(made(tmp_path, "r00003-step000005.pickle", make())).run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await press(pilot, *keys)
        check(f"{name}-80x24-no-colour", text_of(pilot.app))
        for strip in pilot.app.screen._compositor.render_strips():
            for segment in strip:
                style = segment.style
                assert style is None or style.color is None or style.color.is_default
                assert style is None or style.bgcolor is None or style.bgcolor.is_default
