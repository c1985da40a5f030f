"""Facts about a job from the records of the collectors."""

from __future__ import annotations

import signal

from oomscope.collect import outside

MIB, GIB = 1 << 20, 1 << 30
A = "GPU-a"


def host(t, **fields):
    return {"t": t, "k": "host", "processes": [], **fields}


def gpu(t=1, used=10 * GIB, rows=(), uuid=A, index=0, **fields):
    processes = [{"pid": pid, "used_bytes": held, "type": "compute"} for pid, held in rows]
    return {
        "t": t, "k": "gpu", "uuid": uuid, "gpu": index, "used_bytes": used, "processes": processes,
        "driver_reserved_bytes": 0, **fields,
    }  # fmt: skip


def test_the_kernel_log_names_the_victim():
    records = [
        {
            "t": 5,
            "k": "oom_kill",
            "pid": 77,
            "name": "python",
            "anon_rss_bytes": GIB,
            "shmem_rss_bytes": 0,
            "scope": "cgroup",
        }
    ]
    fact = outside.host_oom_kill(records, {77})
    assert fact is not None
    assert "77" in fact.text
    assert "its cgroup" in fact.text
    assert outside.host_oom_kill(records, {78}) is None


def group(kills):
    return {
        "path": "/sys/fs/cgroup/job",
        "version": 2,
        "limit_bytes": GIB,
        "usage_bytes": 1,
        "oom_kills": kills,
        "limit_hits": 0,
    }


def test_a_counter_that_rose_is_evidence_only_for_a_killed_job():
    records = [host(1, cgroup=group(3)), host(2, cgroup=group(4))]
    fact = outside.host_oom_kill(records, {1}, exit_code=-9)
    assert fact is not None
    assert fact.values["kills"] == 1
    assert "oom_kill 3 → 4" in fact.source
    assert outside.host_oom_kill(records, {1}, exit_code=1) is None
    assert outside.host_oom_kill([host(1, cgroup=group(3)), host(2, cgroup=group(3))], {1}, -9) is None


def test_a_kill_alone_is_no_proof():
    fact = outside.exit_meaning(-signal.SIGKILL)
    assert not fact.certain
    assert "scheduler" in fact.text
    assert outside.exit_meaning(137).code == "sigkill"
    assert outside.exit_meaning(-signal.SIGBUS).code == "sigbus"
    assert outside.exit_meaning(1).code == "exit"


def test_shared_memory():
    full = [host(1, shm_total_bytes=64 * MIB, shm_free_bytes=MIB)]
    fact = outside.shared_memory_full(full)
    assert fact is not None
    assert "--shm-size" in fact.text
    inside = host(1, shm_total_bytes=GIB, shm_free_bytes=GIB)
    inside["processes"] = [{"pid": 5, "shm_total_bytes": 32 * MIB, "shm_free_bytes": 0}]
    fact = outside.shared_memory_full([inside])
    assert fact is not None
    assert fact.values["total_bytes"] == 32 * MIB, "the job's own mount counts, not ours"
    assert outside.shared_memory_full([host(1, shm_total_bytes=GIB, shm_free_bytes=GIB)]) is None


def test_foreign_tenants_with_their_largest_reading():
    records = [gpu(rows=[(1, 9 * GIB), (50, GIB)]), gpu(t=2, rows=[(1, 9 * GIB), (50, 3 * GIB)])]
    (fact,) = outside.foreign_tenants(records, {1}, {A})
    assert fact.values == {"pid": 50, "uuid": A, "used_bytes": 3 * GIB}


def test_memory_that_nobody_holds():
    (fact,) = outside.leftover([gpu(used=10 * GIB, rows=[(1, 7 * GIB)])], {A})
    assert fact.values["unaccounted_bytes"] == 3 * GIB
    assert outside.leftover([gpu(used=10 * GIB, rows=[(1, 9.5 * GIB)])], {A}) == []
    assert outside.leftover([gpu(used=10 * GIB, rows=[(1, None)])], {A}) == [], (
        "hidden memory is not missing memory"
    )


def test_crowded_gpu():
    records = [gpu(rows=[(10, GIB), (11, GIB)]), gpu(uuid="GPU-b", index=1, rows=[(11, GIB)])]
    (fact,) = outside.crowded(records, {10: 0, 11: 1})
    assert "2 ranks (0, 1) have a context on GPU 0" in fact.text


def test_non_torch_share_uses_the_reading_next_to_the_event():
    records = [gpu(t=100, rows=[(1, 5 * GIB)]), gpu(t=200, rows=[(1, 9 * GIB)])]
    fact = outside.non_torch(records, A, 1, reserved_bytes=4 * GIB, at_ns=110)
    assert fact is not None
    assert fact.values["non_torch_bytes"] == GIB
    assert outside.non_torch(records, A, 1, reserved_bytes=20 * GIB) is None
    assert outside.non_torch(records, A, 2, reserved_bytes=0) is None


def test_xids_are_told_once():
    records = [{"t": 1, "k": "xid", "uuid": A, "gpu": 0, "code": 79, "source": "nvml"}] * 3
    assert [fact.text for fact in outside.xids(records)] == ["the driver reported Xid 79 on GPU 0"]


def test_exit_statuses():
    records = [
        {"t": 1, "k": "process_end", "pid": 4, "status": -9},
        {"t": 2, "k": "process_end", "pid": 5, "status": None},
    ]
    assert outside.exit_statuses(records) == {4: -9, 5: None}
