"""Views of findings.json, fixes.json and result.json: honest words, and no trust in the files."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import recorded_sessions as recorded

from oomscope.views import coerce, compare, composition, diagnosis, events, fixes, wording

GIB = 1 << 30

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
FINDING_KEYS = (
    "subject",
    "verdicts",
    "flow",
    "messages",
    "evidence",
    "missing",
    "where",
    "node",
    "parent",
    "text",
    "line",
)
FIX_KEYS = (
    "fixes",
    "plans",
    "recommended",
    "predicted",
    "preview",
    "id",
    "peak_reserved_bytes",
    "env",
    "argv",
    "conflicts",
)


def objects(keys: tuple[str, ...]) -> st.SearchStrategy[Any]:
    """Objects that look right from afar: known keys, any values."""
    return st.recursive(
        json_values,
        lambda inner: st.dictionaries(st.sampled_from(keys), inner | st.lists(inner, max_size=3), max_size=6),
        max_leaves=20,
    ).filter(lambda value: isinstance(value, dict))


@given(objects(FINDING_KEYS))
def test_any_findings_can_be_shown(data: dict[str, Any]) -> None:
    found = diagnosis.read(data)
    assert all(isinstance(line, str) for line in diagnosis.sentences(found))


@given(objects(FIX_KEYS))
def test_any_fixes_can_be_shown(data: dict[str, Any]) -> None:
    found = fixes.read(data)
    fixes.sentences(found)
    ids = [row.id for row in found.rows]
    fixes.bars(found, ids[:2])
    fixes.preview(found, ids, ["python"])


@given(
    objects(
        ("ranks", "losses", "exit_code", "fixes", "plan", "command", "composition", "modules", "category")
    )
)
def test_any_attempt_can_be_shown(data: dict[str, Any]) -> None:
    compare.sentence(compare.attempt_row(1, data, data))
    composition.read(data)
    events.supervisor_lines([data])


@given(st.text())
def test_cleaned_text_has_no_control_characters(raw: str) -> None:
    for char in coerce.clean(raw):
        assert char == "\n" or (ord(char) >= 32 and not 0x7F <= ord(char) < 0xA0)


def test_escape_sequences_go_with_their_arguments() -> None:
    assert coerce.clean("a\x1b[31mred\x1b[0m \x1b]0;title\x07b\x1b]8;;http://x\x1b\\c") == "ared bc"


# -- diagnosis -----------------------------------------------------------------------------------


def test_verdict_and_path() -> None:
    found = diagnosis.read(recorded.findings())
    verdict = found.verdict
    assert verdict is not None
    assert (
        verdict.headline() == "oom.capacity_activations: Activations exceed the card (confidence high 0.93)"
    )
    assert found.what_happened() == "rank 0 · step 0 · backward · tried 768 MiB, free 430 MiB"
    assert [node.name for node in found.flow if node.on_path] == ["G0", "Q1", "Q1.4"]
    assert {node.name: node.depth for node in found.flow}["Q1.4"] == 1


def test_acronyms_keep_their_capitals_inside_a_sentence() -> None:
    data = {"verdicts": [{"rule": "oom.x", "title": "NCCL cannot get memory"}]}
    verdict = diagnosis.read(data).verdict
    assert verdict is not None
    assert verdict.clause() == "NCCL cannot get memory"


def test_source_context_is_shown_only_when_the_file_is_the_recorded_one(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("a = 1\nlosses = []\nlosses.append(loss)\nb = 2\n")
    place = diagnosis.Place(str(script), 3, "main", "losses.append(loss)")
    assert [line.number for line in diagnosis.source_lines(place, context=1)] == [2, 3, 4]
    script.write_text("something else\n" * 5)
    assert diagnosis.source_lines(place) == (diagnosis.SourceLine(3, "losses.append(loss)", True),)
    script.unlink()
    assert [line.text for line in diagnosis.source_lines(place)] == ["losses.append(loss)"]
    assert diagnosis.source_lines(diagnosis.Place("/nowhere", 1, "", "")) == ()


# -- fixes ---------------------------------------------------------------------------------------


def test_order_recommended_fitting_ineffective_inapplicable() -> None:
    found = fixes.read(recorded.fixes())
    assert [row.id for row in found.rows] == [
        "ckpt", "micro-batch", "amp-bf16", "expandable", "fused-optimizer", "grad-bucket-view", "fsdp2",
    ]  # fmt: skip


def test_combination_has_a_prediction_only_when_it_was_predicted() -> None:
    found = fixes.read(recorded.fixes())
    together = found.predicted_for(["amp-bf16", "ckpt"])
    assert together is not None
    assert together.peak_bytes == int(9.8 * GIB)
    assert found.predicted_for(["ckpt", "micro-batch"]) is None
    assert fixes.bars(found, ["ckpt", "micro-batch"])[1].startswith("these fixes were not predicted together")


def test_more_than_the_card_holds_is_needed_not_reached() -> None:
    bars, _ = fixes.bars(fixes.read(recorded.fixes()), [])
    assert [(bar.label, bar.kind) for bar in bars] == [("before", "needed")]
    data = {**recorded.fixes(), "peak_reserved_bytes": 30 * GIB}
    assert fixes.bars(fixes.read(data), [])[0][0].kind == "reached"


def test_conflicting_fixes_are_named() -> None:
    data = recorded.fixes()
    data["fixes"][1]["conflicts"] = ["amp-bf16"]
    found = fixes.read(data)
    assert fixes.bars(found, ["ckpt", "amp-bf16"])[1] == "ckpt and amp-bf16 exclude each other"


def test_preview_shows_environment_command_and_diff() -> None:
    found = fixes.read(recorded.fixes())
    lines = fixes.preview(found, ["expandable", "ckpt"], ["python", "train.py"])
    texts = [line.text for line in lines]
    assert "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True" in texts
    assert "python train.py" in texts
    assert [line.kind for line in lines if "x = block(x)" in line.text] == ["removed"]


def test_advice_cannot_be_ticked() -> None:
    found = fixes.read(
        {"fixes": [{"id": "sampler", "title": "Bucket the batches", "applicable": True, "advice": True}]}
    )
    assert not found.rows[0].can_be_ticked
    assert found.rows[0].note() == "advice: Bucket the batches"


# -- comparison ----------------------------------------------------------------------------------


def attempt(
    number: int, losses: list[float], *, device: str | None = None, **rank: Any
) -> compare.AttemptRow:
    result = {"exit_code": 0, "oom": False, "ranks": [{"rank": 0, "losses": losses, **rank}]}
    return compare.attempt_row(number, {"device": device, "fixes": []}, result)


@pytest.mark.parametrize(
    ("after", "word"),
    [([2.0, 1.5], "equal"), ([2.0, 1.5, 1.2], "equal"), ([2.0, 1.6], "differs"), ([], "not comparable")],
)
def test_losses_over_common_steps(after: list[float], word: str) -> None:
    assert compare.compare_losses(attempt(1, [2.0, 1.5]), attempt(2, after)).word == word


def test_losses_of_a_simulated_device_prove_nothing() -> None:
    found = compare.compare_losses(attempt(1, [1.0], device="a100-40g"), attempt(2, [1.0], device="a100-40g"))
    assert found.word == "not comparable"


def test_not_finite_losses_are_not_compared() -> None:
    assert compare.compare_losses(attempt(1, [1.0]), attempt(2, [float("nan")])).word == "not comparable"


def test_number_of_a_simulated_run_is_never_called_measured() -> None:
    simulated = attempt(2, [], device="a100-40g", peak_reserved_bytes=23 * GIB, capacity_bytes=39 * GIB)
    real = attempt(2, [], peak_reserved_bytes=23 * GIB, capacity_bytes=39 * GIB)
    assert "simulated peak 23.00 GiB" in compare.sentence(simulated)
    assert "measured peak 23.00 GiB" in compare.sentence(real)


def test_outside_the_interval_is_said() -> None:
    predicted = fixes.Prediction(10, 9, 11, None, "", True, "")
    row = compare.AttemptRow(2, (), (), predicted, 12, 12, 20, None, True, 3, 0, False, False, ())
    assert row.within() is False
    assert "outside the interval" in compare.sentence(row)


def test_proof_is_read_and_says_what_is_missing() -> None:
    data = {
        "loss": "within", "loss_detail": "by up to 1e-4", "buffers": "equal", "throughput_ratio": 0.71,
        "accepted": False, "why_not_accepted": "the peak is outside the interval",
        "fixes": {"ckpt": "refused", "a": "applied"},
    }  # fmt: skip
    proof = compare.read_proof(2, data)
    assert proof is not None
    assert [(check.name, check.word) for check in proof.checks] == [("Loss", "within"), ("Buffers", "equal")]
    assert proof.speed() == "29% slower"
    assert proof.not_applied == ("ckpt: refused",)
    assert not proof.is_accepted
    assert compare.read_proof(2, {}) is None


def test_equal_modules_are_folded() -> None:
    peak = {
        "peak_allocated_bytes": 100,
        "composition": [{"category": "activations", "bytes": 90}, {"category": "none", "bytes": 0}],
        "modules": [{"module": f"blocks.{i}", "bytes": 5} for i in range(4)]
        + [{"module": "head", "bytes": 7}],
    }
    found = composition.read(peak)
    assert found is not None
    assert [(part.name, part.size_bytes) for part in found.modules] == [("blocks.* ×4", 20), ("head", 7)]
    assert [part.name for part in found.categories] == ["activations"]


# -- events --------------------------------------------------------------------------------------


def test_prediction_progress_is_one_line() -> None:
    records = [{"k": "predicting", "fix": f, "done": n, "total": 3} for n, f in enumerate(("a", "b", "c"), 1)]
    lines = events.supervisor_lines(records)
    assert [line.text for line in lines] == ["predicting c (3 of 3)"]
    progress = events.progress(records)
    assert progress is not None
    assert progress.sentence() == "predicting c, 3 of 3 done"
    assert events.progress([*records, {"k": "predicted"}]) is None


def test_unknown_records_are_skipped() -> None:
    assert events.supervisor_lines([{"k": "from-the-future"}, {}]) == []


@pytest.mark.parametrize(
    ("count", "shown"),
    [(768 << 20, "768 MiB"), (4.61 * 2**30, "4.61 GiB"), (100, "100 B"), (None, "unknown")],
)
def test_short_sizes(count: float | None, shown: str) -> None:
    assert wording.short_size(count) == shown
