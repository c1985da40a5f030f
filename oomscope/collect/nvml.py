"""The NVIDIA collector: what NVML says about every GPU, asked no more often than it is worth.

A call that a GPU answers with "not supported" is remembered per device and not asked again for a minute; a
GPU that fell off the bus is reported as lost while the others go on. It must run in a child process: calls
into a broken driver hang.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pynvml as nvml

from oomscope.collect import gpumap, nvml_calls
from oomscope.collect.base import API, Availability, Device, Record, Tier

#: A call that was refused for good is tried again after this time: MIG may be switched, rights may change.
REPROBE_S = 60.0
#: "Unknown error" and timeouts pass; after this many in a row the call is treated as refused.
MAX_FAILURES = 5
#: The event mask nvmlEventTypeXidCriticalError of nvml.h.
_XID_EVENT = 0x8

Call = Callable[[Any], Record]


@dataclass(slots=True)
class CallMemory:
    """Which calls one device refuses, and why."""

    refused: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Call -> (monotonic time of the next try, reason)."""
    failures: dict[str, int] = field(default_factory=dict)

    def may_ask(self, name: str, now: float) -> bool:
        entry = self.refused.get(name)
        return entry is None or now >= entry[0]

    def answered(self, name: str) -> None:
        self.refused.pop(name, None)
        self.failures.pop(name, None)

    def failed(self, name: str, reason: str, now: float, *, permanent: bool) -> None:
        self.failures[name] = self.failures.get(name, 0) + 1
        if permanent or self.failures[name] >= MAX_FAILURES:
            self.refused[name] = (now + REPROBE_S, reason)

    def reasons(self) -> dict[str, str]:
        return {name: reason for name, (_, reason) in self.refused.items()}


@dataclass(slots=True)
class _Gpu:
    device: Device
    handle: Any
    memory: CallMemory = field(default_factory=CallMemory)


class NvmlCollector:
    """Samples every GPU and MIG instance of this machine."""

    api = API
    name = "nvidia"

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._gpus: list[_Gpu] = []
        self._lists: nvml_calls.ProcessLists | None = None
        self._event_set: Any = None
        self._pcie_turn = 0
        self._fast: dict[str, Call] = {
            "memory": nvml_calls.memory,
            "utilization": nvml_calls.utilization,
            "compute": lambda handle: {"processes": self._processes(handle, "Compute")},
        }
        self._medium: dict[str, Call] = {
            "power": nvml_calls.power,
            "temperature": nvml_calls.temperature,
            "clock": nvml_calls.clock,
            "throttle": nvml_calls.throttle,
        }
        self._slow: dict[str, Call] = {
            "power_limit": nvml_calls.power_limit,
            "graphics": lambda handle: {"graphics_processes": self._processes(handle, "Graphics")},
            "ecc": nvml_calls.ecc,
            "remapped_rows": nvml_calls.remapped_rows,
            "nvlink": nvml_calls.nvlink,
        }

    def _processes(self, handle: Any, kind: str) -> list[Record]:
        if self._lists is None:
            self._lists = nvml_calls.ProcessLists()
        return self._lists.read(handle, kind)

    def probe(self) -> Availability:
        availability = nvml_calls.initialise()
        if not availability.ok:
            return availability
        try:
            self._gpus = _enumerate()
        except (nvml.NVMLError, nvml_calls.MismatchError) as error:
            return Availability(False, "other", f"NVML started, but the GPUs cannot be listed: {error}")
        if not self._gpus:
            return Availability(
                False, "no_gpu", "the NVIDIA driver is loaded, but it shows no GPU to this process"
            )
        return Availability(True)

    def driver(self) -> str:
        try:
            return nvml_calls.text_of(nvml.nvmlSystemGetDriverVersion())
        except nvml.NVMLError:
            return "unknown"

    def devices(self) -> list[Device]:
        return [gpu.device for gpu in self._gpus]

    def sample(self, tiers: frozenset[Tier]) -> list[Record]:
        records = [self._sample(gpu, tiers) for gpu in self._gpus]
        if Tier.SLOW in tiers:
            self._sample_pcie(records)
        return records

    def _sample(self, gpu: _Gpu, tiers: frozenset[Tier]) -> Record:
        device = gpu.device
        record: Record = {
            "k": "gpu",
            "gpu": device.index,
            "uuid": device.uuid,
            "name": device.name,
            "bus": device.bus,
        }
        if device.parent_uuid is not None:
            record["mig_parent_uuid"], record["gpu_instance"] = device.parent_uuid, device.instance
        if gpu.handle is not None:
            if Tier.FAST in tiers:
                self._ask(gpu, self._fast, record)
            if Tier.MEDIUM in tiers:
                self._ask(gpu, self._medium, record)
            if Tier.SLOW in tiers:
                self._ask(gpu, self._slow, record)
                record["unsupported"] = gpu.memory.reasons()
            if "graphics_processes" in record:
                _merge_graphics(record)
        record["state"] = gpu.device.state
        return record

    def _sample_pcie(self, records: list[Record]) -> None:
        """PCIe counters of one GPU per slow tick, in turn: two calls of 20 ms each, 320 ms for eight GPUs."""
        physical = [
            pair for pair in zip(self._gpus, records, strict=True) if pair[0].device.parent_uuid is None
        ]
        gpu, record = physical[self._pcie_turn % len(physical)]
        self._pcie_turn += 1
        if gpu.handle is not None:
            self._ask(gpu, {"pcie": nvml_calls.pcie}, record)

    def _ask(self, gpu: _Gpu, calls: dict[str, Call], record: Record) -> None:
        now = self._clock()
        for name, call in calls.items():
            if gpu.device.state != "ok" or not gpu.memory.may_ask(name, now):
                continue
            try:
                record.update(call(gpu.handle))
            except nvml_calls.MismatchError as error:
                gpu.memory.failed(name, str(error), now, permanent=True)
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_GPU_IS_LOST:
                    gpu.device = replace(gpu.device, state="lost")
                else:
                    gpu.memory.failed(name, str(error), now, permanent=error.value in nvml_calls.PERMANENT)
            else:
                gpu.memory.answered(name)

    def events(self, timeout_s: float) -> list[Record]:
        """Xid errors, waited for in the driver."""
        if self._event_set is None:
            self._event_set = self._register()
        if self._event_set is False:
            time.sleep(timeout_s)
            return []
        try:
            event = nvml.nvmlEventSetWait_v2(self._event_set, int(timeout_s * 1000))
        except nvml.NVMLError as error:
            if error.value != nvml.NVML_ERROR_TIMEOUT:
                self._event_set = False
            return []
        if not event.eventType & _XID_EVENT:
            return []
        record: Record = {"k": "xid", "code": int(event.eventData), "source": "nvml"}
        try:
            record["uuid"] = nvml_calls.text_of(nvml.nvmlDeviceGetUUID(event.device))
        except nvml.NVMLError:
            record["uuid"] = None
        record["gpu"] = next(
            (gpu.device.index for gpu in self._gpus if gpu.device.uuid == record["uuid"]), None
        )
        return [record]

    def _register(self) -> Any:
        """An event set with every GPU that supports Xid events, False when none does (some containers)."""
        try:
            event_set = nvml.nvmlEventSetCreate()
        except nvml.NVMLError:
            return False
        registered = 0
        for gpu in self._gpus:
            if gpu.device.parent_uuid is None and gpu.handle is not None:
                try:
                    nvml.nvmlDeviceRegisterEvents(gpu.handle, _XID_EVENT, event_set)
                    registered += 1
                except nvml.NVMLError:
                    continue
        return event_set if registered else False

    def watch(self, pids: Iterable[int]) -> None:
        """NVML lists all processes anyway."""

    def visible(self, environ: Mapping[str, str]) -> list[str]:
        return gpumap.cuda_visible(environ.get("CUDA_VISIBLE_DEVICES"), self.devices())

    def close(self) -> None:
        try:
            nvml.nvmlShutdown()
        except nvml.NVMLError:
            return


