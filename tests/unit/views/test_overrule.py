"""Walking the flowchart with the user's answers, from the viewer's side."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import recorded_sessions as recorded

from oomscope.errors import SessionError
from oomscope.views import diagnosis
from oomscope.views.overrule import Rewalk, next_answer


def test_key_walks_through_the_other_answers_and_back() -> None:
    flow = diagnosis.read(recorded.findings()).flow
    node = next(node for node in flow if node.name == "Q1")
    assert node.answer == "yes"
    assert next_answer(node, None) == "no"
    assert next_answer(node, "no") is None
    unknown = next(node for node in flow if node.answer == "unknown")
    assert [next_answer(unknown, given) for given in (None, "yes", "no")] == ["yes", "no", None]


def test_a_denied_question_is_walked_with_what_was_recorded(tmp_path: Path) -> None:
    session = recorded.waiting(tmp_path)
    rewalk = Rewalk(session.path, 1, 0)
    before, after = rewalk.walk({}), rewalk.walk({"Q1": "no"})
    assert before.verdict is not None
    assert after.verdict is not None
    assert before.verdict.rule == "oom.capacity_activations"
    assert after.verdict.rule != "oom.capacity_activations"
    node = next(node for node in after.flow if node.name == "Q1")
    assert (node.answer, node.on_path) == ("no", True)


def test_an_attempt_that_is_gone_is_told(tmp_path: Path) -> None:
    with pytest.raises(SessionError):
        Rewalk(tmp_path, 3, None).walk({"Q1": "no"})
