"""Host memory on real processes: copies per rank, and data sets that loader workers copy page by page.

The processes and their records are real; only the size of the machine is set in the evidence: no test may fill one.
"""

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from oomscope.core.diagnosis import Evidence
from oomscope.launch.command import build_command
from oomscope.launch.job import JobSpec, run_job
from oomscope.live.evidence import collect
from oomscope.live.judge import judge
from oomscope.store.session import Session
from oomscope.units import MIB

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"


def evidence(name: str, folder: Path, *options: str) -> Evidence:
    launch = build_command([*options, str(SCRIPTS / f"{name}.py")], sys.executable)
    session = Session.create(folder, name=name, command=list(launch.command), cwd=folder)
    attempt = session.new_attempt()
    spec = JobSpec(
        command=tuple(launch.command),
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        device=None,
        plan={},
        steps=None,
        detail=False,
        role="attempt",
        attempt_dir=attempt.path,
        output="files",
    )
    run_job(spec, session=session, timeout_s=180)
    return collect(attempt.path)


def test_every_rank_loads_its_own_copy(tmp_path):
    found = evidence("load_on_every_rank", tmp_path, "--nproc-per-node", "4")
    loaded = [rank.peak_rss_bytes or 0 for rank in found.ranks]
    assert len(loaded) == 4
    assert min(loaded) >= 256 * MIB
    assert found.host is not None
    small = replace(found, host=replace(found.host, memory_total=round(sum(loaded) / 0.9)))
    best = judge(small).verdict
    assert best is not None
    assert best.rule.cause == "host_per_rank_load"
    assert best.finding.confidence >= 0.75
    assert judge(found).verdict is None  # on this machine there is room for all of them


def test_loader_workers_copy_a_list_of_strings(tmp_path):
    found = evidence("strings_in_workers", tmp_path)
    assert found.host is not None
    assert found.host.worker_bytes is not None
    assert found.host.worker_bytes.is_leak, found.host.worker_bytes
    best = judge(found).verdict
    assert best is not None
    assert best.rule.cause == "host_dataloader_cow"
    assert best.finding.confidence >= 0.75
