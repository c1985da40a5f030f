"""Evidence about a job from outside of it, out of the records in `host/*.jsonl`.

Each function answers one question for the diagnosis with facts and the sentence that reports them, or with
nothing. None of them reads the machine: they work on a session that was copied from elsewhere.
"""

from __future__ import annotations

import signal
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oomscope.collect.base import Record
from oomscope.units import GIB, MIB, format_bytes

#: Default size of /dev/shm in a Docker container (docker run --shm-size).
DOCKER_SHM_BYTES = 64 * MIB
#: Memory of a GPU that nobody in NVML's list holds; below it is the driver's own.
UNACCOUNTED_BYTES = GIB


@dataclass(frozen=True, slots=True)
class Fact:
    """One finding from outside: `code` for rules, `text` for people, `values` with units in their names."""

    code: str
    text: str
    source: str
    values: Mapping[str, Any] = field(default_factory=dict)
    certain: bool = True


def host_oom_kill(
    records: Sequence[Record], pids: Collection[int], exit_code: int | None = None
) -> Fact | None:
    """Did the kernel kill one of `pids` for host memory?

    The kernel log naming the pid is proof; a counter of the job's cgroup that rose while the job ran is
    nearly that, and a bare SIGKILL is none (`exit_meaning`).
    """
    since = _watched_since(records)
    for record in records:
        if record["k"] == "oom_kill" and record.get("pid") in pids and record["t"] >= since:
            where = "its cgroup" if record.get("scope") == "cgroup" else "the whole machine"
            resident = record.get("anon_rss_bytes", 0) + record.get("shmem_rss_bytes", 0)
            return Fact(
                "host_oom_kill",
                f"the kernel killed process {record['pid']} ({record.get('name')}), which held "
                f"{format_bytes(resident)} of "
                f"host memory, because {where} was out of memory",
                "kernel log",
                {
                    "pid": record["pid"],
                    "resident_bytes": resident,
                    "scope": record.get("scope"),
                    "t": record["t"],
                },
            )
    rise = cgroup_kills(records)
    if rise is not None and (exit_code is None or _is_kill(exit_code)):
        return rise
    return None


def _watched_since(records: Iterable[Record]) -> int:
    """When watching began, less a few seconds: the kernel log is older, and pids are reused."""
    return min((record["t"] for record in records if record["k"] == "host"), default=0) - 5 * 10**9


def cgroup_kills(records: Sequence[Record]) -> Fact | None:
    """Did the kill counter of the job's cgroup rise while it ran?"""
    first: dict[str, Record] = {}
    last: dict[str, Record] = {}
    for record in records:
        group = record.get("cgroup") if record["k"] == "host" else None
        if isinstance(group, dict) and "path" in group:
            first.setdefault(group["path"], group)
            last[group["path"]] = group
    for path, group in last.items():
        before, after = first[path].get("oom_kills", 0), group.get("oom_kills", 0)
        if after > before:
            limit = group.get("limit_bytes")
            size = f" (limit {format_bytes(limit)})" if limit else ""
            return Fact(
                "host_oom_kill",
                f"the kernel killed {after - before} process(es) because the cgroup {path}{size} was out of "
                "memory",
                f"{path}, oom_kill {before} → {after}",
                {"kills": after - before, "limit_bytes": limit, "path": path},
            )
    return None


def exit_statuses(records: Iterable[Record]) -> dict[int, int | None]:
    """By pid, the status of watched processes that ended (negative = signal, None = unknown)."""
    return {record["pid"]: record.get("status") for record in records if record["k"] == "process_end"}


def exit_meaning(code: int) -> Fact:
    """What an exit code or signal can mean, all of it, when nothing else tells."""
    if _is_kill(code):
        return Fact(
            "sigkill",
            "the process was killed with SIGKILL: the host's out-of-memory killer, a scheduler (scancel, "
            "time limit), "
            "systemd-oomd or earlyoom, an eviction by Kubernetes, or a person",
            "exit status",
            {"exit_code": code},
            certain=False,
        )
    if code in (-signal.SIGBUS, 128 + signal.SIGBUS):
        return Fact(
            "sigbus",
            "the process died of SIGBUS: most often /dev/shm is full",
            "exit status",
            {"exit_code": code},
            False,
        )
    if code in (-signal.SIGTERM, 128 + signal.SIGTERM):
        return Fact(
            "sigterm",
            "the process was asked to end (SIGTERM): by its launcher after another rank failed, or by a "
            "scheduler",
            "exit status",
            {"exit_code": code},
        )
    return Fact("exit", f"the process ended with exit code {code}", "exit status", {"exit_code": code})


def _is_kill(code: int) -> bool:
    return code in (-signal.SIGKILL, 128 + signal.SIGKILL)


def shared_memory_full(records: Sequence[Record], min_free_share: float = 0.05) -> Fact | None:
    """Was /dev/shm, which DataLoader workers use, full or nearly so?"""
    worst: tuple[float, int, int] | None = None
    for record in records:
        if record["k"] != "host":
            continue
        for row in (record, *record.get("processes", ())):
            total, free = row.get("shm_total_bytes"), row.get("shm_free_bytes")
            if total and free is not None and (worst is None or free / total < worst[0]):
                worst = (free / total, free, total)
    if worst is None or worst[0] > min_free_share:
        return None
    _, free, total = worst
    docker = " (Docker's default size: docker run --shm-size=16g)" if total == DOCKER_SHM_BYTES else ""
    return Fact(
        "shm_full",
        f"/dev/shm had {format_bytes(free)} of {format_bytes(total)} left{docker}; DataLoader workers pass "
        "batches through it",
        "statvfs /dev/shm",
        {"free_bytes": free, "total_bytes": total},
    )


