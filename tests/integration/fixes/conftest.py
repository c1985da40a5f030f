"""One failed job on a simulated card with its predictions, shared by the tests of this folder."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from oomscope.launch.job import JobResult, JobSpec, run_job
from oomscope.launch.predict import launch_changes, predict
from oomscope.simulate.cards import Card, resolve
from oomscope.store.files import write_json
from oomscope.store.session import Attempt, Session

HERE = Path(__file__).parent


@dataclass
class Job:
    """A session whose first attempt ran out of memory."""

    session: Session
    attempt: Attempt
    spec: JobSpec
    card: Card
    result: JobResult

    def predict(self, **options: Any) -> dict[str, Any]:
        made = predict(self.session, self.attempt, card=self.card, spec=self.spec, **options)
        write_json(self.attempt.path / "fixes.json", made)
        return made

    def rerun(self, fixes, *extra: str) -> JobResult:
        """Another attempt with `fixes`, and `extra` options for the script."""
        from dataclasses import replace

        changes = launch_changes(fixes, self.attempt, env=self.spec.env)
        attempt = self.session.new_attempt()
        attempt.write_info({"fixes": list(fixes)})
        spec = replace(
            self.spec,
            command=(*self.spec.command, *extra, *changes.argv),
            env={**self.spec.env, **changes.env},
            plan=changes.plan,
            attempt_dir=attempt.path,
        )
        return run_job(spec, session=self.session, timeout_s=120)


def start(folder: Path, command: list[str], card: str, env: dict[str, str] | None = None) -> Job:
    """Run `command` on a simulated card."""
    kept = {
        name: value for name, value in os.environ.items() if not name.startswith(("OOMSCOPE", "PYTORCH_"))
    }
    environment = {**kept, "OMP_NUM_THREADS": "1", **(env or {})}
    words = (sys.executable, *command)
    session = Session.create(folder, name="gpt", command=words, cwd=folder)
    attempt = session.new_attempt()
    attempt.write_info({"command": list(words), "cwd": str(folder), "device": card, "fixes": []})
    spec = JobSpec(
        command=words,
        cwd=folder,
        env=environment,
        device=resolve(card),
        plan={"fixes": []},
        steps=None,
        detail=False,
        role="attempt",
        attempt_dir=attempt.path,
    )
    return Job(session, attempt, spec, resolve(card), run_job(spec, session=session, timeout_s=120))


@pytest.fixture(scope="session")
def failed_job(tmp_path_factory):
    folder = tmp_path_factory.mktemp("job")
    script = folder / "gpt.py"
    script.write_text((HERE / "gpt.py").read_text())
    job = start(folder, [str(script), "--batch-size", "64"], "1GiB")
    assert job.result.oom, job.result
    return job


@pytest.fixture(scope="session")
def predicted(failed_job):
    return failed_job.predict(
        only=("expandable", "optim-fused", "ckpt", "microbatch-exact", "amp-bf16", "zero1", "empty-cache")
    )


@pytest.fixture(scope="session")
def start_job():
    """`start`, for tests that need a job of their own."""
    return start
