"""Which GPU a rank uses, and how sure that is.

Order of evidence: the UUID that the agent read inside the process; the pid in NVML's process list; the
environment the process was started with, which is a guess and marked as one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from oomscope.collect.base import Device, Record
from oomscope.collect.procfs import in_initial_pid_namespace, read_stat
from oomscope.units import format_bytes


@dataclass(frozen=True, slots=True)
class RankProcess:
    """What is known about a rank for finding its GPU."""

    pid: int
    rank: int | None
    local_rank: int | None
    environ: Mapping[str, str] = field(default_factory=dict)
    agent_uuid: str | None = None


@dataclass(frozen=True, slots=True)
class Assignment:
    """The GPU of a rank; `how`: agent, nvml, only process there, environment (guess), unknown."""

    uuid: str | None
    used_bytes: int | None
    how: str


@dataclass(frozen=True, slots=True)
class GpuMap:
    """Assignments by pid, and what is wrong with them in sentences."""

    by_pid: dict[int, Assignment]
    notes: list[str]


def cuda_visible(value: str | None, devices: Sequence[Device]) -> list[str]:
    """UUIDs in CUDA's order for a value of CUDA_VISIBLE_DEVICES (None: not set).

    As the CUDA runtime does: an invalid entry ends the list, a duplicate makes it empty, and a process sees
    at most one MIG instance (CUDA C++ Programming Guide, environment variables; NVIDIA MIG User Guide).
    """
    physical = [device for device in devices if device.parent_uuid is None]
    if value is None:
        return [device.uuid for device in physical]
    chosen: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        uuid = _match(entry, physical, [device for device in devices if device.parent_uuid is not None])
        if uuid is None:
            break
        if uuid in chosen:
            return []
        chosen.append(uuid)
    instances = [uuid for uuid in chosen if uuid.startswith("MIG-")]
    return instances[:1] if instances else chosen


def _match(entry: str, physical: Sequence[Device], instances: Sequence[Device]) -> str | None:
    if re.fullmatch(r"\d+", entry):
        return next((device.uuid for device in physical if device.index == int(entry)), None)
    if old := re.fullmatch(r"MIG-(GPU-[0-9a-f-]+)/(\d+)/(\d+)", entry):
        return next(
            (
                device.uuid
                for device in instances
                if (device.parent_uuid or "").startswith(old[1]) and device.instance == int(old[2])
            ),
            None,
        )
    if entry.startswith("MIG-"):
        return _unique(device.uuid for device in instances if device.uuid.startswith(entry))
    if entry.startswith("GPU-"):
        return _unique(device.uuid for device in physical if device.uuid.startswith(entry))
    return None


def _unique(found: Iterable[str]) -> str | None:
    matches = list(found)
    return matches[0] if len(matches) == 1 else None


def assign(
    ranks: Collection[RankProcess], devices: Sequence[Device], holders: Mapping[str, Sequence[Record]]
) -> GpuMap:
    """Maps ranks to GPUs.

    Args:
        ranks: of one job on this host.
        devices: as a collector lists them.
        holders: device UUID -> process rows of its `gpu` record.
    """
    outside = not in_initial_pid_namespace()
    by_pid: dict[int, Assignment] = {}
    notes: list[str] = []
    for rank in ranks:
        by_pid[rank.pid] = _one(rank, devices, holders, outside, notes)
    notes += _foreign(ranks, by_pid, holders, devices, outside)
    notes += _crowded(ranks, by_pid, devices)
    return GpuMap(by_pid, sorted(set(notes)))


def _one(
    rank: RankProcess,
    devices: Sequence[Device],
    holders: Mapping[str, Sequence[Record]],
    outside: bool,
    notes: list[str],
) -> Assignment:
    held = sorted(
        (
            (uuid, row["used_bytes"])
            for uuid, rows in holders.items()
            for row in rows
            if row["pid"] == rank.pid
        ),
        key=lambda pair: -(pair[1] or 0),
    )
    if len(held) > 1:
        where = ", ".join(f"GPU {_index(uuid, devices)} ({_size(used)})" for uuid, used in held[1:])
        notes.append(
            f"rank {_name(rank)} (pid {rank.pid}) also holds a context on {where}: each costs some 300 MiB "
            "there; "
            "call torch.cuda.set_device(local_rank) before the first CUDA call"
        )
    if rank.agent_uuid is not None:
        used = next((used for uuid, used in held if uuid == rank.agent_uuid), None)
        return Assignment(rank.agent_uuid, used, "agent")
    if held:
        return Assignment(held[0][0], held[0][1], "nvml")
    visible = cuda_visible(rank.environ.get("CUDA_VISIBLE_DEVICES"), devices)
    place = 0 if len(visible) == 1 else (rank.local_rank or 0)
    if place >= len(visible):
        return Assignment(None, None, "unknown")
    uuid = visible[place]
    models = {device.name for device in devices if device.parent_uuid is None}
    if len(models) > 1 and rank.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
        notes.append(
            "the GPUs are of different models and CUDA_DEVICE_ORDER is not PCI_BUS_ID: CUDA may number them "
            "differently "
            "from NVML, so which GPU a rank uses is a guess until the agent tells"
        )
    rows = holders.get(uuid, ())
    if outside and len(rows) == 1 and read_stat(rows[0]["pid"]) is None:
        return Assignment(uuid, rows[0]["used_bytes"], "only process there")
    return Assignment(uuid, None, "environment (guess)")


def _foreign(
    ranks: Collection[RankProcess],
    by_pid: Mapping[int, Assignment],
    holders: Mapping[str, Sequence[Record]],
    devices: Sequence[Device],
    outside: bool,
) -> list[str]:
    """Notes on processes that are not of the job and hold memory on its GPUs."""
    ours = {rank.pid for rank in ranks}
    used_by_job = {assignment.uuid for assignment in by_pid.values() if assignment.uuid is not None}
    taken = {assignment.uuid for assignment in by_pid.values() if assignment.how == "only process there"}
    notes = []
    for uuid in used_by_job & set(holders):
        for row in holders[uuid]:
            pid, held = row["pid"], _size(row["used_bytes"])
            if pid in ours or uuid in taken:
                continue
            place = f"GPU {_index(uuid, devices)}"
            stat = read_stat(pid)
            if stat is not None:
                notes.append(f"{place}: another process, pid {pid} ({stat.comm}), holds {held}")
            elif outside:
                notes.append(
                    f"{place}: pid {pid} holds {held}; it is a pid of the host, which this container cannot "
                    "see "
                    "(docker run --pid=host, or run oomscope on the host)"
                )
            else:
                notes.append(
                    f"{place}: pid {pid} holds {held} but does not exist any more: a child of it or a hung "
                    "driver call "
                    "keeps the device open (fuser -v /dev/nvidia*)"
                )
    return notes


def _crowded(
    ranks: Collection[RankProcess], by_pid: Mapping[int, Assignment], devices: Sequence[Device]
) -> list[str]:
    """Notes on GPUs that several ranks share for certain."""
    sharers: dict[str, list[RankProcess]] = {}
    for rank in ranks:
        assignment = by_pid[rank.pid]
        if assignment.uuid is not None and assignment.how in ("agent", "nvml"):
            sharers.setdefault(assignment.uuid, []).append(rank)
    return [
        f"{len(group)} ranks ({', '.join(_name(rank) for rank in group)}) use GPU {_index(uuid, devices)}: "
        "torch.cuda.set_device(local_rank) is missing, or CUDA_VISIBLE_DEVICES is the same for all"
        for uuid, group in sharers.items()
        if len(group) > 1
    ]


def _index(uuid: str, devices: Sequence[Device]) -> str:
    for device in devices:
        if device.uuid == uuid:
            return str(device.index) if device.parent_uuid is None else f"{device.index}:{device.instance}"
    return uuid


def _name(rank: RankProcess) -> str:
    return "?" if rank.rank is None else str(rank.rank)


def _size(used: int | None) -> str:
    return "an unknown amount" if used is None else format_bytes(used, 1)


def owner_of(pid: int) -> str:
    """Name of the user of `pid`, or its number, or "?"."""
    import pwd

    try:
        uid = os.stat(f"/proc/{pid}").st_uid
    except OSError:
        return "?"
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)
