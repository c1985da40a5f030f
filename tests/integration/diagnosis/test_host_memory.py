"""Host memory on real processes: copies per rank, and data sets that loader workers copy page by page.

The processes and their records are real; only the size of the machine is set in the evidence: no test may fill one.
"""

from dataclasses import replace
from pathlib import Path

import pytest

from oomscope.live.evidence import collect
from oomscope.live.judge import judge
from oomscope.units import MIB

pytestmark = [pytest.mark.integration, pytest.mark.slow]
SCRIPTS = Path(__file__).parent / "scripts"


@pytest.fixture
def evidence(run_on_cpu):
    """evidence(name of a script, *torchrun options): what its run leaves for the diagnosis."""
    return lambda name, *options: collect(run_on_cpu(SCRIPTS / f"{name}.py", *options)[0])


def test_every_rank_loads_its_own_copy(evidence):
    found = evidence("load_on_every_rank", "--nproc-per-node", "4")
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


def test_loader_workers_copy_a_list_of_strings(evidence):
    found = evidence("strings_in_workers")
    assert found.host is not None
    assert found.host.worker_bytes is not None
    assert found.host.worker_bytes.is_leak, found.host.worker_bytes
    best = judge(found).verdict
    assert best is not None
    assert best.rule.cause == "host_dataloader_cow"
    assert best.finding.confidence >= 0.75
