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


SPAWNED = """
import torch
import torch.multiprocessing as mp


def work(rank, world):
    torch.cuda.set_device(rank)
    layer = torch.nn.Linear(1024, 1024 * (rank + 1)).cuda()
    layer(torch.ones(8, 1024, device="cuda")).sum().backward()
    print("rank", rank, "of", world, torch.cuda.device_count(), flush=True)
    optimizer = torch.optim.SGD(layer.parameters(), 0.1)
    optimizer.step()
    if fail:
        raise ValueError(f"rank {rank} does not like it")


fail = {fail}
if __name__ == "__main__":
    mp.spawn(work, (4,), nprocs=4)
"""


@pytest.mark.parametrize(("ranks", "seen"), [(None, [0, 3]), ((1, 2), [1, 2])])
def test_spawned_ranks_that_can_differ(launch, ranks, seen):
    run = launch(SPAWNED.replace("{fail}", "False"), device=resolve("24GiB"), ranks=ranks)
    assert run.result.exit_code == 0, run.output()
    assert [rank.rank for rank in run.result.ranks] == seen
    assert {rank.world_size for rank in run.result.ranks} == {4}
    assert sorted(run.output().splitlines()) == [f"rank {rank} of 4 4" for rank in seen]
    peaks = [rank.peak_allocated_bytes for rank in run.result.ranks]
    assert peaks[0] < peaks[1]
    assert all(rank.capacity_bytes == resolve("24GiB").capacity_bytes(4) for rank in run.result.ranks)


def test_an_error_in_a_spawned_rank_is_the_jobs(launch):
    run = launch(SPAWNED.replace("{fail}", "True"), device=resolve("24GiB"), ranks=(2,))
    assert run.result.exit_code == 1
    assert "ValueError: rank 2 does not like it" in run.output(stream="stderr")


PROCESSES = """
import sys
import torch
import torch.multiprocessing as mp


def work(rank):
    torch.distributed.init_process_group("nccl", init_method="tcp://127.0.0.1:1", rank=rank, world_size=2)
    layer = torch.nn.Linear(64, 64).cuda()
    layer(torch.ones(8, 64, device="cuda")).sum().backward()
    torch.optim.SGD(layer.parameters(), 0.1).step()


if __name__ == "__main__":
    context = mp.get_context("{method}")
    processes = [context.Process(target=work, args=(rank,)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(max(process.exitcode for process in processes))
"""


@pytest.mark.parametrize("method", ["spawn", "fork"])
def test_processes_of_the_script_have_a_device_each(launch, method):
    run = launch(PROCESSES.replace("{method}", method), device=resolve("24GiB"))
    assert run.result.exit_code == 0, run.output(stream="stderr")
    assert [(rank.rank, rank.steps) for rank in run.result.ranks] == [(0, 1), (1, 1)]
    assert all(rank.peak_allocated_bytes > 0 for rank in run.result.ranks)


def test_a_device_in_use_is_not_inherited(launch):
    text = PROCESSES.replace("{method}", "fork").replace(
        "    context =", "    keep = torch.ones(8, device='cuda')\n    context ="
    )
    run = launch(text, device=resolve("24GiB"))
    assert run.result.exit_code == 1
    assert "Cannot re-initialize CUDA in forked subprocess" in run.output(stream="stderr")


def test_data_loader_workers_have_no_device(launch):
    script = """
import torch
import torch.multiprocessing as mp
class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 4
    def __getitem__(self, index):
        return torch.tensor(int(torch.cuda.is_available()))
if __name__ == "__main__":
    loader = torch.utils.data.DataLoader(Data(), num_workers=1, multiprocessing_context="spawn")
    print([int(each) for each in loader])
"""
    run = launch(script, device=resolve("24GiB"))
    assert run.output() == "[0, 0, 0, 0]\n"


STAGES = """
import os
import torch
import torch.distributed as dist
dist.init_process_group("nccl")
rank, last = dist.get_rank(), dist.get_world_size() - 1
shape = [None]
if rank > 0:
    dist.recv_object_list(shape, src=rank - 1)
if rank < last:
    dist.send_object_list([(shape[0] or 0) + 1], dst=rank + 1)
print(shape[0])
"""


def test_a_rank_that_another_one_waits_for_is_started(launch):
    run = launch(STAGES, options=("--nproc-per-node", "3"), device=resolve("24GiB"))
    assert run.result.exit_code == 0
    assert [run.output(rank=rank) for rank in range(3)] == ["None\n", "1\n", "2\n"]


def test_every_setting_of_a_card_reaches_the_device(launch):
    script = """
import torch
p = torch.cuda.get_device_properties(0)
print(p.name, p.total_memory >> 20, p.major, p.minor, p.multi_processor_count, torch.cuda.device_count())
print(torch.cuda.mem_get_info()[0] >> 20)
"""
    settings = "usable=20GiB,context=1GiB,nccl=2GiB,sms=7,cc=9.0,name=My card,count=3"
    run = launch(script, device=resolve("h100-80g," + settings))
    assert run.output() == "My card 20480 9 0 7 3\n19456\n"
    script = script.splitlines()[-1]
    two = ("--nproc-per-node", "2")
    run = launch("import torch\n" + script, device=resolve("h100-80g," + settings), options=two)
    assert run.output(rank=0) == "17408\n"


SHARED = """
import torch
import torch.multiprocessing as mp


def work(model, table):
    before = torch.cuda.memory_allocated()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model(table).sum().backward()
    optimizer.step()
    print(before, next(model.parameters()).device, flush=True)


if __name__ == "__main__":
    mp.set_start_method("spawn")
    model = torch.nn.Linear(1024, 1024).cuda()
    model.share_memory()
    process = mp.Process(target=work, args=(model, torch.ones(8, 1024, device="cuda")))
    process.start()
    process.join()
    raise SystemExit(process.exitcode)
"""


def test_tensors_on_the_card_go_to_other_processes_without_memory_of_their_own(launch):
    run = launch(SHARED, device=resolve("24GiB"))
    assert run.result.exit_code == 0, run.output(stream="stderr")
    assert run.output().startswith("0 cuda:0")


LOADING = """
import torch
import torch.distributed as dist
dist.init_process_group("nccl")


class Data(torch.utils.data.Dataset):
    change = torch.nn.Linear(8, 8)  # transforms are modules, too

    def __len__(self):
        return 4

    def __getitem__(self, index):
        with torch.no_grad():
            return self.change(torch.ones(8))


model = torch.nn.Linear(8, 8).cuda()
optimizer = torch.optim.SGD(model.parameters(), 0.1)
for batch in torch.utils.data.DataLoader(Data(), 2, num_workers=1):
    model(batch.cuda()).sum().backward()
    optimizer.step()
"""


def test_loader_workers_of_a_rank_are_no_ranks(launch):
    run = launch(LOADING, options=("--nproc-per-node", "2"), device=resolve("24GiB"), ranks=(0,))
    assert run.result.exit_code == 0, run.output(stream="stderr")
    assert [(rank.rank, rank.steps) for rank in run.result.ranks] == [(0, 2)]
