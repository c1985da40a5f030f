"""The CUDA side of an attached agent, on the simulated device: readings, history, snapshots, out-of-memory errors."""

from __future__ import annotations

import time

import pytest

from oomscope.launch.injectors import inject, wrapped

from .conftest import JOBS, wait_until
from .test_attach import attach, ptrace_is_allowed, pytestmark, records  # noqa: F401


@pytest.fixture
def job(start, tmp_path):
    process = start(str(JOBS / "simulated.py"), env={"TRIGGER": str(tmp_path / "trigger")})
    line = process.stdout.readline()
    if line.strip() != "ready":
        pytest.skip(f"the simulated device does not start here: {line!r}")
    process.trigger = tmp_path / "trigger"
    return process


def recording(pid, tmp_path):
    """Does the job record its memory history now? Asked from inside."""
    answer = tmp_path / f"answer-{time.monotonic_ns()}"
    source = (
        "import torch\n"
        "on = any(torch.cuda.memory._snapshot()['device_traces'])\n"
        f"open({str(answer)!r}, 'w').write(str(on))"
    )
    inject(pid, wrapped(source, str(tmp_path / "error")))
    wait_until(lambda: answer.exists() and answer.read_text())
    return answer.read_text() == "True"


def test_allocator_history_snapshot_and_oom(job, tmp_path):
    session = attach(job.pid)
    (each,) = session.ranks
    assert each.agent == "active", each.why_not_higher
    wait_until(lambda: session.refresh() and (session.state_of(each).allocated_bytes or 0) > 0)
    session.wait_for_readings(10)
    state = session.state_of(each)
    assert state.agent_errors == []
    assert state.reserved_bytes >= state.allocated_bytes > 1 << 20
    assert state.device == 0
    assert state.capacity_bytes > 200 << 20
    assert recording(job.pid, tmp_path)
    assert session.dump() == 1
    wait_until(lambda: list(session.attempt.snapshots.glob("*.pickle")))
    job.trigger.write_text("")
    assert job.stdout.readline().strip() == "caught", "the job handles its error as before"
    wait_until(lambda: any(row["k"] == "oom" for row in records(session, each)))
    (oom,) = [row for row in records(session, each) if row["k"] == "oom"]
    assert oom["requested_bytes"] == 4 << 30
    assert any(frame[0].endswith("simulated.py") for frame in oom["frames"])
    assert oom["snapshot"] is not None
    session.close()
    assert not recording(job.pid, tmp_path), "the history is off after the detach"
    # The observer cannot be unregistered: it must stay silent.
    count = len(records(session, each))
    job.trigger.write_text("")
    assert job.stdout.readline().strip() == "caught"
    assert len(records(session, each)) == count
    again = attach(job.pid)
    assert again.ranks[0].agent == "active"
    job.trigger.write_text("")
    assert job.stdout.readline().strip() == "caught"
    wait_until(lambda: any(row["k"] == "oom" for row in records(again, again.ranks[0])))
    assert sum(row["k"] == "oom" for row in records(again, again.ranks[0])) == 1
    again.close()
    assert job.poll() is None
