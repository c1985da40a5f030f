"""A job on a simulated card: the agent's probes see it as they would see a real one."""

import pickle

import pytest

from oomscope.launch.selftest import check_simulator
from oomscope.simulate.cards import resolve

from .conftest import TRAIN

pytestmark = pytest.mark.integration

GPU = TRAIN.replace("optimizer =", "model.cuda()\noptimizer =").replace(
    "randn(4, 8)", "randn(4, 8, device='cuda')"
)


@pytest.fixture(scope="module", autouse=True)
def simulator():
    import sys

    from oomscope.errors import OomscopeError

    try:
        check_simulator(sys.executable)
    except OomscopeError as error:
        pytest.skip(error.message)


def test_the_state_at_an_out_of_memory_error_is_kept(launch, script_path):
    big = "step()\nkeep = torch.empty(30 << 30, dtype=torch.uint8, device='cuda')\n"
    run = launch(GPU + big, device=resolve("24GiB"))
    assert run.result.exit_code == 1
    assert run.result.oom
    (rank,) = run.result.ranks
    assert rank.steps == 1
    assert rank.oom is not None
    assert (rank.oom.step, rank.oom.caught, rank.oom.in_backward) == (1, False, False)
    assert rank.oom.requested_bytes == 30 << 30
    assert rank.oom.message.startswith("CUDA out of memory. Tried to allocate 30.00 GiB.")
    (oom,) = run.of("oom")
    assert oom["frames"][0][0] == str(script_path)
    snapshot = pickle.loads((run.attempt.path / rank.oom.snapshot).read_bytes())
    assert {"segments", "device_traces"} <= set(snapshot)
    (fact,) = run.of("snapshot")
    assert fact["bytes"] == (run.attempt.path / fact["path"]).stat().st_size
    assert not run.of("agent_error")


def test_steps_have_lows_and_peaks_and_the_script_keeps_its_own(launch):
    script = GPU + "for _ in range(3): step()\nprint(torch.cuda.max_memory_allocated())\n"
    run = launch(script, device=resolve("24GiB"))
    steps = run.of("step")
    assert len(steps) == 3
    assert all(0 < step["low_allocated_bytes"] < step["peak_allocated_bytes"] for step in steps)
    assert all(step["loss"] is None for step in steps)
    assert int(run.output()) == max(step["peak_allocated_bytes"] for step in steps)
    phases = {record["phase"] for record in run.of("phase_peak")}
    assert {"forward", "backward", "optimizer"} <= phases
    (rank,) = run.result.ranks
    assert rank.capacity_bytes == resolve("24GiB").capacity_bytes()
    assert rank.peak_reserved_bytes >= rank.peak_allocated_bytes
    assert rank.peak_composition


def test_one_rank_stands_for_a_whole_job(launch):
    script = "import os\nprint(os.environ['RANK'], os.environ['WORLD_SIZE'], os.environ['LOCAL_RANK'])\n"
    run = launch(
        script, options=("--nproc-per-node", "4", "--nnodes", "2"), device=resolve("24GiB"), ranks=(0, 5)
    )
    assert run.result.exit_code == 0
    assert run.output(rank=0) == "0 8 0\n"
    assert run.output(rank=5) == "5 8 1\n"


def test_the_device_needs_a_number_of_ranks(launch):
    from oomscope.errors import UsageError

    with pytest.raises(UsageError, match="--nproc-per-node auto"):
        launch("", options=("--nproc-per-node", "auto"), device=resolve("24GiB"))
    with pytest.raises(UsageError, match="no rank 9"):
        launch("", options=("--nproc-per-node", "4"), device=resolve("24GiB"), ranks=(9,))
