"""Runs a script as `oomscope run` does, on the CPU, and gives the folder of what it left."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oomscope.launch.command import build_command
from oomscope.launch.job import JobResult, JobSpec, run_job
from oomscope.store.session import Session


@pytest.fixture
def run_on_cpu(tmp_path: Path) -> Callable[..., tuple[Path, JobResult]]:
    """run_on_cpu(script, *torchrun options) -> (folder of the attempt, how it ended)."""

    def run(script: Path, *options: str) -> tuple[Path, JobResult]:
        launch = build_command([*options, str(script)], sys.executable)
        session = Session.create(tmp_path, name=script.stem, command=list(launch.command), cwd=tmp_path)
        attempt = session.new_attempt()
        spec = JobSpec(
            command=tuple(launch.command),
            cwd=tmp_path,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
            device=None,
            plan={},
            steps=None,
            detail=False,
            role="attempt",
            attempt_dir=attempt.path,
            output="files",
        )
        return attempt.path, run_job(spec, session=session, timeout_s=180)

    return run
