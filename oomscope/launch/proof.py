"""Reads two attempts and the stored prediction from the session folder, and compares them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from oomscope.core.fixes.proof import AttemptNumbers, Fingerprint
from oomscope.core.fixes.proof import prove as compare
from oomscope.launch.predict_catalogue import catalogue
from oomscope.launch.predict_facts import records_of_rank
from oomscope.protocol import layout
from oomscope.store.files import read_json


def prove(before: Path, after: Path) -> dict[str, Any]:
    """The proof of the attempt in `after` against the one in `before`; see `oomscope.core.fixes.proof`."""
    info = read_json(after / layout.ATTEMPT_FILE) or {}
    ids = tuple(str(each) for each in info.get("fixes") or ())
    fixes = [fix for fix in catalogue() if fix.id in ids]
    return compare(numbers_of(before), numbers_of(after), fixes, _predicted(before, ids))


def numbers_of(folder: Path) -> AttemptNumbers:
    """What is compared of the attempt in `folder`: the rank that failed, else the one with the highest peak."""
    records = records_of_rank(folder)
    result = read_json(folder / layout.RESULT_FILE) or {}
    ranks = result.get("ranks") or ()
    steps = [record for record in records if record.get("k") == "step"]
    place = next((record for record in reversed(records) if record.get("k") == "rank"), {})
    return AttemptNumbers(
        losses=[float(record["loss"]) for record in steps if isinstance(record.get("loss"), (int, float))],
        durations_ns=[int(record["duration_ns"]) for record in steps if record.get("duration_ns")],
        fingerprints=_fingerprints(records),
        steps=len(steps),
        exit_code=result.get("exit_code"),
        oom=bool(result.get("oom")),
        peak_reserved_bytes=_highest(ranks, "peak_reserved_bytes"),
        capacity_bytes=_highest(ranks, "capacity_bytes"),
        simulated=bool(place.get("simulated")),
        fixes={str(r["id"]): str(r.get("state")) for r in records if r.get("k") == "fix" and r.get("id")},
    )


def _highest(ranks: Any, key: str) -> int | None:
    return max((int(rank[key]) for rank in ranks if rank.get(key) is not None), default=None)


def _fingerprints(records: list[Mapping[str, Any]]) -> dict[int, Fingerprint]:
    return {
        int(record["step"]): Fingerprint(
            tuple(float(rate) for rate in record.get("learning_rates") or ()),
            record.get("buffers"),
            record.get("parameters"),
        )
        for record in records
        if record.get("k") == "fingerprint" and record.get("step") is not None
    }


def _predicted(before: Path, ids: tuple[str, ...]) -> Mapping[str, Any] | None:
    """The prediction for `ids` as it was stored before the rerun."""
    fixes = read_json(before / layout.FIXES_FILE) or {}
    for plan in fixes.get("plans") or ():
        if set(plan.get("fixes") or ()) == set(ids):
            found: Mapping[str, Any] | None = plan.get("predicted")
            return found
    if len(ids) == 1:
        for fix in fixes.get("fixes") or ():
            if fix.get("id") == ids[0]:
                single: Mapping[str, Any] | None = fix.get("predicted")
                return single
    return None
