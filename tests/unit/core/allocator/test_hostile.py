"""Damaged files: whatever the rows say, the gate answers yes or no."""

from __future__ import annotations

import copy
import pickle
import random
from functools import cache
from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from oomscope.core.allocator.measures import at_oom
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import random_stream, shortage_oom, training
from oomscope.core.allocator.verify import verify
from oomscope.core.allocator.whatif import assess
from oomscope.core.snapshot.parse import parse_snapshot
from oomscope.errors import SnapshotError
from oomscope.units import GIB, MIB

ACTIONS = (
    "alloc", "free_requested", "free_completed", "segment_alloc", "segment_free", "segment_map", "segment_unmap",
    "oom", "snapshot", "something_new",
)  # fmt: skip
NUMBERS = (0, -1, 1, 511, 512, 513, 2 * MIB, 20 * MIB, 1 << 47, 1 << 48, (1 << 62) + 3, -(1 << 62))


@cache
def _snapshots() -> tuple[dict[str, Any], ...]:
    made = []
    for conf in ("", "expandable_segments:True", "max_split_size_mb:64"):
        for version in ((2, 4), (2, 13)):
            process = SyntheticProcess(conf, capacity=1500 * MIB, total_bytes=4 * GIB, torch_version=version)
            random_stream(process, 3, requests=60, pools=[(0, 0), (3, 0)])
            training(process, layers=2, steps=1, activation_bytes=8 * MIB)
            shortage_oom(process)
            made.append(process.snapshot())
    return tuple(made)


def _damage(raw: dict[str, Any], rng: random.Random) -> None:
    """One random change to the rows or to the final state."""
    rows, segments = raw["device_traces"][0], raw["segments"]
    kind = rng.randrange(9)
    if kind == 0 and rows:
        del rows[rng.randrange(len(rows))]
    elif kind == 1 and rows:
        rows.insert(rng.randrange(len(rows)), dict(rng.choice(rows)))
    elif kind == 2 and rows:
        rng.choice(rows)["action"] = rng.choice(ACTIONS)
    elif kind == 3 and rows:
        rng.choice(rows)[rng.choice(("addr", "size", "stream"))] = rng.choice(NUMBERS)
    elif kind == 4 and rows:
        rng.choice(rows).pop("frames", None)
    elif kind == 5 and segments:
        rng.choice(segments)[rng.choice(("address", "stream", "total_size"))] = rng.choice(NUMBERS)
    elif kind == 6 and segments:
        block = rng.choice(rng.choice(segments)["blocks"])
        block[rng.choice(("size", "requested_size", "address"))] = rng.choice(NUMBERS)
    elif kind == 7 and segments:
        rng.choice(segments)["is_expandable"] = rng.random() < 0.5
    elif segments:
        rng.choice(rng.choice(segments)["blocks"])["state"] = rng.choice(
            ("inactive", "active_allocated", "odd")
        )


@settings(max_examples=150, deadline=None)
@given(st.integers(0, 5), st.integers(0, 1 << 30), st.integers(1, 6))
def test_damaged_rows_never_crash(which: int, seed: int, changes: int) -> None:
    rng = random.Random(seed)
    raw = copy.deepcopy(_snapshots()[which])
    for _ in range(changes):
        _damage(raw, rng)
    try:
        snapshot = parse_snapshot(raw)
    except SnapshotError:
        return
    for device in snapshot.devices:
        found = verify(snapshot, device)
        assert found.exact in (True, False, None)
        assert (found.meaning is None) == (found.exact is not False)
        found.to_json()
        at_oom(snapshot, device, verification=found)
        assess(snapshot, device, verification=found, time_budget_s=0.0)


def test_an_answer_can_come_from_another_process() -> None:
    process = SyntheticProcess(capacity=500 * MIB)
    shortage_oom(process)
    snapshot = parse_snapshot(process.snapshot())
    again = pickle.loads(pickle.dumps(snapshot))
    found = assess(again, again.devices[0])
    assert pickle.loads(pickle.dumps(found)).to_json() == found.to_json()
    measures = at_oom(again, again.devices[0])
    assert pickle.loads(pickle.dumps(measures)) == measures
