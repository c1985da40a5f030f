import os
import sys

import pytest

from oomscope.agent import identity

VARIABLES = (
    "RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK", "PMI_RANK", "PMI_SIZE", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_STEP_ID",
    "SLURM_LOCALID", "OOMSCOPE_OWNER", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_RESTART_COUNT",
)  # fmt: skip


@pytest.fixture
def environment(monkeypatch):
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def put(**values):
        for name, value in values.items():
            monkeypatch.setenv(name, str(value))

    return put


@pytest.mark.parametrize(
    ("values", "rank", "world"),
    [
        ({}, None, None),
        ({"RANK": 3, "WORLD_SIZE": 8}, 3, 8),
        ({"OMPI_COMM_WORLD_RANK": 1, "OMPI_COMM_WORLD_SIZE": 2}, 1, 2),
        ({"PMI_RANK": 1, "PMI_SIZE": 2}, 1, 2),
        ({"SLURM_PROCID": 2, "SLURM_NTASKS": 3, "SLURM_STEP_ID": 0}, 2, 3),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 3}, None, None),
        ({"SLURM_PROCID": 0, "SLURM_NTASKS": 1, "SLURM_STEP_ID": 0}, None, None),
        ({"RANK": "x"}, None, None),
        ({"RANK": 5, "WORLD_SIZE": 8, "SLURM_PROCID": 2, "SLURM_NTASKS": 3, "SLURM_STEP_ID": 0}, 5, 8),
    ],
)
def test_ranks_are_read_from_the_launchers_variables(environment, values, rank, world):
    environment(**values)
    found = identity.read_identity()
    assert (found["rank"], found["world_size"]) == (rank, world)


def test_a_child_with_the_ranks_own_identity_is_a_helper(environment):
    environment(RANK=1, WORLD_SIZE=2)
    mine = identity.read_identity()
    assert not identity.is_helper(mine)
    environment(OOMSCOPE_OWNER=identity.owner_mark(mine))
    assert not identity.is_helper(mine), "its own mark"
    environment(OOMSCOPE_OWNER=identity.owner_mark(mine).rpartition("@")[0] + "@1")
    assert identity.is_helper(mine)
    environment(RANK=0)
    assert not identity.is_helper(identity.read_identity()), "another rank that this one started"


@pytest.mark.parametrize(
    ("argv", "launcher", "child"),
    [
        (["python", "train.py"], False, False),
        (["python", "-m", "torch.distributed.run", "train.py"], True, False),
        (["/env/bin/python", "/env/bin/torchrun", "--nproc-per-node", "2", "train.py"], True, False),
        (["/env/bin/python", "/env/bin/accelerate", "launch", "train.py"], True, False),
        (["python", "-m", "accelerate.commands.launch", "train.py"], True, False),
        (["python", "-m", "pkg.train"], False, False),
        (["python", "train.py", "torchrun"], False, False),
        (
            ["python", "-c", "from multiprocessing.spawn import spawn_main", "--multiprocessing-fork"],
            False,
            True,
        ),
        (["python", "-c", "from multiprocessing.forkserver import main; main(5)"], False, True),
        (["python", "-c", "from multiprocessing.resource_tracker import main;main(5)"], False, True),
    ],
)
def test_launchers_and_helpers_are_known_by_how_they_were_started(monkeypatch, argv, launcher, child):
    monkeypatch.setattr(sys, "orig_argv", argv)
    assert identity.is_launcher() == launcher
    assert identity.is_multiprocessing_child() == child


def test_without_orig_argv_the_kernel_is_asked(monkeypatch):
    monkeypatch.delattr(sys, "orig_argv")
    argv = identity.original_argv()
    assert os.path.basename(argv[0]).startswith("python") or "pytest" in argv[0]
