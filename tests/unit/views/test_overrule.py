"""Walking the flowchart with the user's answers."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import recorded_sessions as recorded

from oomscope.views import diagnosis
from oomscope.views.overrule import next_answer, walk_again


def found(*weaker: dict[str, Any]) -> diagnosis.Diagnosis:
    data = recorded.findings()
    data["verdicts"] += weaker
    return diagnosis.read(data)


WEAKER = {"rule": "oom.fragmentation", "title": "free memory lies in pieces", "confidence": 0.4}


def on_path(result: diagnosis.Diagnosis) -> list[str]:
    return [node.name for node in result.flow if node.on_path]


def test_without_answers_nothing_changes() -> None:
    assert walk_again(found(), {}) == found()


def test_denied_cause_gives_way_to_the_next_one() -> None:
    result = walk_again(found(WEAKER), {"Q1.4": "no"})
    assert result.verdict is not None
    assert result.verdict.rule == "oom.fragmentation"
    assert on_path(result) == ["G0", "Q1", "Q1.4", "Q2", "Q2.2"]


def test_denied_question_takes_everything_below_it_along() -> None:
    result = walk_again(found(WEAKER), {"Q1": "no"})
    assert result.verdict is not None
    assert result.verdict.rule == "oom.fragmentation"


def test_affirmed_question_looks_only_below_it() -> None:
    result = walk_again(found(WEAKER), {"Q2": "yes"})
    assert [verdict.rule for verdict in result.verdicts] == ["oom.fragmentation"]
    assert {node.name: node.answer for node in result.flow}["Q2"] == "yes"


def test_memory_that_is_not_ours_excludes_all_other_causes() -> None:
    result = walk_again(found(WEAKER), {"G0": "no"})
    assert result.verdict is not None
    assert result.verdict.rule == ""


def test_nothing_left_names_what_is_missing() -> None:
    result = walk_again(found(), {"Q1.4": "no"})
    assert result.verdict is not None
    assert result.verdict.title == "No cause is left"
    assert result.verdict.confidence is None
    assert any("joined" in gap.what for gap in result.verdict.missing)


def test_key_walks_through_the_other_answers_and_back() -> None:
    node = next(node for node in found().flow if node.name == "Q1")
    assert node.answer == "yes"
    assert next_answer(node, None) == "no"
    assert next_answer(node, "no") is None
    unknown = next(node for node in found().flow if node.answer == "unknown")
    assert [next_answer(unknown, given) for given in (None, "yes", "no")] == ["yes", "no", None]
