"""The loop's decisions, with the job, the diagnosis and the predictions replaced by scripted ones."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from oomscope.errors import PredictionImpossible
from oomscope.launch import loop as loop_module
from oomscope.launch.job import JobControl, JobResult, JobSpec
from oomscope.launch.loop import Loop, RunRequest
from oomscope.launch.predict import Changes
from oomscope.store.session import Session

CATALOGUE: dict[str, Any] = {
    "fixes": [
        {"id": "ckpt", "risk": "exact", "applicable": True, "why_not": None},
        {"id": "amp-bf16", "risk": "rounding", "applicable": True, "why_not": None},
        {"id": "optim-8bit", "risk": "semantic", "applicable": True, "why_not": None},
        {"id": "expandable", "risk": "none", "applicable": False, "why_not": "it is set already"},
    ],
    "plans": [],
    "recommended": ["ckpt"],
}


class _Findings:
    def to_json(self) -> dict[str, Any]:
        return {"schema": "oomscope.diagnosis/1", "verdicts": [{"rule": "oom.capacity_activations"}]}


class Stage:
    """Plays the job: `outcomes` says for each attempt whether it runs out of memory."""

    def __init__(self, outcomes: Sequence[bool], catalogue: Mapping[str, Any]) -> None:
        self.outcomes = list(outcomes)
        self.catalogue = dict(catalogue)
        self.specs: list[JobSpec] = []
        self.order: list[str] = []

    def run_job(self, spec: JobSpec, **_: Any) -> JobResult:
        self.specs.append(spec)
        self.order.append("run")
        oom = self.outcomes.pop(0)
        return JobResult(1 if oom else 0, None, 1.0, 0 if oom else None, oom, [])

    def predict(self, *_: Any, **__: Any) -> dict[str, Any]:
        self.order.append("predict")
        return self.catalogue

    def prove(self, *_: Any) -> dict[str, Any]:
        self.order.append("prove")
        return {"accepted": True}


def launch_changes(ids: Sequence[str], attempt: Any, **_: Any) -> Changes:
    return Changes(
        env={"FIX": ",".join(ids)}, plan={"fixes": [{"id": each} for each in ids]}, argv=["--fixed"]
    )


def play(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    outcomes: Sequence[bool],
    *,
    catalogue: Mapping[str, Any] = CATALOGUE,
    control: JobControl | None = None,
    decide: Any = lambda fixes: None,
    **options: Any,
) -> tuple[Stage, Loop, list[dict[str, Any]]]:
    stage = Stage(outcomes, catalogue)
    monkeypatch.setattr(loop_module, "run_job", stage.run_job)
    monkeypatch.setattr(loop_module, "predict", stage.predict)
    monkeypatch.setattr(loop_module, "prove", stage.prove)
    monkeypatch.setattr(loop_module, "launch_changes", launch_changes)
    monkeypatch.setattr(loop_module, "judge", lambda evidence: _Findings())
    monkeypatch.setattr(loop_module, "collect", lambda path: None)
    session = Session.create(tmp_path, name="train")
    request = RunRequest(command=("python", "train.py"), cwd=str(tmp_path), **options)
    events: list[dict[str, Any]] = []
    loop = Loop(session, request, {"HOME": "/"}, decide=decide, on_event=events.append, control=control)
    loop.run()
    return stage, loop, events


def notes(events: Sequence[Mapping[str, Any]]) -> str:
    return "\n".join(str(each["text"]) for each in events if each["k"] == "note")


def test_a_job_that_survives_is_diagnosed_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, loop, _ = play(tmp_path, monkeypatch, [False], take_best=True)
    assert stage.order == ["run"]
    assert loop.outcome.exit_code == 0
    assert loop.session.state()["state"] == "done"


def test_the_recommended_fix_is_applied_to_the_users_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, loop, events = play(tmp_path, monkeypatch, [True, False], take_best=True)
    assert stage.order == ["run", "predict", "run", "prove"]
    first, second = stage.specs
    assert first.plan == {"fixes": []}
    assert second.command == ("python", "train.py", "--fixed")
    assert second.env == {"HOME": "/", "FIX": "ckpt"}
    assert second.plan["fixes"][0] == {"id": "ckpt"}
    assert loop.outcome.exit_code == 0
    assert [each["by"] for each in events if each["k"] == "decision"] == ["recommendation"]


def test_the_prediction_is_on_disk_before_the_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[bool] = []
    original = Stage.run_job

    def watching(self: Stage, spec: JobSpec, **more: Any) -> JobResult:
        seen.append((spec.attempt_dir.parent / "001" / "fixes.json").exists())
        return original(self, spec, **more)

    monkeypatch.setattr(Stage, "run_job", watching)
    play(tmp_path, monkeypatch, [True, False], take_best=True)
    assert seen == [False, True]


def test_the_first_attempt_of_a_real_job_carries_little(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _, _ = play(tmp_path, monkeypatch, [True, False], take_best=True)
    assert [spec.detail for spec in stage.specs] == [False, True]


def test_without_consent_nothing_is_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, loop, events = play(tmp_path, monkeypatch, [True])
    assert stage.order == ["run", "predict"]
    assert loop.session.state()["state"] == "oom"
    assert any(each["k"] == "waiting" for each in events)


def test_a_person_may_choose(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, events = play(tmp_path, monkeypatch, [True, False], decide=lambda fixes: ["amp-bf16"])
    assert stage.specs[1].env["FIX"] == "amp-bf16"
    assert [each["by"] for each in events if each["k"] == "decision"] == ["user"]


def test_a_chosen_fix_that_does_not_apply_is_refused_with_its_reason(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, loop, events = play(tmp_path, monkeypatch, [True], chosen=("ckpt", "expandable"))
    assert stage.order == ["run", "predict"]
    assert loop.outcome.refused == [{"fix": "expandable", "reason": "it is set already"}]
    assert "expandable refused: it is set already" in notes(events)


def test_an_unknown_fix_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, loop, _ = play(tmp_path, monkeypatch, [True], chosen=("more-ram",))
    assert loop.outcome.refused[0]["fix"] == "more-ram"


def test_a_risk_above_the_allowed_one_is_not_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = {**CATALOGUE, "recommended": ["ckpt", "optim-8bit"]}
    stage, _, events = play(tmp_path, monkeypatch, [True], catalogue=catalogue, take_best=True)
    assert stage.order == ["run", "predict"]
    assert "--risk semantic" in notes(events)
    stage, _, _ = play(
        tmp_path, monkeypatch, [True, False], catalogue=catalogue, take_best=True, allowed_risk="semantic"
    )
    assert stage.specs[1].env["FIX"] == "ckpt,optim-8bit"


def test_the_same_recommendation_is_not_tried_twice(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, events = play(tmp_path, monkeypatch, [True, True], take_best=True)
    assert stage.order.count("run") == 2
    assert "active already" in notes(events)


def test_attempts_are_limited(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, events = play(tmp_path, monkeypatch, [True], take_best=True, max_attempts=1)
    assert stage.order == ["run"]
    assert "--max-attempts" in notes(events)


def test_a_used_up_budget_starts_no_further_attempt(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, events = play(tmp_path, monkeypatch, [True], take_best=True, budget_s=0.0)
    assert stage.order == ["run"]
    assert "--budget" in notes(events)


def test_a_job_that_the_user_ended_is_not_rerun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, _, _ = play(tmp_path, monkeypatch, [True], take_best=True, control=JobControl(level=1))
    assert stage.order == ["run"]


def test_no_fix_means_no_prediction_and_no_question(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stage, loop, events = play(tmp_path, monkeypatch, [True], predict=False, take_best=True)
    assert stage.order == ["run"]
    assert {each["k"] for each in events} == {"attempt_started", "attempt_ended", "diagnosing", "diagnosed"}
    assert loop.session.state()["state"] == "oom"


def test_no_fix_predicted_to_fit_ends_the_loop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    catalogue = {**CATALOGUE, "recommended": None}
    _, _, events = play(tmp_path, monkeypatch, [True], catalogue=catalogue, take_best=True)
    assert "no fix is predicted to make the job fit" in notes(events)


def test_a_bug_in_the_diagnosis_costs_neither_the_loop_nor_the_exit_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: _Findings) -> dict[str, Any]:
        raise ZeroDivisionError("1/0")

    monkeypatch.setattr(_Findings, "to_json", broken)
    stage, loop, events = play(tmp_path, monkeypatch, [True, False], take_best=True)
    assert stage.order == ["run", "predict", "run", "prove"]
    assert loop.outcome.exit_code == 0
    assert "the diagnosis failed by a bug of oomscope (ZeroDivisionError)" in notes(events)
    assert "1/0" in (loop.session.path / "crash.txt").read_text()


def test_a_prediction_that_is_impossible_ends_with_the_jobs_own_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def impossible(self: Stage, *_: Any, **__: Any) -> dict[str, Any]:
        raise PredictionImpossible("the script cannot be simulated")

    monkeypatch.setattr(Stage, "predict", impossible)
    stage, loop, events = play(tmp_path, monkeypatch, [True], take_best=True)
    assert stage.order == ["run"]
    assert loop.outcome.exit_code == 1
    assert "the script cannot be simulated" in notes(events)


def test_a_request_survives_json(tmp_path: Path) -> None:
    import dataclasses

    request = RunRequest(command=("a", "b"), cwd="/", ranks=(0, 7), chosen=("ckpt",), budget_s=3.0)
    assert RunRequest.from_json(json.loads(json.dumps(dataclasses.asdict(request)))) == request


def test_an_interrupted_analysis_keeps_what_the_job_came_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> dict[str, Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Stage, "predict", interrupted)
    _, loop, events = play(tmp_path, monkeypatch, [True], take_best=True)
    assert (loop.outcome.exit_code, loop.outcome.oom) == (1, True)
    assert loop.session.state()["state"] == "oom"
    assert "interrupted" in notes(events)


def test_chosen_fixes_are_compared_on_a_short_run_that_does_not_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, loop, _ = play(tmp_path, monkeypatch, [False, False], chosen=("ckpt",), steps=4)
    assert stage.order == ["run", "predict", "run", "prove"]
    assert [spec.env.get("FIX") for spec in stage.specs] == [None, "ckpt"]
    assert [each["id"] for each in stage.specs[0].plan["fixes"]] == ["fingerprint", "observe"]
    assert loop.outcome.exit_code == 0


def test_a_whole_job_that_survives_is_not_run_again_for_chosen_fixes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, _, events = play(tmp_path, monkeypatch, [False], chosen=("ckpt",))
    assert stage.order == ["run"]
    assert "ckpt not applied" in notes(events)
    assert "--plan" in notes(events)


def test_a_viewer_may_ask_for_fixes_of_a_job_that_survives(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = iter([True, False])
    original = Loop.__init__

    def asked(self: Loop, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs, also_predict=lambda: next(wanted))

    monkeypatch.setattr(Loop, "__init__", asked)
    stage, loop, _ = play(tmp_path, monkeypatch, [False, False], decide=lambda fixes: ["ckpt"])
    assert stage.order == ["run", "predict", "run", "prove"]
    assert loop.session.state()["state"] == "done"


def failing_proof(fixes: str, why: str) -> Any:
    """The proof of a stage whose rerun with `fixes` is not accepted."""

    def prove(self: Stage, *_: Any) -> dict[str, Any]:
        self.order.append("prove")
        failed = self.specs[-1].env.get("FIX") == fixes
        return {"accepted": not failed, "why_not_accepted": why if failed else None}

    return prove


PLANS = [
    {"fixes": ["ckpt"], "fits": True, "predicted": {}},
    {"fixes": ["amp-bf16"], "fits": True, "predicted": {}},
]


def test_fixes_with_which_the_job_fails_are_taken_back_and_the_next_plan_is_tried(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = Stage.run_job

    def run_job(self: Stage, spec: JobSpec, **more: Any) -> JobResult:
        result = original(self, spec, **more)
        return replace(result, exit_code=1) if spec.env.get("FIX") == "ckpt" else result

    monkeypatch.setattr(Stage, "run_job", run_job)
    monkeypatch.setattr(Stage, "prove", failing_proof("ckpt", "it ended with exit code 1"))
    stage, loop, events = play(
        tmp_path, monkeypatch, [True, False, False], catalogue={**CATALOGUE, "plans": PLANS}, take_best=True
    )
    assert stage.order == ["run", "predict", "run", "prove", "run", "prove"]
    assert [spec.env.get("FIX") for spec in stage.specs] == [None, "ckpt", "amp-bf16"]
    assert "ckpt not accepted: it ended with exit code 1" in notes(events)
    assert loop.outcome.exit_code == 0


def test_a_rerun_that_finished_is_kept_although_its_losses_differ(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Stage, "prove", failing_proof("ckpt", "loss differs"))
    stage, _, events = play(
        tmp_path, monkeypatch, [True, False], catalogue={**CATALOGUE, "plans": PLANS}, take_best=True
    )
    assert stage.order == ["run", "predict", "run", "prove"]
    assert "ckpt not accepted: loss differs" in notes(events)


def test_an_ended_session_is_taken_up_with_its_last_attempt(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, first, _ = play(tmp_path, monkeypatch, [True])
    attempt = first.session.attempts()[-1]
    attempt.write_result({"exit_code": 1, "oom": True})
    again = Loop(first.session, first.request, {"HOME": "/"}, decide=lambda fixes: None)
    assert again.resume(attempt).exit_code == 1
    assert first.session.state()["state"] == "oom"

    stage.outcomes = [False]
    again = Loop(first.session, first.request, {"HOME": "/"}, decide=lambda fixes: ["ckpt"])
    assert again.resume(attempt).exit_code == 0
    assert [each.number for each in first.session.attempts()] == [1, 2]
    assert first.session.state()["state"] == "done"


@pytest.mark.parametrize(("device", "kept"), [(None, False), ("a100-40g", True)])
def test_the_history_can_be_left_out_on_a_real_device_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str | None, kept: bool
) -> None:
    stage, _, _ = play(tmp_path, monkeypatch, [False], device=device, history=False)
    assert stage.specs[0].history is kept
