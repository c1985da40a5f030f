"""Whether a job went on after an out-of-memory error, and what it cost."""

from __future__ import annotations

from typing import Any

from oomscope.live.evidence_recovery import recovery
from oomscope.units import GIB, MIB


def step(number: int, seconds: float = 1.0, low: int = GIB) -> dict[str, Any]:
    return {"k": "step", "step": number, "duration_ns": round(seconds * 1e9), "low_allocated_bytes": low}


def oom(number: int) -> dict[str, Any]:
    return {"k": "oom", "step": number}


def test_no_event_no_recovery() -> None:
    assert recovery([step(0), step(1)], finished=True) is None


def test_a_step_that_was_tried_again() -> None:
    records = [step(0), step(1), oom(2), step(2, 3.5), step(3), step(4)]
    found = recovery(records, finished=True)
    assert found is not None
    assert (found.events, found.steps_after, found.retried_steps) == (1, 3, 1)
    assert found.cost_ns == 2_500_000_000
    assert found.kept_bytes == 0


def test_several_events_of_one_step_count_its_time_once() -> None:
    found = recovery(
        [step(0), step(1), oom(2), oom(2), step(2, 2), step(3), oom(4), step(4, 2)], finished=None
    )
    assert found is not None
    assert (found.events, found.retried_steps, found.steps_after) == (3, 2, 1)
    assert found.cost_ns == 2_000_000_000


def test_what_the_failed_step_left_behind() -> None:
    found = recovery(
        [step(0), step(1), oom(2), step(2, low=GIB + 300 * MIB), step(3, low=GIB + 200 * MIB)], finished=True
    )
    assert found is not None
    assert found.kept_bytes == 200 * MIB


def test_the_error_that_ended_the_job_is_no_recovery() -> None:
    end = {"k": "exception", "is_oom": True}
    assert recovery([step(0), oom(1), end], finished=False) is None
    assert recovery([step(0), oom(1)], finished=None) is None
    assert recovery([step(0), oom(1)], finished=False) is None
    assert recovery([step(0), oom(1), step(1), oom(2), end], finished=False) is None


def test_a_job_that_ended_well_without_another_step() -> None:
    found = recovery([step(0), oom(1)], finished=True)
    assert found is not None
    assert (found.steps_after, found.retried_steps, found.cost_ns) == (0, 0, 0)


def test_another_failure_later_is_not_the_memorys() -> None:
    found = recovery([step(0), oom(1), step(1), {"k": "exception", "is_oom": False}], finished=False)
    assert found is not None


def test_records_without_numbers() -> None:
    found = recovery([{"k": "oom"}, {"k": "step", "step": "x"}, {"k": "step"}], finished=None)
    assert found is not None
    assert (found.cost_ns, found.kept_bytes) == (None, None)
