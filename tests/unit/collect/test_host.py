"""Host readings: /proc, cgroups, kernel log, exit statuses, on this machine and on made-up trees."""

from __future__ import annotations

import os
import subprocess
import sys
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.collect import cgroups, host, kernellog, pidfd, procfs
from oomscope.collect.base import ALL_TIERS, Collector, Tier

KILLED = (
    "Memory cgroup out of memory: Killed process 5857 (python3) total-vm:4113128kB, anon-rss:1521004kB, "
    "file-rss:98432kB, "
    "shmem-rss:2048kB, UID:0 pgtables:4012kB oom_score_adj:0"
)


def test_this_process():
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    assert stat.parent == os.getppid()
    assert stat.rss_bytes > 1 << 20
    assert procfs.same_process(os.getpid(), stat.start_ticks)
    assert not procfs.same_process(os.getpid(), stat.start_ticks + 1)
    assert procfs.read_stat(2**22 - 3) is None


def test_a_name_with_spaces_and_parentheses(monkeypatch):
    line = "7 (a) (b c) S 1 " + " ".join(str(number) for number in range(5, 55))
    monkeypatch.setattr(procfs, "read_text", lambda _: line)
    stat = procfs.read_stat(7)
    assert stat is not None
    assert (stat.comm, stat.state, stat.parent) == ("a) (b c", "S", 1)


@given(st.text())
def test_stat_never_raises(text):
    original = procfs.read_text
    procfs.read_text = lambda _: text
    try:
        procfs.read_stat(1)
    finally:
        procfs.read_text = original


def test_container_and_slurm_from_the_cgroup_path():
    stat = procfs.read_stat(os.getpid())
    assert stat is not None
    identifier = "a1" * 32
    process = procfs.Process(stat, 0, (), None, 1, f"0::/system.slice/docker-{identifier}.scope\n")
    assert process.container == identifier
    assert procfs.Process(stat, 0, (), None, 1, "9:memory:/slurm/uid_0/job_4242/step_0").slurm_job == "4242"


def test_host_collector_reads_this_process():
    collector = host.HostCollector()
    assert isinstance(collector, Collector)
    assert collector.probe().ok
    collector.watch([os.getpid()])
    record = collector.sample(ALL_TIERS)[0]
    assert record["k"] == "host"
    assert record["mem_total_bytes"] > record["mem_available_bytes"] > 0
    (row,) = record["processes"]
    assert row["pid"] == os.getpid()
    assert row["rss_bytes"] > 1 << 20
    assert row["shm_total_bytes"] > 0
    collector.close()


def test_cgroup_version_2(tmp_path, monkeypatch):
    inner = tmp_path / "pod" / "box"
    inner.mkdir(parents=True)
    for folder, limit, usage, kills in ((tmp_path / "pod", "2000", "1900", 4), (inner, "max", "1800", 1)):
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text(usage + "\n")
        (folder / "memory.events").write_text(f"low 0\nmax 7\noom 9\noom_kill {kills}\n")
    monkeypatch.setattr(cgroups, "_paths", lambda pid, where: [(str(inner), 2), (str(tmp_path / "pod"), 2)])
    group = cgroups.of_process(1)
    assert group == cgroups.MemoryGroup(str(tmp_path / "pod"), 2, 2000, 1900, 4, 7), (
        "the tightest ancestor counts"
    )


