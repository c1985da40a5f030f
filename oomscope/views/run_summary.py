"""A session as the `oomscope.run/1` object: attempts, peaks, verdicts, predictions and proofs.

Everything is read from the session folder, so the object is the same whether it is made by the loop that wrote the
folder or weeks later. `oomscope/schemas/run.1.json` describes it; keys may be added, never renamed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from oomscope.protocol import layout
from oomscope.store.files import read_json

SCHEMA = "oomscope.run/1"

_RANK_KEYS = (
    "rank",
    "steps",
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "peak_reserved_low_bytes",
    "peak_reserved_high_bytes",
    "capacity_bytes",
    "peak_rss_bytes",
    "peak_phase",
    "peak_composition",
    "assumed_values",
    "unsupported",
)


def run_object(
    session: Path, *, exit_code: int | None, refused: Sequence[Mapping[str, str]] = ()
) -> dict[str, Any]:
    """The `oomscope.run/1` object of the session folder `session`."""
    folders = sorted(each for each in (session / layout.ATTEMPTS_DIR).glob("*") if each.is_dir())
    return {
        "schema": SCHEMA,
        "session": str(session),
        "exit_code": exit_code,
        "attempts": [attempt_object(folder) for folder in folders],
        "refused": [dict(each) for each in refused],
    }


def attempt_object(folder: Path) -> dict[str, Any]:
    """One attempt: what it ran with, what each rank reached, why it failed and what was predicted from it."""
    attempt = read_json(folder / layout.ATTEMPT_FILE) or {}
    result = read_json(folder / layout.RESULT_FILE) or {}
    findings = read_json(folder / layout.FINDINGS_FILE) or {}
    fixes = read_json(folder / layout.FIXES_FILE) or {}
    return {
        "attempt": int(folder.name),
        "oom": bool(result.get("oom")),
        "exit_code": result.get("exit_code"),
        "first_failing_rank": result.get("first_failing_rank"),
        "fixes": list(attempt.get("fixes") or ()),
        "world_size": world_size(result),
        "ranks": [{key: rank.get(key) for key in _RANK_KEYS} for rank in result.get("ranks") or ()],
        "verdict": _verdict(findings),
        "predictions": _predictions(fixes),
        "proof": read_json(folder / layout.PROOF_FILE),
    }


def world_size(result: Mapping[str, Any]) -> int | None:
    """How many ranks the job has, of which `ranks` may be a choice; None when none reported."""
    sizes = [int(rank.get("world_size") or 1) for rank in result.get("ranks") or ()]
    return max(sizes, default=None)


def _verdict(findings: Mapping[str, Any]) -> dict[str, Any] | None:
    verdicts = findings.get("verdicts") or ()
    if not verdicts:
        return None
    first = verdicts[0]
    return {key: first.get(key) for key in ("rule", "confidence", "title", "where")}


def _predictions(fixes: Mapping[str, Any]) -> list[dict[str, Any]]:
    """One entry per fix that has a prediction, then one per plan; the numbers stood on disk before the rerun."""
    rows = [
        ([fix["id"]], fix["predicted"], fix["predicted"].get("fits"))
        for fix in fixes.get("fixes") or ()
        if fix.get("predicted")
    ]
    rows += [
        (list(plan["fixes"]), plan["predicted"], plan.get("fits"))
        for plan in fixes.get("plans") or ()
        if plan.get("predicted") and len(plan["fixes"]) > 1
    ]
    return [
        {
            "fixes": ids,
            "peak_reserved_bytes": predicted["peak_reserved_bytes"],
            "low_bytes": predicted["low_bytes"],
            "high_bytes": predicted["high_bytes"],
            "fits": fits,
        }
        for ids, predicted, fits in rows
    ]
