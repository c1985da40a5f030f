"""Reads /proc: what the kernel says about one process, with a reason where it refuses.

Without rights on a process its command line, state and resident size can still be read; its environment
cannot. A process is identified by (pid, start_ticks) everywhere, because pids are reused.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from oomscope.units import KIB

PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
TICKS_PER_S = os.sysconf("SC_CLK_TCK")

#: A container id in a cgroup path: docker, cri-containerd, crio, libpod, kubepods.
_CONTAINER = re.compile(
    r"(?:docker[-/]|crio-|cri-containerd[-:]|libpod-|/kubepods[^:]*/(?:pod[\w-]+/)?)([0-9a-f]{64})"
)
_SLURM = re.compile(r"/job_(\d+)(?:/|$)")
_GPU_FILE = re.compile(r"/dev/(nvidia\d+|dri/renderD\d+|kfd|davinci\d+)$")


@dataclass(frozen=True, slots=True)
class Stat:
    """Fields of /proc/PID/stat and statm."""

    pid: int
    parent: int
    comm: str
    state: str
    """One letter: R running, S sleeping, D uninterruptible, T stopped, t traced, Z zombie, X dead."""
    start_ticks: int
    """Clock ticks after boot; with the pid, the identity of a process."""
    cpu_ticks: int
    threads: int
    rss_bytes: int


@dataclass(frozen=True, slots=True)
class Process:
    """One process as seen from outside."""

    stat: Stat
    uid: int
    command: tuple[str, ...]
    environ: dict[str, str] | None
    """The environment it was started with; None when it may not be read (`why` says so)."""
    namespace_pid: int
    """Its pid inside its own pid namespace."""
    cgroup: str
    why: str = ""
    status: dict[str, str] = field(default_factory=dict, repr=False)

    @property
    def pid(self) -> int:
        return self.stat.pid

    @property
    def parent(self) -> int:
        return self.stat.parent

    @property
    def comm(self) -> str:
        return self.stat.comm

    @property
    def container(self) -> str | None:
        """64 hexadecimal digits, or None outside a known container runtime."""
        found = _CONTAINER.findall(self.cgroup)
        return str(found[-1]) if found else None

    @property
    def slurm_job(self) -> str | None:
        if self.environ and "SLURM_JOB_ID" in self.environ:
            return self.environ["SLURM_JOB_ID"]
        found = _SLURM.search(self.cgroup)
        return found.group(1) if found else None


def read_text(path: str) -> str | None:
    """Content of a small file, or None when it cannot be read."""
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read()
    except OSError:
        return None


def read_stat(pid: int) -> Stat | None:
    """State of `pid`, None when there is none. The command name may hold spaces and parentheses."""
    line = read_text(f"/proc/{pid}/stat")
    if not line or not 0 <= line.find("(") < line.rfind(")"):
        return None
    comm = line[line.index("(") + 1 : line.rindex(")")]
    rest = line[line.rindex(")") + 2 :].split()
    try:
        return Stat(
            pid=pid,
            parent=int(rest[1]),
            comm=comm,
            state=rest[0],
            start_ticks=int(rest[19]),
            cpu_ticks=int(rest[11]) + int(rest[12]),
            threads=int(rest[17]),
            rss_bytes=int(rest[21]) * PAGE_BYTES,
        )
    except (IndexError, ValueError):
        return None


def read_status(pid: int) -> dict[str, str]:
    """/proc/PID/status as a table; {} when there is no such process."""
    text = read_text(f"/proc/{pid}/status") or ""
    return {key: value.strip() for key, _, value in (line.partition(":") for line in text.splitlines())}


def read_environ(pid: int) -> tuple[dict[str, str] | None, str]:
    """The environment `pid` was started with, or None and why it may not be read."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            raw = file.read()
    except PermissionError:
        return (
            None,
            f"the environment of process {pid} may not be read: it belongs to another user, or is protected",
        )
    except OSError as error:
        return None, f"the environment of process {pid} cannot be read: {error.strerror}"
    pairs = (item.partition("=") for item in raw.decode(errors="replace").split("\0") if "=" in item)
    return {key: value for key, _, value in pairs}, ""


def read_process(pid: int) -> Process | None:
    """Everything readable about `pid`; None when it does not exist (any more)."""
    stat = read_stat(pid)
    if stat is None:
        return None
    status = read_status(pid)
    raw = read_text(f"/proc/{pid}/cmdline") or ""
    environ, why = read_environ(pid)
    uids = status.get("Uid", "0").split()
    return Process(
        stat=stat,
        uid=int(uids[0]) if uids else 0,
        command=tuple(part for part in raw.split("\0") if part),
        environ=environ,
        namespace_pid=int((status.get("NSpid") or str(pid)).split()[-1]),
        cgroup=read_text(f"/proc/{pid}/cgroup") or "",
        why=why,
        status=status,
    )


def all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdigit())


def all_processes() -> dict[int, Process]:
    """Every process of this pid namespace; about 50 us each."""
    found = (read_process(pid) for pid in all_pids())
    return {process.pid: process for process in found if process is not None}


def same_process(pid: int, start_ticks: int) -> bool:
    """Is `pid` still the process that had this start time?"""
    stat = read_stat(pid)
    return stat is not None and stat.start_ticks == start_ticks


def accelerator_files(pid: int) -> list[str]:
    """Device files of accelerators that `pid` holds open; [] without the right to look."""
    found: set[str] = set()
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return []
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if _GPU_FILE.match(target):
            found.add(target)
    return sorted(found)


def in_initial_pid_namespace() -> bool:
    """False in a container: there the pids that a GPU driver reports are not ours.

    Source: PROC_PID_INIT_INO in the kernel's include/linux/proc_ns.h.
    """
    try:
        return os.readlink("/proc/self/ns/pid") == "pid:[4026531836]"
    except OSError:
        return False


def private_bytes(pid: int) -> int | None:
    """Bytes of `pid` that no other process shares; None where the kernel does not tell (rights, before 4.14)."""
    text = read_text(f"/proc/{pid}/smaps_rollup")
    total, found = 0, False
    for line in (text or "").splitlines():
        name, _, rest = line.partition(":")
        if name in ("Private_Clean", "Private_Dirty", "Private_Hugetlb"):
            value = rest.split()
            if value and value[0].isdigit():
                total, found = total + int(value[0]) * KIB, True
    return total if found else None


def shared_memory(pid: int | None = None) -> tuple[int, int] | None:
    """Total and free bytes of /dev/shm as `pid` sees it in its own mount namespace; None when unreadable."""
    try:
        space = os.statvfs("/dev/shm" if pid is None else f"/proc/{pid}/root/dev/shm")
    except OSError:
        return None
    return space.f_blocks * space.f_frsize, space.f_bavail * space.f_frsize
