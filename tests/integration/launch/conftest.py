"""Real processes: each test writes a script, launches it with the agent inside, and reads what the session says."""

import os
import socket
import sys
import textwrap
from dataclasses import dataclass
from pathlib import Path

import pytest

from oomscope.launch.command import build_command
from oomscope.launch.job import JobResult, JobSpec, run_job
from oomscope.store.session import Attempt, Session
from oomscope.store.tail import read_attempt

TRAIN = """
import torch
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 1))
optimizer = torch.optim.AdamW(model.parameters())
def step(accumulate=1):
    for _ in range(accumulate):
        loss = model(torch.randn(4, 8)).pow(2).mean()
        loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss
"""


@dataclass
class Run:
    """One launch and what it left."""

    result: JobResult
    session: Session
    attempt: Attempt
    records: dict[str, list[dict]]

    def of(self, kind: str, rank: int | None = None) -> list[dict]:
        """All records of a kind, of one rank or of all."""
        return [
            record
            for name, records in self.records.items()
            for record in records
            if record["k"] == kind and (rank is None or name.startswith(f"r{rank:05d}-"))
        ]

    def output(self, stream: str = "stdout", rank: int = 0) -> str:
        return (self.attempt.logs / f"rank{rank}" / f"{stream}.log").read_text()


@pytest.fixture
def environment():
    """The environment of the jobs: one thread, nothing of ours in it yet."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("OOMSCOPE", "PET_"))}
    return {**kept, "OMP_NUM_THREADS": "1", "PYTHONDONTWRITEBYTECODE": "1"}


@pytest.fixture
def launch(tmp_path, environment):
    """launch(script text, *args, options=[torchrun options], **fields of JobSpec and run_job) -> Run."""

    def start(script, *args, options=(), env=None, control=None, timeout_s=240.0, on_poll=None, **fields):
        path = tmp_path / "train.py"
        path.write_text(textwrap.dedent(script))
        session = Session.create(tmp_path / "home", name="train.py", environ=environment)
        attempt = session.new_attempt()
        command = build_command([*options, str(path), *args], sys.executable).command
        spec = JobSpec(
            command=command,
            cwd=tmp_path,
            env={**environment, **(env or {})},
            device=fields.pop("device", None),
            plan=fields.pop("plan", {}),
            steps=fields.pop("steps", None),
            detail=fields.pop("detail", False),
            role="attempt",
            attempt_dir=attempt.path,
            **fields,
        )
        result = run_job(spec, session=session, control=control, timeout_s=timeout_s, on_poll=on_poll)
        assert not result.timed_out
        return Run(result, session, attempt, read_attempt(attempt.path))

    return start


@pytest.fixture
def script_path(tmp_path) -> Path:
    return tmp_path / "train.py"


@pytest.fixture
def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
