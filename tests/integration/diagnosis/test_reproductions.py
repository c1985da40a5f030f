"""Small programs with one defect each, as public reports describe them, run on the simulated card to their failure.

The first verdict must be the cause that was established for the report. What cannot be simulated (other processes, host
memory, drivers, libraries, the workspaces of cuDNN's search for an algorithm) has its cases among the unit tests of the
rules, and host memory in test_host_memory.py.
"""

import os
import sys
from pathlib import Path

import pytest

from oomscope.core.diagnosis import Diagnosis
from oomscope.launch.command import build_command
from oomscope.launch.job import JobResult, JobSpec, run_job
from oomscope.live.evidence import collect
from oomscope.live.judge import judge
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
    "step_outputs_kept": ("2GiB", "container_accumulation", "outputs.append("),
    "evaluation_with_gradients": ("3GiB", "eval_no_nograd", "def evaluate"),
    "autocast_without_gradients": ("2500MiB", "autocast_cache", None),
    "self_reference": ("6GiB", "ref_cycle", "self.me = self"),
    "exception_kept": ("6GiB", "exception_holds", "return error"),
    "sorted_lengths": ("2600MiB", "fragmentation", None),
    "mem_pool": ("5GiB", "allocator_spurious", None),
    "flatten_before_sharding": ("1300MiB", "init_before_shard", None),
    "fsdp_full_save": ("1050MiB", "ckpt_full_gather", None),
}
#: Options of the launcher, for jobs of several ranks.
RANKS = {"fsdp_full_save": ["--nproc-per-node", "2"]}


def run(name: str, card: str, folder: Path) -> tuple[JobResult, Diagnosis]:
    """Run a script on the simulated card, and judge it."""
    launch = build_command([*RANKS.get(name, ()), str(SCRIPTS / f"{name}.py")], sys.executable)
    session = Session.create(folder, name=name, command=list(launch.command), cwd=folder)
    attempt = session.new_attempt()
    spec = JobSpec(
        command=tuple(launch.command),
        cwd=folder,
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
    return result, judge(collect(attempt.path))


@pytest.mark.parametrize("name", CASES)
def test_the_first_verdict_is_the_established_cause(name, tmp_path):
    card, cause, line = CASES[name]
    result, diagnosis = run(name, card, tmp_path)
    assert result.exit_code == 1
    assert result.oom
    best = diagnosis.verdict
    assert best is not None
    assert best.rule.cause == cause, [(v.rule.cause, v.finding.confidence) for v in diagnosis.verdicts]
    assert best.finding.confidence >= 0.75
    if line is not None:
        assert best.finding.where is not None
        assert line in best.finding.where.source


def test_cycles_show_by_their_saw_tooth_before_anything_fails(tmp_path):
    result, diagnosis = run("recurrent_cycles", "2GiB", tmp_path)
    assert result.exit_code == 0
    assert diagnosis.verdict is not None
    assert diagnosis.verdict.rule.cause == "ref_cycle"
    assert diagnosis.verdict.finding.confidence >= 0.75
