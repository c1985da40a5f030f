"""Checks of the machine beneath the GPUs: kernel log, memory limit, shared memory; and what a check is."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from oomscope.collect import cgroups, kernellog, outside, procfs
from oomscope.units import format_bytes

OK, WARN, ERROR = "ok", "warn", "error"


@dataclass(frozen=True, slots=True)
class Check:
    """One line of `oomscope doctor`."""

    id: str
    title: str
    status: str
    """ok, warn (something cannot be used) or error (something is broken)."""
    text: str
    remedy: str = ""

    def to_json(self) -> dict[str, Any]:
        return asdict(self)


def kernel_log() -> Check:
    """Can kills and Xid be read?"""
    reader = kernellog.Reader()
    try:
        log = reader.read()
    finally:
        reader.close()
    title = "Kernel log"
    if log.why:
        return Check(
            "kernel_log", title, WARN, log.why,
            "without it a kill by the host's OOM killer is inferred from counters; sudo sysctl kernel.dmesg_restrict=0",
        )  # fmt: skip
    kills = sum(record["k"] == "oom_kill" for _, record in log.records)
    xids = sum(record["k"] == "xid" for _, record in log.records)
    text = f"readable; since boot {kills} out-of-memory kill{'s' if kills != 1 else ''}, {xids} Xid"
    return Check("kernel_log", title, WARN if xids else OK, text, "see: oomscope top" if xids else "")


def memory_limit() -> Check:
    """How much host memory the cgroup leaves, and whether the kernel killed for it."""
    title = "Host memory limit"
    group = cgroups.of_process()
    total = procfs.read_text("/proc/meminfo") or ""
    size = next(
        (int(line.split()[1]) * 1024 for line in total.splitlines() if line.startswith("MemTotal")), 0
    )
    if group is None:
        return Check("cgroup", title, OK, f"no memory cgroup; the machine has {format_bytes(size, 1)}")
    if group.limit_bytes is None:
        return Check(
            "cgroup",
            title,
            OK,
            f"cgroup v{group.version} without a limit; the machine has {format_bytes(size, 1)}",
        )
    left = group.limit_bytes - group.usage_bytes
    text = f"cgroup v{group.version}: {format_bytes(group.limit_bytes, 1)}, {format_bytes(left, 1)} left"
    if group.oom_kills:
        remedy = "the kernel killed for this limit: raise it, or use fewer DataLoader workers"
        return Check("cgroup", title, WARN, f"{text}, {group.oom_kills} kills", remedy)
    return Check("cgroup", title, OK, text)


def shared_memory() -> Check:
    """Is there room for what DataLoader workers pass?"""
    title = "/dev/shm"
    space = procfs.shared_memory()
    if space is None:
        return Check(
            "shm",
            title,
            WARN,
            "there is no /dev/shm: DataLoader workers cannot pass tensors",
            "mount a tmpfs there",
        )
    total, free = space
    text = f"{format_bytes(free, 1)} of {format_bytes(total, 1)} free"
    if total <= outside.DOCKER_SHM_BYTES or free < total * 0.05:
        return Check(
            "shm", title, WARN, text, "DataLoader workers need more: docker run --shm-size=16g, or --ipc=host"
        )
    return Check("shm", title, OK, text)
