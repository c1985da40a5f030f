"""Every genuine history of the corpus replays exactly, whole and from random rows on.

The files are not part of the repository. `OOMSCOPE_CORPUS` names their folder (with manifest.json); by default
`../shared/corpus`.
"""

from __future__ import annotations

import json
import os
import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.verify import verify
from oomscope.core.allocator.whatif import assess
from oomscope.core.snapshot.model import Snapshot
from oomscope.store.snapshots import load_snapshot

ROOT = Path(__file__).resolve().parents[2]
CORPUS = Path(os.environ.get("OOMSCOPE_CORPUS", ROOT.parent / "shared" / "corpus"))
MANIFEST = CORPUS / "manifest.json"
CUTS = 20

pytestmark = pytest.mark.skipif(
    not MANIFEST.is_file(),
    reason=f"no corpus at {CORPUS} (set OOMSCOPE_CORPUS to a folder with manifest.json)",
)
ENTRIES: list[dict[str, Any]] = json.loads(MANIFEST.read_text()) if MANIFEST.is_file() else []
#: c68 was cut by hand and published so.
CUT = "c68-tx-trace-cpp.pickle"
GENUINE = [
    entry["file"]
    for entry in ENTRIES
    if max(entry["events_per_device"] or [0]) > 2 and not entry["synthetic"] and entry["file"] != CUT
]


@cache
def load(name: str) -> Snapshot:
    return load_snapshot(CORPUS / name)


@pytest.mark.parametrize("name", GENUINE)
def test_whole(name: str) -> None:
    snapshot = load(name)
    found = [verify(snapshot, device) for device in snapshot.devices]
    assert any(each.exact for each in found)
    for each in found:
        assert each.exact is not False, each.to_json()["first_divergence"]


@pytest.mark.parametrize("name", GENUINE)
def test_from_random_rows_on(name: str) -> None:
    rng = random.Random(name)
    snapshot = load(name)
    for device in snapshot.devices:
        if len(device.events) < 10:
            continue
        for _ in range(CUTS):
            start = rng.randrange(1, len(device.events) - 5)
            found = verify(snapshot, device, start=start)
            assert found.exact, (start, found.to_json()["first_divergence"])


@pytest.mark.parametrize("name", GENUINE)
def test_without_its_settings(name: str) -> None:
    snapshot = load(name)
    stripped = Snapshot(
        name, snapshot.devices, snapshot.stacks, snapshot.streams, snapshot.pools, snapshot.texts
    )
    for device in snapshot.devices:
        if len(device.events) < 3:
            continue
        recorded, inferred = verify(snapshot, device), verify(stripped, device)
        assert inferred.exact
        assert inferred.config.expandable_segments == recorded.config.expandable_segments
        assert inferred.config.max_split_size == recorded.config.max_split_size


@pytest.mark.parametrize(
    "conf", ["roundup_power2_divisions:4", "max_split_size_mb:20", "large_segment_size_mb:40"]
)
def test_wrong_settings_diverge(conf: str) -> None:
    snapshot = load("c57-t2.6-trace-cpp-annot.pickle")
    found = verify(snapshot, snapshot.devices[0], config=AllocatorConfig.parse(conf))
    assert found.exact is False


@pytest.mark.parametrize("name", [entry["file"] for entry in ENTRIES if entry["synthetic"]] + [CUT])
def test_made_up_and_cut_files_are_recognised(name: str) -> None:
    snapshot = load(name)
    (found,) = [each for each in (verify(snapshot, d) for d in snapshot.devices) if each.exact is not None]
    assert found.exact is False
    assert "made up" in (found.meaning or "")


def test_peak_reserved_misleads() -> None:
    """The example of the documentation: the setting with the lower peak needs the larger device."""
    snapshot = load("c57-t2.6-trace-cpp-annot.pickle")
    found = assess(snapshot, snapshot.devices[0], configs=[AllocatorConfig.parse("expandable_segments:True")])
    default, expandable = found.configs
    assert default.min_capacity_bytes is not None
    assert expandable.min_capacity_bytes is not None
    assert expandable.peak_reserved_bytes[1] < default.peak_reserved_bytes[0]
    assert expandable.min_capacity_bytes[0] > default.min_capacity_bytes[1]
    assert default.peak_reserved_bytes[0] == snapshot_peak(snapshot)


def snapshot_peak(snapshot: Snapshot) -> int:
    replayed = verify(snapshot, snapshot.devices[0]).replay
    assert replayed is not None
    return replayed.capacity_low
