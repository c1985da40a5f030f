# ruff: noqa: E501
"""The public reports with established causes: how many are decided, and that none is confidently wrong."""

import importlib.util
from pathlib import Path

PATH = Path(__file__).parents[4] / "benchmarks" / "diagnosis.py"
SPEC = importlib.util.spec_from_file_location("benchmarks_diagnosis", PATH)
assert SPEC is not None
assert SPEC.loader is not None
BENCHMARK = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(BENCHMARK)


def test_reports_are_decided_and_none_is_confidently_wrong(cases, capsys):
    rows = cases("reports.jsonl")
    counts = BENCHMARK.judge([row for row in rows if not row["repro"]], everything=True, details=True)
    assert counts["right"] >= 0.6 * sum(counts[k] for k in ("right", "secondary", "wrong", "unknown"))
    assert counts["confidently wrong"] == 0
    assert counts["wrong"] <= 2


def test_facts_alone_are_never_confidently_wrong(cases, capsys):
    counts = BENCHMARK.judge(cases("reports.jsonl"), everything=False, details=False)
    assert counts["confidently wrong"] == 0
    assert counts["wrong"] <= 5
    assert counts["right"] >= 0.45 * sum(counts[k] for k in ("right", "secondary", "wrong", "unknown"))


def test_of_the_reports_that_state_any_fact_most_are_decided(cases, capsys):
    rows = [row for row in cases("reports.jsonl") if not row["repro"]]
    told = [row for row in rows if row["facts"] not in ("-", None) or row.get("oom_fields")]
    counts = BENCHMARK.judge(told, everything=False, details=True)
    assert counts["right"] >= 0.6 * len(told)
    assert counts["wrong"] <= 2
    assert counts["confidently wrong"] == 0


def test_a_report_of_ones_own(capsys):
    row = {
        "id": "X1", "root_cause_class": "ckpt_full_gather", "facts": "FSDP", "symptom": "OOM while saving", "when": "phase_save",
        "oom_fields": {"tried": 1.0, "total": 24.0, "alloc": 22.0, "free": 0.1, "reserved": 22.2}, "repro": False,
    }  # fmt: skip
    counts = BENCHMARK.judge([row, {**row, "root_cause_class": "ref_cycle"}], everything=True, details=True)
    assert (counts["right"], counts["wrong"]) == (1, 1)
    assert "ref_cycle" in capsys.readouterr().out
