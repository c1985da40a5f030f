"""The host collector: memory of the machine, of the job's cgroup and processes, the kernel's reports."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping

from oomscope.collect import cgroups, kernellog, pidfd, procfs
from oomscope.collect.base import API, Availability, Device, Record, Tier
from oomscope.units import KIB

_QUICK_BYTES, _MOST_BYTES = 1 << 30, 16 << 30
"""Counting a process's private pages walks its page table under its memory lock, about 2 ms a GiB: up to the first size
it is done at each sample, up to the second every ten seconds, beyond never."""


class HostCollector:
    """Reads /proc and cgroups. Works everywhere on Linux; without rights single fields are absent."""

    api = API
    name = "host"

    def __init__(self) -> None:
        self._pids: set[int] = set()
        self._mounts = cgroups.mounts()
        self._log = kernellog.Reader()
        self._exits = pidfd.ExitWatch()
        self._log_told = False
        self._job_group: cgroups.MemoryGroup | None = None

    def probe(self) -> Availability:
        if procfs.read_stat(1) is None and procfs.read_text("/proc/meminfo") is None:
            return Availability(
                False, "no_proc", "/proc is not mounted: host memory and processes cannot be read"
            )
        return Availability(True)

    def devices(self) -> list[Device]:
        return []

    def watch(self, pids: Iterable[int]) -> None:
        self._pids = set(pids)
        for pid in self._pids:
            self._exits.add(pid)

    def sample(self, tiers: frozenset[Tier]) -> list[Record]:
        slow = Tier.SLOW in tiers
        record: Record = {"k": "host", **memory_of_machine()}
        if (group := self._group()) is not None:
            record["cgroup"] = group.to_json()
        record["processes"] = [
            row for pid in sorted(self._pids) if (row := self._process(pid, slow)) is not None
        ]
        return [record, *self._ends(), *self._kernel()]

    def _group(self) -> cgroups.MemoryGroup | None:
        """The cgroup that may kill the job, which need not be ours; its counter matters most after the job has died.

        The kernel moves a process that exits up to the root group, so a way up is not followed.
        """
        known = self._job_group
        for pid in sorted(self._pids):
            group = cgroups.of_process(pid, self._mounts)
            if group is None or (known is not None and known.path.startswith(group.path + "/")):
                continue
            self._job_group = group
            return group
        if known is not None:
            return cgroups.read(known.path, known.version)
        return cgroups.of_process("self", self._mounts)

    def _process(self, pid: int, slow: bool) -> Record | None:
        stat = procfs.read_stat(pid)
        if stat is None:
            return None
        shared = procfs.read_text(f"/proc/{pid}/statm")
        fields = shared.split() if shared else []
        row: Record = {
            "pid": pid,
            "start_ticks": stat.start_ticks,
            "state": stat.state,
            "rss_bytes": stat.rss_bytes,
            "rss_shared_bytes": int(fields[2]) * procfs.PAGE_BYTES if len(fields) > 2 else 0,
            "threads": stat.threads,
            "cpu_ticks": stat.cpu_ticks,
        }
        if stat.rss_bytes <= (_MOST_BYTES if slow else _QUICK_BYTES):
            private = procfs.private_bytes(pid)
            if private is not None:
                row["private_bytes"] = private
        if slow and (space := procfs.shared_memory(pid)) is not None:
            row["shm_total_bytes"], row["shm_free_bytes"] = space
        if slow and (group := cgroups.of_process(pid, self._mounts)) is not None:
            row["cgroup"] = group.path
        return row

    def _ends(self) -> list[Record]:
        return [
            {
                "k": "process_end",
                "pid": end.pid,
                "start_ticks": end.start_ticks,
                "status": end.status,
                "source": "pidfd"
                if end.status is not None
                else "pidfd: the kernel does not tell the status (before 6.15)",
            }
            for end in self._exits.poll()
        ]

    def _kernel(self) -> list[Record]:
        log = self._log.read()
        # The log counts from boot like CLOCK_MONOTONIC; what happened before we looked keeps its own time.
        boot_ns = time.time_ns() - time.monotonic_ns()
        out: list[Record] = [{"t": boot_ns + boot_us * 1000, **record} for boot_us, record in log.records]
        if log.why and not self._log_told:
            self._log_told = True
            out.append(
                {
                    "k": "collector",
                    "name": "kernel log",
                    "state": "unavailable",
                    "code": "forbidden",
                    "why": log.why,
                }
            )
        return out

    def events(self, timeout_s: float) -> list[Record]:
        return []

    def visible(self, environ: Mapping[str, str]) -> list[str]:
        return []

    def close(self) -> None:
        self._log.close()
        self._exits.close()


def memory_of_machine() -> Record:
    """Memory of the whole machine in bytes, /dev/shm, memory pressure and the kernel's kill counter."""
    info = {}
    for line in (procfs.read_text("/proc/meminfo") or "").splitlines():
        name, _, rest = line.partition(":")
        value = rest.split()
        if value and value[0].isdigit():
            info[name] = int(value[0]) * KIB
    record: Record = {
        "mem_total_bytes": info.get("MemTotal", 0),
        "mem_available_bytes": info.get("MemAvailable", 0),
        "swap_used_bytes": info.get("SwapTotal", 0) - info.get("SwapFree", 0),
    }
    if (space := procfs.shared_memory()) is not None:
        record["shm_total_bytes"], record["shm_free_bytes"] = space
    if (pressure := _pressure(procfs.read_text("/proc/pressure/memory"))) is not None:
        record["memory_pressure_pct"] = pressure
    for line in (procfs.read_text("/proc/vmstat") or "").splitlines():
        if line.startswith("oom_kill "):
            record["oom_kills"] = int(line.split()[1])
    return record


def _pressure(text: str | None) -> float | None:
    """Share of the last ten seconds in which some task waited for memory, in percent (PSI `some avg10`)."""
    for line in (text or "").splitlines():
        if line.startswith("some "):
            for item in line.split():
                if item.startswith("avg10="):
                    return float(item[6:])
    return None
