"""The table of fixes in the report of a run."""

from __future__ import annotations

from typing import Any

from oomscope.report.run import fix_lines, proof_lines
from oomscope.views import compare
from oomscope.views import fixes as view

GIB = 1 << 30


def entry(name: str, **others: Any) -> dict[str, Any]:
    return {"id": name, "title": name, "risk": "exact", "applicable": True, "effective": True, **others}


def predicted(peak: float, high: float, *, fits: bool | None, tight: bool = False) -> dict[str, Any]:
    return {
        "peak_reserved_bytes": int(peak * GIB), "low_bytes": int(peak * GIB), "high_bytes": int(high * GIB),
        "time_factor": 1.0, "next_peak_phase": None, "fits": fits, "tight": tight, "basis": "test",
    }  # fmt: skip


def lines(*entries: dict[str, Any]) -> list[str]:
    return fix_lines(view.read({"capacity_bytes": 39 * GIB, "fixes": list(entries)}))


def row_of(name: str, found: list[str]) -> str:
    return next(line for line in found if line.split()[:1] == [name])


def test_an_interval_that_reaches_above_the_card_is_no_plain_yes() -> None:
    found = lines(
        entry("roomy", predicted=predicted(12, 13, fits=True)),
        entry("close", predicted=predicted(38, 44, fits=True, tight=True)),
        entry("over", predicted=predicted(57, 60, fits=False)),
        entry("open", predicted=predicted(39, 40, fits=None)),
    )
    assert " yes " in row_of("roomy", found)
    assert " tight " in row_of("close", found)
    assert " no " in row_of("over", found)
    assert " unknown " in row_of("open", found)


def test_what_was_not_predicted_is_named_with_the_reason_once() -> None:
    reason = "not tried: fixes that cost less are enough"
    found = "\n".join(lines(entry("slow", unpredicted=reason), entry("slower", unpredicted=reason)))
    assert "not predicted:" in found
    assert f"slow, slower: {reason}" in found


def test_the_sentence_of_a_tight_fix_says_so() -> None:
    fixes = view.read({"fixes": [entry("close", predicted=predicted(38, 44, fits=True, tight=True))]})
    assert "fits, but the upper end of the interval does not" in view.sentences(fixes)[0]


def test_the_proof_of_a_job_without_a_gpu_shows_its_host_memory() -> None:
    result = {"exit_code": 0, "ranks": [{"peak_rss_bytes": 512 << 20}]}
    row = compare.attempt_row(2, {"fixes": ["ckpt"]}, result, predicted=None, simulated=False)
    text = "\n".join(proof_lines(row, {"loss": "equal"}))
    assert "peak host memory" in text
    assert "512.00 MiB" in text
    assert "reserved" not in text
