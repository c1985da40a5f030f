"""The flowchart walked with answers of the user in place of those found."""

import pytest

from oomscope.core.diagnosis import Diagnosis, Evidence, diagnose
from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.evidence import ModelFact, OomFact
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.model import LIKELY
from oomscope.core.diagnosis.overrule import SOURCE
from oomscope.core.diagnosis.words import from_words
from oomscope.units import GIB

FULL = OomMessage(
    "cuda_oom", backend="cuda", tried_bytes=GIB, capacity_bytes=40 * GIB, free_bytes=GIB // 4, allocated_bytes=38 * GIB,
    reserved_bytes=39 * GIB,
)  # fmt: skip


def evidence(text: str = "", message: OomMessage | None = FULL) -> Evidence:
    return Evidence(
        message=message,
        messages=(message,) if message else (),
        arithmetic=analyse(message) if message else None,
        signals=from_words(text),
    )


MEASURED = Evidence(
    oom=OomFact(
        step=0, phase="forward", requested_bytes=GIB, device_free_bytes=GIB // 4, allocated_bytes=38 * GIB,
        reserved_bytes=39 * GIB, capacity_bytes=40 * GIB,
    ),
    model=ModelFact(parameters_bytes=2 * GIB, gradients_bytes=0, optimizer_bytes=0),
)  # fmt: skip


def causes(found: Diagnosis) -> list[str]:
    return [v.rule.cause for v in found.verdicts]


def node(found: Diagnosis, name: str):
    return next(n for n in found.flow if n.node == name)


def test_without_answers_nothing_is_the_users():
    found = diagnose(evidence())
    assert found.answers == ()
    assert not any(n.given for n in found.flow)


def test_an_answer_is_evidence_for_the_rules():
    assert causes(diagnose(evidence()))[0] == "capacity_activations"
    found = diagnose(evidence(), answers={"Q3.1b": "yes"})
    assert causes(found)[0] == "ckpt_full_gather"
    assert any(fact.source == SOURCE for fact in found.verdicts[0].finding.evidence)


def test_a_denied_question_takes_its_causes_along():
    found = diagnose(MEASURED, answers={"Q1.4": "no"})
    assert "capacity_activations" not in causes(found)
    found = diagnose(MEASURED, answers={"Q1": "no"})
    assert not {"capacity_activations", "giant_transient"} & set(causes(found))


def test_an_affirmed_question_leaves_what_lies_below_it():
    found = diagnose(MEASURED, answers={"Q2": "yes"})
    assert set(causes(found)) <= {"longest_batch", "fragmentation", "ref_cycle", "unknown"}


def test_the_cause_of_an_affirmed_question_is_named_on_the_users_word():
    found = diagnose(MEASURED, answers={"Q2.3": "yes"})
    assert causes(found)[0] == "ref_cycle"
    best = found.verdicts[0].finding
    assert best.confidence == LIKELY
    assert "on your word" in best.explanation
    assert best.evidence[0].source == SOURCE


def test_it_is_said_when_what_was_recorded_speaks_against_it():
    found = diagnose(MEASURED, answers={"H.3": "yes"})
    assert causes(found)[0] == "host_shm"
    assert "speaks against" in found.verdicts[0].finding.explanation


def test_memory_that_is_not_ours():
    found = diagnose(MEASURED, answers={"G0": "no"})
    assert causes(found)[0] == "unknown"
    assert causes(diagnose(MEASURED, answers={"G0": "yes"}))[0] == "capacity_activations"


def test_the_flow_bears_the_users_answer_and_the_way_there():
    found = diagnose(MEASURED, answers={"Q1": "no"})
    assert (node(found, "Q1").answer, node(found, "Q1").given, node(found, "Q1").on_path) == (
        "no",
        True,
        True,
    )
    assert not node(found, "Q2").given
    shown = found.to_json()
    assert shown["answers"] == {"Q1": "no"}
    assert [n["node"] for n in shown["flow"] if n["given"]] == ["Q1"]


def test_nothing_left_names_what_is_missing():
    found = diagnose(MEASURED, answers={"Q1": "no", "Q2": "no", "Q3": "no", "P": "no", "H": "no"})
    assert causes(found)[0] == "unknown"
    assert found.verdicts[0].finding.missing


@pytest.mark.parametrize("answers", [{"Q9": "yes"}, {"Q1": "maybe"}])
def test_answers_that_make_no_sense_are_refused(answers):
    with pytest.raises(ValueError, match=r"Q9|maybe"):
        diagnose(MEASURED, answers=answers)


def test_a_run_that_did_not_fail_can_be_walked_too():
    found = diagnose(Evidence(), answers={"Q3.2": "yes"})
    assert found.verdicts
    assert node(found, "Q3.2").given
