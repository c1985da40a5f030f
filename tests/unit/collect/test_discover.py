"""Finding the ranks of a job among made-up processes."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.collect.procfs import Process, Stat
from oomscope.errors import AttachFailed, UsageError
from oomscope.launch import discover as module
from oomscope.launch.discover import discover
from oomscope.launch.roles import rank_of


def process(pid, parent, command, environ=None, comm="python", state="S", cgroup="", uid=1000):
    words = tuple(command.split())
    return Process(
        Stat(pid, parent, comm, state, 100 + pid, 0, 1, 1 << 20), uid, words, environ or {}, pid, cgroup
    )


def table(*processes):
    return {each.pid: each for each in processes}


def torchrun_rank(rank, world=2, run="myrun", port="29500", **more):
    return {
        "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world),
        "TORCHELASTIC_RUN_ID": run, "TORCHELASTIC_RESTART_COUNT": "0", "MASTER_PORT": port, **more,
    }  # fmt: skip


def looks_like_python(process):
    return "python" in process.comm or process.comm.startswith("pt_")


@pytest.fixture(autouse=True)
def nothing_is_mapped(monkeypatch):
    monkeypatch.setattr(
        module, "looks_like_python", lambda each: "python" in each.comm or each.comm.startswith("pt_")
    )
    monkeypatch.setattr(module, "accelerator_files", lambda pid: [])


JOB = (
    process(10, 1, "python -m torch.distributed.run train.py", comm="pt_elastic"),
    process(11, 10, "python train.py", torchrun_rank(0)),
    process(12, 10, "python train.py", torchrun_rank(1)),
    process(13, 11, "python train.py", torchrun_rank(0), comm="pt_data_worker"),
    process(14, 12, "python train.py", torchrun_rank(1), comm="pt_data_worker"),
    process(15, 11, "python -m torch._inductor.compile_worker", torchrun_rank(0)),
)


@pytest.mark.parametrize("target", ["10", "11", "12", "13", "14", "myrun", "train.py", "train"])
def test_every_door_leads_to_the_same_ranks(target):
    job = discover(target, table(*JOB))
    assert [(rank.rank, rank.pid) for rank in job.ranks] == [(0, 11), (1, 12)]
    assert job.ranks[0].workers == [13]
    assert job.ranks[0].helpers == [15]
    assert (job.launcher, job.run_id, job.expected_local) == (10, "myrun", 2)
    assert job.problems == []
    assert job.pids == [10, 11, 12, 13, 14, 15]


def test_missing_and_remote_ranks_are_told():
    job = discover("10", table(*JOB[:2]))
    assert any("1 of 2 local ranks" in problem for problem in job.problems)
    far = process(12, 10, "python train.py", torchrun_rank(1, world=2) | {"WORLD_SIZE": "16"})
    near = process(11, 10, "python train.py", torchrun_rank(0) | {"WORLD_SIZE": "16"})
    assert any(
        "14 of 16 ranks run on other hosts" in p for p in discover("10", table(JOB[0], near, far)).problems
    )


def test_secrets_are_dropped():
    mine = process(
        11, 1, "python train.py", torchrun_rank(0, world=1, WANDB_API_KEY="secret", HF_TOKEN="secret")
    )
    (rank,) = discover("11", table(mine)).ranks
    assert "secret" not in str(rank)


def test_several_jobs():
    other = process(21, 1, "python train.py", torchrun_rank(0, run="other", port="1", world=1))
    with pytest.raises(UsageError) as caught:
        discover("train.py", table(*JOB, other))
    assert "21" in caught.value.hint
    assert "10 (2 ranks" in caught.value.hint


def test_near_names_are_offered():
    with pytest.raises(AttachFailed) as caught:
        discover("trian.py", table(*JOB))
    assert "train.py" in caught.value.hint


def test_slurm_tasks_need_no_common_parent():
    slurm = {"SLURM_JOB_ID": "42", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2"}
    tasks = [
        process(30 + i, 1, "python train.py", slurm | {"SLURM_PROCID": str(i), "SLURM_LOCALID": str(i)})
        for i in range(2)
    ]
    job = discover("slurm:42", table(*tasks))
    assert [(rank.rank, rank.source) for rank in job.ranks] == [(0, "slurm"), (1, "slurm")]
    with pytest.raises(AttachFailed, match="Slurm job 43"):
        discover("slurm:43", table(*tasks))


def test_the_batch_step_of_slurm_is_no_rank():
    assert rank_of({"SLURM_PROCID": "0", "SLURM_NTASKS": "3", "SLURM_JOB_ID": "1"}) is None
    assert rank_of({"OMPI_COMM_WORLD_RANK": "3", "OMPI_COMM_WORLD_SIZE": "8"}) == (3, None, 8, "openmpi")


def test_a_container():
    identifier = "ab" * 32
    inside = process(50, 1, "python train.py", cgroup=f"0::/docker/{identifier}")
    assert discover(f"container:{identifier[:12]}", table(inside)).ranks[0].container == identifier


def test_spawned_ranks_and_lightning():
    parent = process(60, 1, "python train.py")
    children = [
        process(61 + i, 60, "python -c from multiprocessing.spawn import spawn_main; spawn_main()")
        for i in range(2)
    ]
    job = discover("60", table(parent, *children))
    assert [(rank.rank, rank.source, rank.pid) for rank in job.ranks] == [
        (None, "spawn", 61),
        (None, "spawn", 62),
    ]
    assert job.name == "train.py"
    lightning = [
        process(70, 1, "python train.py"),
        process(
            71, 70, "python train.py", {"LOCAL_RANK": "1", "RANK": "1", "WORLD_SIZE": "2", "MASTER_PORT": "5"}
        ),
    ]
    assert [(rank.rank, rank.pid) for rank in discover("70", table(*lightning)).ranks] == [(0, 70), (1, 71)]


def test_a_zombie_and_nothing():
    with pytest.raises(AttachFailed, match="zombie"):
        discover("11", table(process(11, 10, "", state="Z"), JOB[0]))
    with pytest.raises(AttachFailed, match="no process"):
        discover("99", table(*JOB))
    with pytest.raises(AttachFailed, match="no process of it trains"):
        discover("5", table(process(5, 1, "sleep 5", comm="sleep")))


def test_a_job_of_oomscope_names_its_session():
    mine = process(11, 1, "python train.py", {"OOMSCOPE_SESSION": "/state/sessions/x"})
    assert discover("11", table(mine)).ranks[0].session == "/state/sessions/x"


@given(
    st.dictionaries(
        st.sampled_from(["RANK", "LOCAL_RANK", "WORLD_SIZE", "PMI_RANK", "SLURM_PROCID"]), st.text()
    )
)
def test_any_environment_is_read(environ):
    rank_of(environ)
