"""The alert line: the most urgent fact, in the right words."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "tools"))

import recorded_sessions as recorded

from oomscope.store.session import Session
from oomscope.views import diagnosis
from oomscope.views.headline import Alert
from oomscope.views.session import SessionModel
from oomscope.views.status import alert as alert_of


@pytest.fixture(autouse=True)
def _frozen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time_ns", lambda: recorded.NOW_NS)


def alert(session: Session) -> Alert:
    found = SessionModel(session).poll().alert
    assert found is not None
    return found


@pytest.mark.parametrize(
    ("name", "words", "key"),
    [
        ("eight_ranks", "rank 5: OOM in ~126 steps (+0.12 GiB/step)", "2"),
        ("cpu_job", "nothing unusual; peak host memory 640.00 MiB", ""),
        ("starting", "waiting for the first reading", ""),
        (
            "predicting",
            "activations exceed the card: predicting amp-bf16, 2 of 5 done",
            "2",
        ),
        ("waiting", "out of memory: activations exceed the card; 3 fixes fit", "4"),
        ("finished", "attempt 2 (ckpt): simulated peak 14.7 of 39.4 GiB, predicted 14.6", "5"),
    ],
)
def test_alert_of_each_state(name: str, words: str, key: str, tmp_path: Path) -> None:
    found = alert(getattr(recorded, name)(tmp_path))
    assert found.text.startswith(words)
    assert found.key == key


def ended(tmp_path: Path, state: str, result: dict[str, Any]) -> Session:
    session: Session = recorded.cpu_job(tmp_path)
    session.attempts()[0].write_result(result)
    session.set_state(state)
    return session


@pytest.mark.parametrize(
    ("state", "result", "words"),
    [
        ("failed", {"exit_code": 130, "ranks": []}, "the job was stopped (exit code 130)"),
        ("failed", {"exit_code": -9, "ranks": []}, "the job failed"),
        ("failed", {"exit_code": 1, "ranks": []}, "the job failed"),
        ("done", {"exit_code": 0, "ranks": []}, "finished without running out of memory"),
        ("lost", {}, "the supervisor is gone"),
    ],
)
def test_alert_of_each_end(state: str, result: dict[str, Any], words: str, tmp_path: Path) -> None:
    assert alert(ended(tmp_path, state, result)).text.startswith(words)


def test_no_fix_that_fits_is_said(tmp_path: Path) -> None:
    session = recorded.waiting(tmp_path)
    path = session.path / "attempts/001/fixes.json"
    path.write_text(
        recorded.dump({**recorded.fixes(), "fixes": recorded.fixes()["fixes"][:1], "recommended": None})
    )
    assert alert(session).text.endswith("no single fix is predicted to fit")


def done(**findings: Any) -> Alert:
    verdict = {"rule": "oom.container_accumulation", "title": "results pile up", "confidence": 0.9}
    found = alert_of(
        "done", ranks=(), fixes=None, progress=None, comparison=None,
        diagnosis=diagnosis.read({"failed": False, "verdicts": [verdict], **findings}),
    )  # fmt: skip
    assert found is not None
    return found


def test_a_run_that_ended_well_is_not_called_clean_when_it_was_not() -> None:
    assert done().text == "finished; results pile up"
    recovered = {"events": 2, "steps_after": 9, "retried_steps": 2, "cost_ns": None, "kept_bytes": 0}
    found = done(failed=True, recovered=recovered)
    assert found.text == "finished; 2 out-of-memory errors were caught; training went on for 9 steps"
    assert (found.severity, found.key) == ("warn", "2")
    assert done(verdicts=[]).text.startswith("finished without running out of memory")
