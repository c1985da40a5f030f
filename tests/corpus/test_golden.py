"""Real snapshot files with golden numbers that another program computed.

The files are not part of the repository. `OOMSCOPE_CORPUS` names their folder (with manifest.json), which is
`../shared/corpus` by default.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from oomscope.core.snapshot.analysis import DeviceAnalysis, analyse
from oomscope.core.snapshot.columns import BlockState
from oomscope.core.snapshot.history import History
from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.core.snapshot.scan import Unscannable, scan
from oomscope.core.snapshot.scanned_rows import ScannedRows
from oomscope.errors import SnapshotError
from oomscope.store._snapshot_child import forgetting, reference_of, unpickle
from oomscope.store.snapshots import Limits, SnapshotLoader

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(os.environ.get("OOMSCOPE_CORPUS", ROOT.parent / "shared" / "corpus"))
MANIFEST = CORPUS / "manifest.json"

pytestmark = pytest.mark.skipif(
    not MANIFEST.is_file(),
    reason=f"no corpus at {CORPUS} (set OOMSCOPE_CORPUS to a folder with manifest.json)",
)
ENTRIES: list[dict[str, Any]] = json.loads(MANIFEST.read_text()) if MANIFEST.is_file() else []
REAL = [entry for entry in ENTRIES if entry["devices"]]


def name_of(entry: dict[str, Any]) -> str:
    return (
        str(entry["file"]).split("-")[0]
        if not entry["file"].startswith("protocol")
        else entry["file"].split(".")[0]
    )


@pytest.fixture(scope="module")
def loader() -> Iterator[SnapshotLoader]:
    with SnapshotLoader() as shared:
        yield shared


_loaded: dict[str, Snapshot] = {}


def load(loader: SnapshotLoader, entry: dict[str, Any]) -> Snapshot:
    name = entry["file"]
    if name not in _loaded:
        _loaded[name] = loader.load(CORPUS / name)
    return _loaded[name]


def golden_names(analysis: DeviceAnalysis) -> dict[str, int]:
    totals = analysis.totals
    return {
        "segments": totals.segments,
        "blocks": totals.blocks,
        "reserved": totals.reserved,
        "allocated": totals.allocated,
        "active": totals.active,
        "requested": totals.requested,
        "inactive": totals.inactive,
        "largest_inactive": totals.largest_inactive,
        "pending_free": totals.pending_free,
        "wholly_free_segments": totals.whole_free_segments,
        "wholly_free_bytes": totals.whole_free,
        "trace_events": len(analysis.device.events),
        "baseline_requested": analysis.live.before,
        "peak_requested": analysis.peak[0],
        "peak_event_index": analysis.peak[1],
        "reserved_baseline": analysis.reserved.before,
        "reserved_peak": analysis.reserved.peak()[0],
    }


@pytest.mark.parametrize("entry", REAL, ids=name_of)
def test_golden_numbers(loader: SnapshotLoader, entry: dict[str, Any]) -> None:
    analyses = analyse(load(loader, entry))
    for device, golden in entry["devices"].items():
        found = golden_names(analyses[int(device)])
        assert {key: found[key] for key in golden} == golden


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_shape_and_version(loader: SnapshotLoader, entry: dict[str, Any]) -> None:
    snapshot = load(loader, entry)
    assert snapshot.torch_version == entry["torch"]
    assert [len(each.events) for each in snapshot.devices][: len(entry["events_per_device"])] == entry[
        "events_per_device"
    ]
    assert sum(len(each.segments) for each in snapshot.devices) == entry["segments"]
    assert sum(len(each.blocks) for each in snapshot.devices) == entry["blocks"]
    ooms = [oom.event_index for each in analyse(snapshot) for oom in each.ooms]
    assert len(ooms) == len(entry["oom_events"])


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_violations_are_warnings(loader: SnapshotLoader, entry: dict[str, Any]) -> None:
    codes = {each.code for each in load(loader, entry).warnings}
    assert codes == ({"segment-sum"} if entry["synthetic"] else set())


@pytest.mark.parametrize("entry", REAL, ids=name_of)
def test_live_set_at_the_end_is_the_final_blocks(loader: SnapshotLoader, entry: dict[str, Any]) -> None:
    for analysis in analyse(load(loader, entry)):
        if analysis.history is History.CUT:
            continue
        lives, blocks = analysis.lives, analysis.device.blocks
        alive = lives.death >= lives.n_events
        used = blocks.state != BlockState.INACTIVE
        found = sorted(zip(lives.address[alive].tolist(), lives.size[alive].tolist(), strict=True))
        assert found == sorted(
            zip(blocks.address[used].tolist(), blocks.requested_size[used].tolist(), strict=True)
        )
        for row in (analysis.focus.row, len(analysis.device.events) - 1):
            assert int(lives.size[analysis.alive(row)].sum()) == analysis.live.at(row)


@pytest.mark.parametrize("entry", REAL, ids=name_of)
def test_segments_undone_to_the_start_match_the_reserved_curve(
    loader: SnapshotLoader, entry: dict[str, Any]
) -> None:
    for analysis in analyse(load(loader, entry)):
        if analysis.history is not History.CUT:
            rows = {-1, 0, analysis.peak[1], len(analysis.device.events) - 1}
            for row in rows:
                assert int(analysis.segments_at(row).size.sum()) == analysis.reserved.at(row)


@pytest.mark.parametrize("entry", ENTRIES, ids=name_of)
def test_scanning_and_unpickling_agree(entry: dict[str, Any]) -> None:
    data = (CORPUS / entry["file"]).read_bytes()
    try:
        found = scan(memoryview(data), reference_of, forgetting(data))
    except Unscannable:
        assert sum(entry["events_per_device"]) < 2000 or data[1] < 4
        return
    rows = sum(len(run.values[0]) for run in found.runs)
    assert rows > 0.9 * sum(entry["events_per_device"]) or rows < 2000
    rest, objects = unpickle(found.rest)  # type: ignore[misc]
    one, other = parse_snapshot(rest, runs=ScannedRows(found, objects)), parse_snapshot(unpickle(data))
    for a, b in zip(one.devices, other.devices, strict=True):
        for name in ("action", "address", "size", "time_us"):
            assert np.array_equal(getattr(a.events, name), getattr(b.events, name)), name
        strings = {n: tuple(map(str, one.stacks[n])) for n in set(a.events.stack.tolist())}
        others = {n: tuple(map(str, other.stacks[n])) for n in set(b.events.stack.tolist())}
        pairs = zip(a.events.stack.tolist(), b.events.stack.tolist(), strict=True)
        assert all(strings[x] == others[y] for x, y in pairs)


def test_all_protocols_of_one_file_are_the_same(loader: SnapshotLoader) -> None:
    copies = sorted(CORPUS.glob("protocol*-of-c76.pickle"))
    original = loader.load(CORPUS / "c76-tx-trace-cpp.pickle")
    assert copies
    for path in copies:
        found = loader.load(path)
        assert found.devices[0].events.size.tolist() == original.devices[0].events.size.tolist()
        assert golden_names(analyse(found)[0]) == golden_names(analyse(original)[0])


@pytest.mark.slow
def test_five_thousand_mutated_copies(tmp_path: Path) -> None:
    """Damaged real files end in a snapshot or in one clear error; the loader outlives them all."""
    rng = random.Random(7)
    originals = [
        path.read_bytes() for path in sorted(CORPUS.glob("*.pickle")) if path.stat().st_size < 120_000
    ]
    path = tmp_path / "a.pickle"
    outcomes = {"read": 0, "refused": 0}
    with SnapshotLoader(limits=Limits(memory_bytes=1 << 29, seconds=20)) as loader:
        for number in range(5_000):
            data = bytearray(originals[number % len(originals)])
            for _ in range(rng.choice((1, 2, 8, 64))):
                place = rng.randrange(len(data))
                data[place : place + rng.choice((0, 1, 1, 4))] = rng.randbytes(rng.choice((0, 1, 1, 4)))
            path.write_bytes(data[: rng.randrange(1, len(data))] if number % 10 == 0 else data)
            try:
                snapshot = loader.load(path)
            except SnapshotError as error:
                outcomes["refused"] += bool(error.message)
            else:
                outcomes["read"] += 1
                analyse(snapshot)
    assert sum(outcomes.values()) == 5_000
    assert min(outcomes.values()) > 100
