"""Deaths of real processes, seen from outside: a cgroup out of memory, a full /dev/shm."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from oomscope.collect import cgroups, outside
from oomscope.collect.recorder import HostRecorder, read_host_records

from .conftest import oomscope, wait_until

pytestmark = pytest.mark.integration

LIMIT = 200 << 20
JOB_LIMIT = 1536 << 20
HOG = """
import os, sys, time
print("ready", flush=True)
sys.stdin.readline()
hog = bytearray()
while True:
    hog += b"x" * (8 << 20)
    time.sleep(0.005)
"""


@pytest.fixture
def memory_cgroup(request):
    """A cgroup with a limit (LIMIT, or the parameter), version 1 or 2, whichever can be made here."""
    bytes_ = getattr(request, "param", LIMIT)
    where = cgroups.mounts()
    own = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    candidates = []
    for hierarchy, controllers, path in own:
        if "memory" in controllers.split(",") and where.v1:
            candidates += [
                (Path(where.v1 + path), "memory.limit_in_bytes"),
                (Path(where.v1), "memory.limit_in_bytes"),
            ]
        elif hierarchy == "0" and where.v2:
            candidates.append((Path(where.v2 + path), "memory.max"))
    for parent, limit in candidates:
        folder = parent / f"oomscope-test-{os.getpid()}"
        try:
            folder.mkdir()
            (folder / limit).write_text(str(bytes_))
        except OSError:
            if folder.exists():
                folder.rmdir()
            continue
        yield folder
        deadline = time.monotonic() + 5
        while folder.exists() and time.monotonic() < deadline:
            try:
                folder.rmdir()
            except OSError:
                time.sleep(0.05)
        return
    pytest.skip("no memory cgroup can be made here (needs root and a writable hierarchy)")


def test_a_kill_by_the_cgroup(memory_cgroup, tmp_path):
    with HostRecorder(tmp_path, names=("host",), period_s=0.1) as recorder:
        # The parent reaps the hog; we only watch it.
        middle = subprocess.Popen(
            [
                sys.executable, "-c",
                f"import subprocess, sys\np = subprocess.Popen([sys.executable, '-c', {HOG!r}], "
                "stdin=subprocess.PIPE)\n"
                "print(p.pid, flush=True); sys.stdin.readline(); p.stdin.write(b'go\\n'); p.stdin.flush(); "
                "sys.exit(p.wait())",
            ],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        with middle:
            pid = int(middle.stdout.readline())
            (memory_cgroup / "cgroup.procs").write_text(str(pid))
            recorder.watch([pid])
            wait_until(lambda: any(row.get("processes") for row in read_host_records(tmp_path)))
            middle.stdin.write("\n")
            middle.stdin.flush()
            middle.wait(30)
        recorder.settle()
    records = read_host_records(tmp_path)
    fact = outside.host_oom_kill(records, {pid}, -9)
    assert fact is not None, records[-3:]
    assert fact.code == "host_oom_kill"
    status = outside.exit_statuses(records).get(pid)
    assert status in (-9, None)
    kills = outside.cgroup_kills(records)
    assert kills is not None, [row.get("cgroup") for row in records if row["k"] == "host"]
    assert kills.values["limit_bytes"] == LIMIT
    assert "200.00 MiB" in kills.text


HUNGRY = """
import torch, torch.distributed as dist
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.Adam(model.parameters())
kept = []
while True:
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 1:
        kept.append(torch.ones(8 << 20))
"""


@pytest.mark.parametrize("memory_cgroup", [JOB_LIMIT], indirect=True)
def test_a_torchrun_job_in_a_cgroup_of_one_and_a_half_gib(memory_cgroup, tmp_path, state_folder):
    """Rank 0 only loses its peer; rank 1 is the one that was killed, and the cgroup's limit is the cause."""
    script = tmp_path / "hungry.py"
    script.write_text(HUNGRY)
    done = oomscope(
        "run", "--nproc-per-node", "2", "--standalone", str(script), timeout=120,
        prefix=("sh", "-c", f'echo $$ > {memory_cgroup}/cgroup.procs; exec "$@"', "sh"),
    )  # fmt: skip
    assert done.returncode == 1
    assert "host.host_cgroup" in done.stderr
    assert "the limit is 1.50 GiB" in done.stderr
    (attempt,) = state_folder.glob("sessions/*/attempts/001")
    result = json.loads((attempt / "result.json").read_text())
    assert (result["first_failing_rank"], result["oom"]) == (1, False)
    assert result["ranks"][1]["state"] == "lost"
    findings = json.loads((attempt / "findings.json").read_text())
    assert findings["subject"]["rank"] == 1
    assert findings["verdicts"][0]["rule"] == "host.host_cgroup"


SHM = """
import os
path = "/dev/shm/oomscope-fill"
with open(path, "wb") as file:
    try:
        while True:
            file.write(b"x" * (1 << 20))
            file.flush()
    except OSError:
        pass
print("ready", flush=True)
import time
time.sleep(60)
"""


def test_a_full_dev_shm_is_seen_in_the_jobs_own_mount(target, tmp_path):
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    prefix = (
        unshare,
        "--mount",
        "--",
        "sh",
        "-c",
        'mount -t tmpfs -o size=64m none /dev/shm && exec "$@"',
        "sh",
    )
    process = target(SHM, prefix=prefix)
    with HostRecorder(tmp_path, names=("host",), period_s=0.1) as recorder:
        recorder.watch([process.pid])
        wait_until(lambda: outside.shared_memory_full(read_host_records(tmp_path)))
    fact = outside.shared_memory_full(read_host_records(tmp_path))
    assert fact.values["total_bytes"] == 64 << 20
    assert "--shm-size" in fact.text
