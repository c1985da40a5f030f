"""Small programs with one defect each, as public reports describe them, run on the simulated card to their failure.

The first verdict must be the cause that was established for the report. What cannot be simulated (other processes, host
memory, drivers, libraries) has its cases among the unit tests of the rules.
"""

import os
import sys
from pathlib import Path

import pytest

from oomscope.core.diagnosis import diagnose
from oomscope.launch.command import build_command
from oomscope.launch.job import JobSpec, run_job
from oomscope.live.evidence import collect
from oomscope.simulate.cards import resolve
from oomscope.store.session import Session

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"

#: script -> (card, cause, line that must be named or None)
CASES = {
    "optimizer_foreach": ("2900MiB", "optimizer_transient", None),
    "resume_keeps_checkpoint": ("1900MiB", "load_duplicate", "torch.load"),
    "total_loss_with_graph": ("3GiB", "graph_accumulation", "total += loss"),
    "recurrent_state": ("2GiB", "graph_accumulation", "score, state = model(x, state)"),
    "step_outputs_kept": ("2GiB", "container_accumulation", "result = module.training_step"),
    "evaluation_with_gradients": ("3GiB", "eval_no_nograd", "def evaluate"),
    "autocast_without_gradients": ("2500MiB", "autocast_cache", None),
    "self_reference": ("6GiB", "ref_cycle", "self.me = self"),
    "exception_kept": ("6GiB", "exception_holds", "return error"),
    "sorted_lengths": ("2600MiB", "fragmentation", None),
    "mem_pool": ("5GiB", "allocator_spurious", None),
}


@pytest.mark.parametrize("name", CASES)
def test_the_first_verdict_is_the_established_cause(name, tmp_path):
    card, cause, line = CASES[name]
    launch = build_command([str(SCRIPTS / f"{name}.py")], sys.executable)
    session = Session.create(tmp_path, name=name, command=list(launch.command), cwd=tmp_path)
    attempt = session.new_attempt()
    spec = JobSpec(
        command=tuple(launch.command),
        cwd=tmp_path,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        device=resolve(card),
        plan={},
        steps=None,
        detail=False,
        role="attempt",
        attempt_dir=attempt.path,
        output="files",
    )
    result = run_job(spec, session=session, timeout_s=120)
    assert result.exit_code == 1
    assert result.oom
    diagnosis = diagnose(collect(attempt.path))
    best = diagnosis.verdict
    assert best is not None
    assert best.rule.cause == cause, [(v.rule.cause, v.finding.confidence) for v in diagnosis.verdicts]
    assert best.finding.confidence >= 0.75
    if line is not None:
        assert best.finding.where is not None
        assert line in best.finding.where.source