def foreign_tenants(records: Sequence[Record], pids: Collection[int], uuids: Collection[str]) -> list[Fact]:
    """Processes outside the job that held memory on its GPUs; the largest reading of each."""
    peak: dict[tuple[str, int], Record] = {}
    for record in _gpu_records(records, uuids):
        for row in record.get("processes", ()):
            if row["pid"] not in pids:
                key = (record["uuid"], row["pid"])
                if key not in peak or (row.get("used_bytes") or 0) > (peak[key].get("used_bytes") or 0):
                    peak[key] = {**row, "gpu": record["gpu"]}
    return [
        Fact(
            "foreign_tenant",
            f"process {pid}, not of this job, held {_size(row.get('used_bytes'))} of GPU {row['gpu']}",
            "NVML process list",
            {"pid": pid, "uuid": uuid, "used_bytes": row.get("used_bytes")},
        )
        for (uuid, pid), row in sorted(peak.items(), key=lambda item: -(item[1].get("used_bytes") or 0))
    ]


def leftover(records: Sequence[Record], uuids: Collection[str]) -> list[Fact]:
    """Memory of a GPU that no listed process accounts for: of an ended process, or of a hidden one."""
    facts = []
    for uuid, record in _last_by_gpu(records, uuids).items():
        held = [row.get("used_bytes") for row in record.get("processes", ())]
        if "used_bytes" not in record or "processes" not in record or None in held:
            continue
        rest = record["used_bytes"] - sum(value or 0 for value in held)
        if "driver_reserved_bytes" not in record:
            rest -= (
                600 * MIB
            )  # old drivers count their own share as used: 300 to 600 MiB on data-centre cards
        if rest > UNACCOUNTED_BYTES:
            facts.append(
                Fact(
                    "leftover",
                    f"{format_bytes(rest)} of GPU {record['gpu']} belong to no process that NVML lists: a "
                    "child of an ended "
                    "job keeps the device open, or the holder is in another container (fuser -v "
                    "/dev/nvidia*)",
                    "NVML used − Σ processes",
                    {"uuid": uuid, "unaccounted_bytes": rest},
                )
            )
    return facts


def crowded(records: Sequence[Record], rank_by_pid: Mapping[int, int | None]) -> list[Fact]:
    """GPUs on which several ranks have a context: usually a forgotten `torch.cuda.set_device`."""
    contexts: dict[str, set[int]] = {}
    index: dict[str, int] = {}
    for record in records:
        if record["k"] == "gpu":
            index[record["uuid"]] = record["gpu"]
            for row in record.get("processes", ()):
                if row["pid"] in rank_by_pid and row.get("type") == "compute":
                    contexts.setdefault(record["uuid"], set()).add(row["pid"])
    return [
        Fact(
            "crowded",
            f"{len(pids)} ranks ({', '.join(sorted(str(rank_by_pid[pid]) for pid in pids))}) have a context "
            "on GPU "
            f"{index[uuid]}: call torch.cuda.set_device(local_rank) before the first CUDA call",
            "NVML process list",
            {"uuid": uuid, "pids": sorted(pids)},
        )
        for uuid, pids in sorted(contexts.items())
        if len(pids) > 1
    ]


def non_torch(
    records: Sequence[Record], uuid: str, pid: int, reserved_bytes: int, at_ns: int | None = None
) -> Fact | None:
    """GPU memory of `pid` outside PyTorch's allocator: context, NCCL, cuDNN and cuBLAS, other libraries.

    Args:
        records: of host/*.jsonl.
        uuid: the GPU.
        pid: the rank.
        reserved_bytes: the allocator's reserved bytes at that moment.
        at_ns: the reading nearest to this time is used; the last one when None.
    """
    best: tuple[int, int] | None = None
    for record in _gpu_records(records, {uuid}):
        for row in record.get("processes", ()):
            if row["pid"] == pid and row.get("used_bytes") is not None:
                distance = 0 if at_ns is None else abs(record["t"] - at_ns)
                if best is None or distance <= best[0]:
                    best = (distance, row["used_bytes"])
    if best is None:
        return None
    outside = best[1] - reserved_bytes
    if outside < 0:  # the readings are not of the same moment
        return None
    return Fact(
        "non_torch",
        f"{format_bytes(outside)} of the process's {format_bytes(best[1])} are not PyTorch's: CUDA context "
        "(300 to 700 MiB), "
        "NCCL, cuDNN and cuBLAS workspaces, other libraries",
        "NVML process memory − reserved",
        {"non_torch_bytes": outside, "process_bytes": best[1]},
    )


def xids(records: Iterable[Record]) -> list[Fact]:
    """GPU errors that the driver reported while the job ran."""
    seen: set[tuple[object, int]] = set()
    facts = []
    for record in records:
        if record["k"] == "xid":
            key = (record.get("uuid") or record.get("bus"), int(record.get("code", 0)))
            if key not in seen:
                seen.add(key)
                where = (
                    f"GPU {record['gpu']}"
                    if record.get("gpu") is not None
                    else f"the GPU at {record.get('bus', '?')}"
                )
                facts.append(
                    Fact(
                        "xid",
                        f"the driver reported Xid {key[1]} on {where}",
                        str(record.get("source")),
                        dict(record),
                    )
                )
    return facts


def _gpu_records(records: Iterable[Record], uuids: Collection[str]) -> list[Record]:
    return [record for record in records if record["k"] == "gpu" and record.get("uuid") in uuids]


def _last_by_gpu(records: Iterable[Record], uuids: Collection[str]) -> dict[str, Record]:
    last: dict[str, Record] = {}
    for record in _gpu_records(records, uuids):
        last[record["uuid"]] = {**last.get(record["uuid"], {}), **record}
    return last


def _size(used: int | None) -> str:
    return "an unknown amount" if used is None else format_bytes(used)
