"""Jobs of containers and of Slurm, attached to from the host.

The container is made of what runtimes are made of: namespaces for pids, mounts and the host name, a root of its own
with the interpreter at another path, a /tmp of its own, and a cgroup with an id in its path. `docker`, `squeue` and
`scontrol` are small programs that answer as the real ones do.
"""

from __future__ import annotations

import os
import platform
import secrets
import shutil
import stat
import sys
from pathlib import Path

import pytest

from oomscope.launch.attach_session import AttachSession
from oomscope.launch.attachment import Options, Rung
from oomscope.launch.discover import discover

from .conftest import JOBS, lines, oomscope, wait_until

pytestmark = [
    pytest.mark.integration,
    pytest.mark.skipif(
        platform.machine() != "x86_64" or sys.platform != "linux",
        reason="the ptrace injector is for x86-64 Linux",
    ),
]

# $1 root of the container, $2 its cgroup, $3 the virtual environment, $4 folder of the jobs, $5 the interpreter's own
# installation, which the environment points to.
CONTAINER = """
set -e
echo $$ > "$2/cgroup.procs"
mount --make-rprivate /
for each in usr bin sbin lib lib32 lib64 etc; do
    [ -e "/$each" ] || continue
    mkdir -p "$1/$each"
    mount --rbind "/$each" "$1/$each"
done
mkdir -p "$1/proc" "$1/dev" "$1/tmp" "$1/opt/env" "$1/opt/jobs"
mount -t proc proc "$1/proc"
mount --rbind /dev "$1/dev"
mount -t tmpfs tmpfs "$1/tmp"
mount --rbind "$3" "$1/opt/env"
mount --rbind "$4" "$1/opt/jobs"
mkdir -p "$1$5"
mount --rbind "$5" "$1$5"
hostname inside
exec chroot "$1" /opt/env/bin/python /opt/jobs/train.py
"""


@pytest.fixture
def cgroup():
    """cgroup(name) -> a new cgroup in any hierarchy that lets us make one; removed at the end."""
    made = []

    def make(name):
        for base in (
            "/sys/fs/cgroup",
            "/sys/fs/cgroup/unified",
            "/sys/fs/cgroup/memory",
            "/sys/fs/cgroup/pids",
        ):
            path = Path(base, name)
            if not Path(base, "cgroup.procs").exists():
                continue
            try:
                path.mkdir(parents=True)
            except OSError:
                continue
            made.append((Path(base), path))
            return path
        pytest.skip("no cgroup can be made here")

    yield make
    for base, path in made:
        wait_until(lambda path=path: not (path / "cgroup.procs").read_text())
        while path != base:
            path.rmdir()
            path = path.parent


