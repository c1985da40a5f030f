"""Jobs of several processes: ranks speak, helpers stay silent, and the rank that failed first is named."""

import pytest

from .conftest import TRAIN

pytestmark = pytest.mark.integration

GROUP = """
import os, sys, time, torch, torch.distributed as dist
dist.init_process_group("gloo")
rank = dist.get_rank()
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
def step():
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""

TWO = ("--nproc-per-node", "2", "--standalone")


def test_two_ranks_train_and_both_are_heard(launch):
    run = launch(
        GROUP + "for _ in range(3): step()\nprint('rank', rank)\ndist.destroy_process_group()\n", options=TWO
    )
    assert run.result.exit_code == 0
    assert [rank.steps for rank in run.result.ranks] == [3, 3]
    assert sorted(run.records) == [name for name in sorted(run.records) if name.startswith("r0000")]
    assert {record["world_size"] for record in run.of("rank")} == {2}
    logs = {path.read_text() for path in run.attempt.logs.rglob("stdout.log")}
    assert logs == {"rank 0\n", "rank 1\n"}
    assert (run.attempt.path / "elastic.jsonl").read_text().count("SUCCEEDED") >= 2


def test_all_ranks_dump_when_one_runs_out_of_memory(launch):
    script = GROUP + (
        "for i in range(50):\n"
        "    if rank == 1 and i == 3: raise torch.OutOfMemoryError('CUDA out of memory. Tried to allocate 1 GiB.')\n"
        "    step()\n"
    )
    run = launch(script, options=TWO)
    assert run.result.exit_code == 1
    assert run.result.oom
    assert run.result.first_failing_rank == 1
    (alarm,) = run.of("alarm")
    assert (alarm["peers"], alarm["acks"]) == (1, 1)
    (dump,) = run.of("dump", rank=0)
    assert dump["origin"] == 1
    functions = [frame[2] for stack in dump["stacks"] for frame in stack["frames"]]
    assert "backward" in functions or "forward" in functions
    launcher = (run.attempt.path / "launcher.log").read_text()
    assert "OutOfMemoryError: CUDA out of memory." in launcher, "torchrun names the root cause"
    assert (run.attempt.path / "launcher_error.json").exists()


def test_a_killed_rank_is_the_first_that_failed(launch):
    script = GROUP + "for i in range(50):\n    if rank == 1 and i == 3: os.kill(os.getpid(), 9)\n    step()\n"
    run = launch(script, options=TWO)
    assert run.result.exit_code == 1
    assert run.result.first_failing_rank == 1
    assert [rank.state for rank in run.result.ranks] == ["failed", "lost"]


def test_a_rank_that_sits_in_c_leaves_its_stacks_when_it_is_ended(launch):
    script = (
        "import ctypes, os, time\nimport torch\nrank = int(os.environ['RANK'])\n"
        "if rank == 1: time.sleep(2); raise ValueError('bad')\n"
        "ctypes.CDLL(None).sleep(60)\n"
    )
    run = launch(script, options=TWO)
    assert run.result.first_failing_rank == 1
    assert run.result.duration_s < 30
    (stacks,) = (run.attempt.path / "stacks").iterdir()
    assert stacks.name.startswith("r00000-")
    assert "train.py" in stacks.read_text()
    (term,) = run.of("term")
    assert (term["signal"], term["stacks"]) == ("SIGTERM", f"stacks/{stacks.name}")
    (failure,) = run.of("exception", rank=1)
    assert failure["t"] < term["t"] < failure["t"] + 30 * 10**9
    assert [rank.state for rank in run.result.ranks] == ["stopped", "failed"]


LOADERS = """
import torch
from torch.utils.data import DataLoader, Dataset
class Numbers(Dataset):
    def __len__(self): return 8
    def __getitem__(self, index): return torch.ones(8) * index
def main():
    model = torch.nn.Linear(8, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    for method in ("fork", "spawn", "forkserver"):
        for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context=method):
            model(batch).sum().backward()
            optimizer.step()
    print("done")
if __name__ == "__main__":
    main()
"""


def test_loader_workers_of_all_start_methods_stay_silent(launch):
    run = launch(LOADERS, env={"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0"})
    assert run.result.exit_code == 0
    assert run.output() == "done\n"
    assert len(run.records) == 1
    assert run.result.ranks[0].steps == 6
    assert not run.of("agent_error")


SPAWNED = (
    "import os, sys\n"
    + TRAIN
    + """
import torch.distributed as dist
import torch.multiprocessing as mp
def main(rank):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[1])
    dist.init_process_group("gloo", rank=rank, world_size=2)
    for _ in range(2): step()
    if rank == 1: raise torch.OutOfMemoryError("CUDA out of memory.")
    dist.barrier()
if __name__ == "__main__":
    mp.spawn(main, nprocs=2)
"""
)


def test_ranks_of_mp_spawn_are_known_by_their_process_group(launch, free_port):
    run = launch(SPAWNED, str(free_port))
    assert run.result.exit_code == 1
    assert run.result.oom
    ranks = {name: records for name, records in run.records.items() if any(r["k"] == "step" for r in records)}
    last = [[r["rank"] for r in records if r["k"] == "rank"][-1] for records in ranks.values()]
    assert sorted(last) == [0, 1]
    assert any("CUDA out of memory" in record["message"] for record in run.of("exception"))
    assert run.result.first_failing_rank == 1
    assert [rank.steps for rank in run.result.ranks] == [2, 2]


CHILD = "import torch; torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], lr=1).step()"


def test_a_subprocess_of_a_rank_is_not_the_rank(launch):
    again = f"subprocess.run([sys.executable, '-c', {CHILD!r}], check=True)"
    script = f"import subprocess, sys\n{TRAIN}\nstep()\n{again}\nstep()\n"
    run = launch(script, env={"RANK": "0", "WORLD_SIZE": "1"})
    assert [rank.steps for rank in run.result.ranks] == [2]
    assert sorted(name[0] for name in run.records) == ["r", "x"]
