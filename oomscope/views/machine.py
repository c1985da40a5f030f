"""The GPUs of this machine and who uses them: rows for the screen, one JSON object, lines of text."""

from __future__ import annotations

import socket
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from oomscope.collect.base import Record, State
from oomscope.collect.gpumap import owner_of
from oomscope.collect.machine import Machine
from oomscope.collect.procfs import in_initial_pid_namespace, read_stat, read_text
from oomscope.collect.supervisor import Status
from oomscope.launch.whose import Owner
from oomscope.live.state import RankState
from oomscope.units import GIB, format_bytes

SCHEMA = "oomscope.machine/1"

#: A reading older than this is marked.
_STALE_NS = 10 * 10**9
#: Numbers of a `gpu` record that go into the JSON as they are.
_FIELDS = (
    "total_bytes", "used_bytes", "free_bytes", "driver_reserved_bytes", "utilization_pct",
    "memory_utilization_pct", "power_mw", "power_limit_mw", "temperature_c", "sm_clock_mhz", "ecc_uncorrected",
    "remapped_rows_pending", "pcie_tx_kib_s", "pcie_rx_kib_s", "nvlink_tx_kib", "nvlink_rx_kib",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class ProcessRow:
    """One process on one GPU."""

    pid: int
    user: str
    command: str
    kind: str
    used_bytes: int | None
    job: str | None
    rank: int | None
    is_worker: bool
    allocated_bytes: int | None
    """As torch in it says; None without an agent."""
    reserved_bytes: int | None
    rss_bytes: int | None
    """Host memory; None for a pid that is not visible."""
    visible: bool
    """False: the pid is one of the host that this container does not see, or the process is gone."""


@dataclass(frozen=True, slots=True)
class GpuRow:
    """One GPU or MIG instance; None where the hardware does not answer."""

    uuid: str
    index: int
    label: str
    """"3", or "0:8" for instance 8 of GPU 0."""
    name: str
    bus: str
    state: str
    record: Record
    processes: tuple[ProcessRow, ...]
    allocated_bytes: int
    """Of the ranks that report."""
    cached_bytes: int
    other_cuda_bytes: int
    """Of training jobs, outside torch's allocator; with a rank that does not report, all that it holds."""
    other_processes_bytes: int
    unaccounted_bytes: int | None
    """Used memory that no listed process holds."""
    stale: bool
    warnings: tuple[str, ...]

    @property
    def used_bytes(self) -> int | None:
        return self.record.get("used_bytes")

    @property
    def total_bytes(self) -> int:
        return int(self.record.get("total_bytes") or 0)


@dataclass(frozen=True, slots=True)
class MachineView:
    """Everything that `oomscope top` shows."""

    host: str
    driver: str | None
    gpus: tuple[GpuRow, ...]
    memory: Record
    collectors: dict[str, dict[str, str]]
    events: tuple[Record, ...]
    notes: tuple[str, ...] = field(default=())


def machine_view(
    machine: Machine,
    statuses: Mapping[str, Status],
    owners: Mapping[int, Owner],
    readings: Mapping[int, RankState],
    now_ns: int | None = None,
) -> MachineView:
    """Joins what the collectors see with what is known of jobs.

    Args:
        machine: newest readings.
        statuses: of the collectors.
        owners: pid -> place in a job.
        readings: pid -> what its agent says.
        now_ns: UTC epoch, for ages.
    """
    now_ns = time.time_ns() if now_ns is None else now_ns
    split = {record.get("mig_parent_uuid") for record in machine.gpus.values()}
    rows = [
        # NVML lists the processes of MIG instances on the parent as well.
        _gpu(machine, {**record, "processes": ()} if uuid in split else record, owners, readings, now_ns)
        for uuid, record in machine.gpus.items()
    ]
    rows.sort(key=lambda row: (row.index, row.record.get("gpu_instance") is not None, row.label))
    return MachineView(
        host=socket.gethostname(),
        driver=next(iter(machine.drivers.values()), None),
        gpus=tuple(rows),
        memory=machine.host,
        collectors={
            name: {"state": status.state.value, "code": status.code, "why": status.why}
            for name, status in statuses.items()
        },
        events=tuple(machine.events),
        notes=tuple(_notes(rows, statuses)),
    )


def _gpu(
    machine: Machine,
    record: Record,
    owners: Mapping[int, Owner],
    readings: Mapping[int, RankState],
    now_ns: int,
) -> GpuRow:
    processes = tuple(_process(row, owners, readings) for row in record.get("processes", ()))
    ours = [row for row in processes if row.reserved_bytes is not None or row.job is not None]
    reserved = sum(row.reserved_bytes or 0 for row in ours)
    allocated = sum(row.allocated_bytes or 0 for row in ours)
    held = sum(row.used_bytes or 0 for row in ours)
    others = sum(row.used_bytes or 0 for row in processes if row not in ours)
    instance = record.get("gpu_instance")
    index = int(record.get("gpu", 0))
    return GpuRow(
        uuid=str(record.get("uuid")),
        index=index,
        label=str(index) if instance is None else f"{index}:{instance}",
        name=str(record.get("name", "?")),
        bus=str(record.get("bus", "?")),
        state=str(record.get("state", "ok")),
        record=record,
        processes=processes,
        allocated_bytes=allocated,
        cached_bytes=max(0, reserved - allocated),
        other_cuda_bytes=max(0, held - reserved),
        other_processes_bytes=others,
        unaccounted_bytes=_unaccounted(record, processes),
        stale=now_ns - int(record.get("t", now_ns)) > _STALE_NS,
        warnings=tuple(_warnings(record, machine.events)),
    )


def _process(row: Record, owners: Mapping[int, Owner], readings: Mapping[int, RankState]) -> ProcessRow:
    pid = int(row["pid"])
    owner, state = owners.get(pid), readings.get(pid)
    stat = read_stat(pid)
    command = (read_text(f"/proc/{pid}/cmdline") or "").replace("\0", " ").strip()
    clean = "".join(char if char.isprintable() else "?" for char in command)
    return ProcessRow(
        pid=pid,
        user=owner_of(pid),
        command=clean or (f"[{stat.comm}]" if stat is not None else ""),
        kind=str(row.get("type", "compute")),
        used_bytes=row.get("used_bytes"),
        job=owner.job if owner is not None else None,
        rank=owner.rank if owner is not None else (state.rank if state is not None else None),
        is_worker=owner is not None and owner.is_worker,
        allocated_bytes=state.allocated_bytes if state is not None else None,
        reserved_bytes=state.reserved_bytes if state is not None else None,
        rss_bytes=stat.rss_bytes if stat is not None else None,
        visible=stat is not None,
    )


def _unaccounted(record: Record, processes: Sequence[ProcessRow]) -> int | None:
    """Used minus held; None when some process's share is hidden or the driver counts its own share as used."""
    if (
        "used_bytes" not in record
        or not isinstance(record.get("processes"), list)
        or "driver_reserved_bytes" not in record
    ):
        return None
    if any(row.used_bytes is None for row in processes):
        return None
    return max(0, int(record["used_bytes"]) - sum(row.used_bytes or 0 for row in processes))


#: Throttle reasons that mean trouble, in words; being at the power cap is normal under load.
_TROUBLE = {
    "hw_slowdown": "slowed down by the hardware",
    "hw_thermal": "too hot: slowed down by the hardware",
    "sw_thermal": "hot: slowed down by the driver",
    "hw_power_brake": "slowed down by the power supply (power brake)",
}


def _warnings(record: Record, events: Sequence[Record] | Any) -> list[str]:
    found = []
    if record.get("state") == "lost":
        found.append("fell off the bus: the machine must be rebooted")
    found += [_TROUBLE[reason] for reason in record.get("throttle", ()) if reason in _TROUBLE]
    if record.get("ecc_uncorrected"):
        found.append(f"{record['ecc_uncorrected']} uncorrected memory errors since the driver was loaded")
    if record.get("remapped_rows_pending"):
        found.append("a bad memory row waits for a reset of the GPU")
    codes = dict.fromkeys(
        event["code"]
        for event in events
        if event.get("k") == "xid" and (event.get("uuid") == record.get("uuid") or _same_bus(event, record))
    )
    found += [f"Xid {code} in the kernel log" for code in codes]
    return found


def _same_bus(event: Record, record: Record) -> bool:
    """The kernel log writes 0000:3b:00, NVML 00000000:3B:00.0."""
    bus = str(event.get("bus", "")).lower().split(".")[0]
    return bool(bus) and str(record.get("bus", "")).lower().split(".")[0].endswith(bus.removeprefix("0000"))


def _notes(rows: Sequence[GpuRow], statuses: Mapping[str, Status]) -> list[str]:
    notes = [
        f"{name}: {status.why}"
        for name, status in statuses.items()
        if status.state not in (State.OK, State.STARTING) and status.why
    ]
    for row in rows:
        place = f"GPU {row.label}"
        notes += [f"{place}: {warning}" for warning in row.warnings]
        if row.unaccounted_bytes is not None and row.unaccounted_bytes > GIB:
            notes.append(
                f"{place}: {format_bytes(row.unaccounted_bytes, 1)} belong to no process that is listed "
                "(an ended process whose child keeps the device open, or another container)"
            )
        ranks = [process for process in row.processes if process.rank is not None and not process.is_worker]
        for job in {process.job for process in ranks}:
            same = sorted(
                {process.rank for process in ranks if process.job == job and process.rank is not None}
            )
            if len(same) > 1:
                notes.append(
                    f"{place}: {len(same)} ranks of {job} ({', '.join(map(str, same))}) have a context here: "
                    "is torch.cuda.set_device(local_rank) missing?"
                )
    hidden = [process.pid for row in rows for process in row.processes if not process.visible]
    if hidden and not in_initial_pid_namespace():
        notes.append(
            "processes marked * are pids of the host, which this container does not see (docker run --pid=host)"
        )
    elif hidden:
        notes.append("processes marked * do not exist any more, and their memory is still held")
    return notes


def machine_json(view: MachineView) -> dict[str, Any]:
    """`oomscope.machine/1`; sizes in bytes, null where not known."""
    return {
        "schema": SCHEMA,
        "host": view.host,
        "driver": view.driver,
        "gpus": [_gpu_json(row) for row in view.gpus],
        "memory": {
            key: value for key, value in view.memory.items() if key not in ("k", "t", "processes", "node")
        },
        "collectors": view.collectors,
        "events": list(view.events),
        "notes": list(view.notes),
    }


def _gpu_json(row: GpuRow) -> dict[str, Any]:
    record = row.record
    return {
        "index": row.index,
        "uuid": row.uuid,
        "name": row.name,
        "bus": row.bus,
        "mig_parent_uuid": record.get("mig_parent_uuid"),
        "gpu_instance": record.get("gpu_instance"),
        "state": row.state,
        "stale": row.stale,
        **{name: record.get(name) for name in _FIELDS},
        "throttle": record.get("throttle"),
        "owners": {
            "torch_allocated_bytes": row.allocated_bytes,
            "torch_cached_bytes": row.cached_bytes,
            "other_cuda_bytes": row.other_cuda_bytes,
            "other_processes_bytes": row.other_processes_bytes,
            "unaccounted_bytes": row.unaccounted_bytes,
        },
        "processes": [
            {
                "pid": process.pid,
                "user": process.user,
                "command": process.command,
                "type": process.kind,
                "used_bytes": process.used_bytes,
                "job": process.job,
                "rank": process.rank,
                "is_worker": process.is_worker,
                "allocated_bytes": process.allocated_bytes,
                "reserved_bytes": process.reserved_bytes,
                "rss_bytes": process.rss_bytes,
                "visible": process.visible,
            }
            for process in row.processes
        ],
        "warnings": list(row.warnings),
        "unsupported": record.get("unsupported", {}),
    }