@pytest.fixture
def programs(tmp_path, monkeypatch):
    """programs(name=shell text) puts programs first on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")

    def make(**texts):
        for name, text in texts.items():
            path = folder / name
            path.write_text(f"#!/bin/sh\n{text}\n")
            path.chmod(path.stat().st_mode | stat.S_IXUSR)

    return make


def docker(name, identifier):
    """Docker with one container, in its own words."""
    return (
        f'case "$1 $5" in\n"inspect {name}") echo {identifier};;\n'
        f'inspect*) echo; echo "Error: No such object: $5" >&2; exit 1;;\n'
        f"ps*) echo {name};;\nesac"
    )


@pytest.fixture
def container(tmp_path, cgroup, start):
    """A job inside a container: (id, process outside)."""
    unshare = shutil.which("unshare")
    if unshare is None or os.geteuid() != 0:
        pytest.skip("needs root and unshare")
    identifier = secrets.token_hex(32)
    group = cgroup(f"docker/{identifier}")
    root = tmp_path / "root"
    root.mkdir()
    environment = Path(sys.prefix)
    if not (environment / "bin" / "python").exists() or environment == Path("/usr"):
        pytest.skip("needs a virtual environment")
    command = (unshare, "--pid", "--fork", "--mount", "--uts", "--kill-child", "sh", "-c", CONTAINER, "sh")
    process = start(
        env={"SECONDS": "90", "HEARTBEAT": "/tmp/beat"},
        prefix=(*command, str(root), str(group), str(environment), str(JOBS), sys.base_prefix),
    )
    return identifier, process


def test_a_container_by_id_and_by_name(container, programs):
    identifier, process = container
    programs(docker=docker("trainer", identifier))
    wait_until(lambda: _trains(identifier), 60)
    done = oomscope("attach", "container:trainer", "--once", "--json")
    assert done.returncode == 0, done.stderr
    session = AttachSession(discover(f"container:{identifier[:12]}"), Options(agent=True))
    session.climb()
    session.wait_for_readings(20)
    (each,) = session.ranks
    assert each.rung is Rung.AGENT, each.why_not_higher
    assert each.rank.container == identifier
    assert each.rank.namespace_pid != each.rank.pid
    state = session.state_of(each)
    assert state.host == "inside"
    assert state.hello["executable"].startswith("/opt/env/")
    assert each.place.is_spool
    assert state.step > 0
    session.close()
    assert not each.place.outside.exists(), "nothing is left in the container's /tmp"
    assert process.poll() is None


def _trains(identifier):
    from oomscope.errors import OomscopeError

    try:
        (rank,) = discover(f"container:{identifier}").ranks
    except (OomscopeError, ValueError):
        return False
    return lines(Path(f"/proc/{rank.pid}/root/tmp/beat.0")) > 2


def test_a_name_that_the_runtime_does_not_know(programs):
    programs(docker=docker("trainer", "a" * 64))
    done = oomscope("attach", "container:trainee", "--once")
    assert done.returncode == 5
    assert "docker knows no container trainee" in done.stderr
    assert "running: trainer" in done.stderr
    done = oomscope("attach", "container:trainer", "--once")
    assert done.returncode == 5
    assert "no process of it is visible here" in done.stderr


def test_a_name_with_no_runtime_to_ask(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    done = oomscope("attach", "container:trainer", "--once")
    assert done.returncode == 5
    assert "docker, podman and nerdctl are not on PATH" in done.stderr
    assert "give its id" in done.stderr


def test_a_runtime_that_refuses(programs):
    programs(
        docker='echo "permission denied while trying to connect to the Docker daemon socket" >&2; exit 1'
    )
    done = oomscope("attach", "container:trainer", "--once")
    assert done.returncode == 5
    assert "docker could not look up the container trainer: permission denied" in done.stderr


def test_a_task_of_slurm_by_job_and_array_task(start):
    slurm = {
        "SLURM_JOB_ID": "4243", "SLURM_STEP_ID": "0", "SLURM_NTASKS": "2", "SLURM_LOCALID": "0", "SLURM_PROCID": "1",
        "SLURM_ARRAY_JOB_ID": "4242", "SLURM_ARRAY_TASK_ID": "7",
    }  # fmt: skip
    job = start(str(JOBS / "stuck.py"), env=slurm)
    job.stdout.readline()
    for target in ("slurm:4243", "slurm:4242_7"):
        found = discover(target)
        assert [(rank.pid, rank.rank, rank.world_size) for rank in found.ranks] == [(job.pid, 1, 2)]


def test_a_task_of_slurm_that_only_slurm_knows(start, programs):
    """With proctrack/linuxproc there is no cgroup, and another user's environment may not be read."""
    job = start(str(JOBS / "stuck.py"))
    job.stdout.readline()
    programs(
        scontrol='[ "$1 $2" = "listpids 4242" ] || exit 1\n'
        f'printf "PID      JOBID    STEPID   LOCALID GLOBALID\\n{job.pid} 4242 0 0 0\\n-1 4242 1 0 0\\n"'
    )
    (rank,) = discover("slurm:4242").ranks
    assert rank.pid == job.pid


@pytest.mark.parametrize(
    ("squeue", "words"),
    [
        ('echo "RUNNING|node[01-02]"', "it runs on node[01-02]"),
        ('echo "PENDING|"', "it is PENDING"),
        (
            'echo "slurm_load_jobs error: Invalid job id specified" >&2; exit 1',
            "it has ended, or never existed",
        ),
        ('echo "slurm_load_jobs error: Unable to contact slurm controller" >&2; exit 1', "Unable to contact"),
    ],
)
def test_a_job_of_slurm_that_is_not_here(programs, squeue, words):
    programs(squeue=squeue)
    done = oomscope("attach", "slurm:4242", "--once")
    assert done.returncode == 5
    assert "no process of Slurm job 4242 on this host" in done.stderr
    assert words in done.stderr


def test_what_is_no_job_number():
    done = oomscope("attach", "slurm:train", "--once")
    assert done.returncode == 5
    assert "slurm:train is not the number of a job" in done.stderr