def _merge_graphics(record: Record) -> None:
    """A process with both contexts is one row of type compute."""
    known = {row["pid"] for row in record.get("processes", [])}
    extra = [row for row in record.pop("graphics_processes") if row["pid"] not in known]
    if extra or "processes" in record:
        record["processes"] = [*record.get("processes", []), *extra]


def _enumerate() -> list[_Gpu]:
    found = []
    for index in range(nvml.nvmlDeviceGetCount()):
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            state = "lost" if error.value == nvml.NVML_ERROR_GPU_IS_LOST else f"error: {error}"
            found.append(_Gpu(Device(f"unknown-{index}", index, "unknown GPU", "?", 0, state=state), None))
            continue
        device = _describe(handle, index)
        found.append(_Gpu(device, handle))
        found += _instances(handle, device)
    return found


def _describe(handle: Any, index: int) -> Device:
    return Device(
        uuid=nvml_calls.text_of(nvml.nvmlDeviceGetUUID(handle)),
        index=index,
        name=nvml_calls.text_of(nvml.nvmlDeviceGetName(handle)),
        bus=nvml_calls.text_of(nvml.nvmlDeviceGetPciInfo(handle).busId),
        total_bytes=int(nvml_calls.memory(handle)["total_bytes"]),
    )


def _instances(handle: Any, parent: Device) -> list[_Gpu]:
    """MIG instances of a GPU; [] when MIG is off or unknown to it."""
    try:
        if not nvml.nvmlDeviceGetMigMode(handle)[0]:
            return []
        slots = nvml.nvmlDeviceGetMaxMigDeviceCount(handle)
    except nvml.NVMLError:
        return []
    found = []
    for slot in range(slots):
        try:
            instance = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, slot)
            device = Device(
                uuid=nvml_calls.text_of(nvml.nvmlDeviceGetUUID(instance)),
                index=parent.index,
                name=nvml_calls.text_of(nvml.nvmlDeviceGetName(instance)),
                bus=parent.bus,
                total_bytes=int(nvml_calls.memory(instance)["total_bytes"]),
                parent_uuid=parent.uuid,
                instance=int(nvml.nvmlDeviceGetGpuInstanceId(instance)),
            )
        except nvml.NVMLError:
            continue
        found.append(_Gpu(device, instance))
    return found
