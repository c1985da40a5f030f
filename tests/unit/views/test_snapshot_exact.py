"""Exact segments at a moment, and what stood in the way of a request that failed."""

from __future__ import annotations

from pathlib import Path

import pytest

from oomscope.core.allocator.measures import at_oom
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.synth import SyntheticProcess, to_bytes
from oomscope.core.allocator.synth_workloads import fragmented_oom, training
from oomscope.core.snapshot.analysis import DeviceAnalysis, analyse
from oomscope.core.snapshot.columns import Action
from oomscope.store.snapshots import load_snapshot
from oomscope.units import MIB
from oomscope.views import snapshot_exact
from oomscope.views.snapshot_exact import UNDER_WAY, ExactReplay, picture_of
from oomscope.views.snapshot_headline import snapshot_alert


def analysed(folder: Path, process: SyntheticProcess, *, first_row: int = 0) -> DeviceAnalysis:
    raw = process.snapshot()
    raw["device_traces"] = [rows[first_row:] for rows in raw["device_traces"]]
    path = folder / "a.pickle"
    path.write_bytes(to_bytes(raw))
    return analyse(load_snapshot(path))[0]


@pytest.fixture
def trained(tmp_path: Path) -> DeviceAnalysis:
    process = SyntheticProcess(AllocatorConfig(), capacity=4096 * MIB)
    training(process, layers=3, steps=2, activation_bytes=3 * MIB + 700)
    return analysed(tmp_path, process)


@pytest.fixture
def failed(tmp_path: Path) -> DeviceAnalysis:
    process = SyntheticProcess(AllocatorConfig(), capacity=12 * 42 * MIB)
    fragmented_oom(process)
    return analysed(tmp_path, process)


def test_every_moment_has_the_sizes_of_the_replay(trained: DeviceAnalysis) -> None:
    exact = ExactReplay(trained)
    assert exact.is_exact
    rounded = False
    for row in range(-1, len(trained.device.events)):
        found = picture_of(trained, row, exact)
        blocks = [b for segment in exact.blocks(row) for b in segment.blocks if b.state != "inactive"]
        assert found.is_exact
        shown = found.block_bytes[found.at.segment >= 0]
        assert sorted(shown.tolist()) == sorted(block.size for block in blocks)
        if (
            row < 0 or trained.device.events.action[row] == Action.ALLOC
        ):  # not between a segment and its block
            assert int(found.at.size.sum()) == trained.reserved.at(row)
        # Between the two rows of one free the replay has freed already what the history still counts.
        assert len(found.at.segment) - len(shown) <= 1
        rounded = rounded or int(shown.sum()) > trained.live.at(row)
    assert rounded


def test_last_moment_is_the_final_blocks(trained: DeviceAnalysis) -> None:
    found = picture_of(trained, len(trained.device.events) - 1, ExactReplay(trained))
    blocks = trained.device.blocks
    at = trained.lives.block[found.at.allocation]
    assert found.block_bytes.tolist() == blocks.size[at].tolist()


def test_requested_sizes_until_the_replay_is_there(trained: DeviceAnalysis) -> None:
    row = trained.peak[1]
    found = picture_of(trained, row, None)
    assert (found.is_exact, found.note) == (False, UNDER_WAY)
    assert int(found.block_bytes.sum()) == trained.live.at(row)


def test_history_that_is_not_reproduced_keeps_requested_sizes(tmp_path: Path) -> None:
    process = SyntheticProcess(AllocatorConfig(), capacity=4096 * MIB)
    training(process, layers=3, steps=2)
    raw = process.snapshot()
    rows = raw["device_traces"][0]
    moved = next(row for row in rows if row["action"] == "alloc" and row["size"] > 20 * MIB)
    for row in rows:
        if row["addr"] == moved["addr"] and row["action"] != "segment_alloc":
            row["addr"] += 512
    path = tmp_path / "a.pickle"
    path.write_bytes(to_bytes(raw))
    analysis = analyse(load_snapshot(path))[0]
    exact = ExactReplay(analysis)
    found = picture_of(analysis, analysis.peak[1], exact)
    assert not exact.is_exact
    assert not found.is_exact
    assert found.note.startswith("requested sizes: the replay")


def test_what_stood_in_the_way_is_the_autopsy(failed: DeviceAnalysis) -> None:
    row = failed.ooms[-1].event_index
    exact = ExactReplay(failed)
    found = picture_of(failed, row - 1, exact)
    measured = at_oom(failed.snapshot, failed.device)
    assert measured is not None
    assert measured.autopsy is not None
    assert found.failure is not None
    assert found.failure.found == measured.autopsy
    assert found.failure.lacking_bytes == measured.shortfall0_bytes
    addresses = failed.lives.address[list(found.in_the_way)].tolist()
    assert sorted(addresses) == sorted(block.address for block in measured.autopsy.blocks)
    assert picture_of(failed, row - 2, exact).failure is None


def test_alert_says_how_many_bytes_stood_in_the_way(failed: DeviceAnalysis) -> None:
    failure = ExactReplay(failed).last_failure
    assert failure is not None
    text = snapshot_alert(failed, failure).text
    assert "1 block, 22.00 MiB, stands in the way of 60.00 MiB" in text
    assert "stands" not in snapshot_alert(failed).text


def test_long_history_is_replayed_from_its_last_rows(
    trained: DeviceAnalysis, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(snapshot_exact, "MAX_ROWS", 40)
    exact = ExactReplay(trained)
    assert exact.start == len(trained.device.events) - 40
    if exact.is_exact:
        assert picture_of(trained, exact.start + 5, exact).is_exact
    early = picture_of(trained, exact.start - 2, exact)
    assert not early.is_exact
    assert "requested sizes" in early.note