def test_cgroup_version_1(tmp_path):
    (tmp_path / "memory.limit_in_bytes").write_text("1610612736\n")
    (tmp_path / "memory.usage_in_bytes").write_text("5\n")
    (tmp_path / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert cgroups.read(str(tmp_path), 1) == cgroups.MemoryGroup(str(tmp_path), 1, 1610612736, 5, 2, 0)
    (tmp_path / "memory.limit_in_bytes").write_text("9223372036854771712\n")
    unlimited = cgroups.read(str(tmp_path), 1)
    assert unlimited is not None
    assert unlimited.limit_bytes is None
    assert cgroups.read(str(tmp_path / "missing"), 2) is None


def test_mounts_of_a_hybrid_host():
    text = (
        "36 32 0:33 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
        "37 32 0:34 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\nnonsense\n"
    )
    assert cgroups.mounts(text) == cgroups.Mounts("/sys/fs/cgroup/memory", "/sys/fs/cgroup/unified")


def test_kernel_log_lines():
    record = kernellog.parse(KILLED)
    assert record is not None
    assert (record["k"], record["pid"], record["scope"]) == ("oom_kill", 5857, "cgroup")
    assert record["anon_rss_bytes"] == 1521004 * 1024
    assert record["shmem_rss_bytes"] == 2048 * 1024
    machine = kernellog.parse(
        "Out of memory: Killed process 9 (a b) total-vm:1kB, anon-rss:2kB, file-rss:0kB"
    )
    assert machine is not None
    assert machine["scope"] == "machine"
    xid = kernellog.parse(
        "NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
    )
    assert xid is not None
    assert (xid["code"], xid["bus"]) == (79, "0000:3b:00")
    assert "pid" not in xid
    fault = kernellog.parse("traps: python[18351] trap int3 ip:7f")
    assert fault is not None
    assert fault["pid"] == 18351
    assert kernellog.parse("usb 1-1: new device") is None


@given(st.text())
def test_kernel_log_parser_never_raises(text):
    kernellog.parse(text)
    record = kernellog.parse(KILLED + text)
    assert record is not None
    assert record["text"].isprintable()


def test_kernel_log_that_may_not_be_read(tmp_path):
    reader = kernellog.Reader(str(tmp_path / "none"))
    assert reader.read().records == []
    assert "cannot be read" in reader.read().why


@pytest.mark.parametrize(
    ("code", "expected"), [("import os; os._exit(7)", 7), ("import os; os.kill(os.getpid(), 9)", -9)]
)
def test_exit_status_of_a_process_that_is_not_our_child(code, expected):
    # The middle process is the parent and reaps; we only watch the grandchild.
    middle = subprocess.Popen(
        [
            sys.executable,
            "-c",
            "import subprocess, sys, time\n"
            f"p = subprocess.Popen([sys.executable, '-c', 'import sys; sys.stdin.read();' + {code!r}], "
            "stdin=subprocess.PIPE)\n"
            "print(p.pid, flush=True); sys.stdin.readline(); p.stdin.close(); p.wait()",
        ],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert middle.stdout is not None
    assert middle.stdin is not None
    with middle:
        pid = int(middle.stdout.readline())
        watch = pidfd.ExitWatch()
        assert watch.add(pid)
        assert watch.poll() == []
        middle.stdin.write("\n")
        middle.stdin.flush()
        ends: list[pidfd.End] = []
        deadline = time.monotonic() + 10
        while not ends and time.monotonic() < deadline:
            ends = watch.poll(0.1)
    assert [end.pid for end in ends] == [pid]
    if ends[0].status is None:
        pytest.skip("this kernel does not tell the exit status of a foreign process (before 6.15)")
    assert ends[0].status == expected


def test_private_pages_are_told_apart_from_resident_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    own = procfs.private_bytes(os.getpid())
    if own is None:
        pytest.skip("this kernel does not tell private pages")
    assert 0 < own <= 64 << 30
    assert procfs.private_bytes(2**22 + 1) is None
    collector = host.HostCollector()
    collector.watch([os.getpid()])

    def seen(*tiers: Tier) -> bool:
        return "private_bytes" in collector.sample(frozenset(tiers))[0]["processes"][0]

    try:
        assert seen(Tier.FAST)
        monkeypatch.setattr(host, "_QUICK_BYTES", 0)
        assert not seen(Tier.FAST)
        assert seen(Tier.FAST, Tier.SLOW)
        monkeypatch.setattr(host, "_MOST_BYTES", 0)
        assert not seen(Tier.FAST, Tier.SLOW)
    finally:
        collector.close()
