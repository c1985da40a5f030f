"""Reads AMD GPUs through amdsmi (ROCm's own binding).

Facts of the binding that decide the code: sizes of `amdsmi_get_gpu_vram_usage` are MiB; numbers that a card does not
have are the string "N/A"; names of keys changed between releases; the process list wants a second between two calls.
Source: AMD SMI Python API reference, releases 6.0 to 7.2.
"""

from __future__ import annotations

import importlib
import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from oomscope.collect.base import Availability, Device, Record, Tier

#: A call that a card refuses is tried again after this many seconds.
REPROBE_S = 60.0
MIB = 1 << 20


@dataclass(slots=True)
class _Card:
    device: Device
    handle: Any
    hip_uuid: str | None
    refused: dict[str, tuple[float, str]] = field(default_factory=dict)


class RocmCollector:
    """Samples every GPU that amdsmi lists, in its order."""

    api = 1
    name = "rocm"

    def __init__(self, smi: Any = None, clock: Callable[[], float] = time.monotonic) -> None:
        """`smi` stands in for the module amdsmi in tests."""
        self._smi = smi
        self._clock = clock
        self._cards: list[_Card] = []

    def probe(self) -> Availability:
        if self._smi is None:
            try:
                self._smi = importlib.import_module("amdsmi")
            except ImportError:
                return Availability(
                    False, "no_library", "amdsmi is not installed: pip install /opt/rocm/share/amd_smi"
                )
            except OSError as error:  # the binding loads libamd_smi.so when it is imported
                return Availability(False, "no_library", f"libamd_smi.so cannot be loaded: {error}")
        try:
            self._smi.amdsmi_init()
            handles = self._smi.amdsmi_get_processor_handles()
            self._cards = [self._describe(handle, index) for index, handle in enumerate(handles)]
        except self._smi.AmdSmiException as error:
            return Availability(
                False,
                "no_driver",
                f"the amdgpu driver does not answer (modprobe amdgpu; groups video and render): {error}",
            )
        if not self._cards:
            return Availability(False, "no_gpu", "amdsmi lists no GPU for this process")
        return Availability(True)

    def _describe(self, handle: Any, index: int) -> _Card:
        smi = self._smi
        memory = smi.amdsmi_get_gpu_vram_usage(handle)
        asic = smi.amdsmi_get_gpu_asic_info(handle)
        uuid = str(smi.amdsmi_get_gpu_device_uuid(handle))
        device = Device(
            uuid=uuid,
            index=index,
            name=str(asic.get("market_name") or "AMD GPU"),
            bus=str(smi.amdsmi_get_gpu_device_bdf(handle)),
            total_bytes=int(memory["vram_total"]) * MIB,
        )
        return _Card(device, handle, self._hip_uuid(handle))

    def _hip_uuid(self, handle: Any) -> str | None:
        """The UUID that HIP and torch show, from ROCm 6.4 on."""
        ask = getattr(self._smi, "amdsmi_get_gpu_enumeration_info", None)
        if ask is None:
            return None
        try:
            return str(ask(handle).get("hip_uuid") or "") or None
        except self._smi.AmdSmiException:
            return None

    def devices(self) -> list[Device]:
        return [card.device for card in self._cards]

    def sample(self, tiers: frozenset[Tier]) -> list[Record]:
        return [self._sample(card, tiers) for card in self._cards]

    def _sample(self, card: _Card, tiers: frozenset[Tier]) -> Record:
        device = card.device
        record: Record = {
            "k": "gpu",
            "gpu": device.index,
            "uuid": device.uuid,
            "name": device.name,
            "bus": device.bus,
            "state": "ok",
        }
        if card.hip_uuid:
            record["hip_uuid"] = card.hip_uuid
        calls: dict[str, Callable[[Any], Record]] = {"memory": self._memory, "utilization": self._activity}
        if Tier.MEDIUM in tiers:
            calls |= {"compute": self._processes, "power": self._power, "temperature": self._temperature}
            calls["clock"] = self._clock_speed
        for name, call in calls.items():
            self._ask(card, name, call, record)
        if Tier.SLOW in tiers:
            record["unsupported"] = {name: reason for name, (_, reason) in card.refused.items()}
        return record

    def _ask(self, card: _Card, name: str, call: Callable[[Any], Record], record: Record) -> None:
        now = self._clock()
        if name in card.refused and now < card.refused[name][0]:
            return
        try:
            record.update(call(card.handle))
        except (self._smi.AmdSmiException, AttributeError, KeyError) as error:
            card.refused[name] = (now + REPROBE_S, str(error) or type(error).__name__)
        else:
            card.refused.pop(name, None)

    def _memory(self, handle: Any) -> Record:
        usage = self._smi.amdsmi_get_gpu_vram_usage(handle)
        total, used = int(usage["vram_total"]) * MIB, int(usage["vram_used"]) * MIB
        return {"total_bytes": total, "used_bytes": used, "free_bytes": total - used}

    def _activity(self, handle: Any) -> Record:
        activity = self._smi.amdsmi_get_gpu_activity(handle)
        return _numbers(
            utilization_pct=activity.get("gfx_activity"), memory_utilization_pct=activity.get("umc_activity")
        )

    def _processes(self, handle: Any) -> Record:
        rows = []
        for process in self._smi.amdsmi_get_gpu_process_list(handle):
            if not isinstance(process, Mapping):  # releases before 6.0 gave handles
                process = self._smi.amdsmi_get_gpu_process_info(handle, process)
            vram = (process.get("memory_usage") or {}).get("vram_mem", process.get("mem"))
            used = int(vram) if isinstance(vram, (int, float)) else None
            rows.append({"pid": int(process["pid"]), "used_bytes": used, "type": "compute"})
        return {"processes": rows}

    def _power(self, handle: Any) -> Record:
        info = self._smi.amdsmi_get_power_info(handle)
        watts = next(
            (
                value
                for key in ("current_socket_power", "average_socket_power")
                if (value := _number(info.get(key)))
            ),
            None,
        )
        limit = _number(info.get("power_limit"))
        # The limit is watts in some releases and microwatts in others; no card takes 10 kW.
        if limit is not None and limit > 10_000:
            limit /= 1e6
        return _numbers(
            power_mw=None if watts is None else watts * 1000,
            power_limit_mw=None if limit is None else limit * 1000,
        )

    def _temperature(self, handle: Any) -> Record:
        smi = self._smi
        value = smi.amdsmi_get_temp_metric(
            handle, smi.AmdSmiTemperatureType.JUNCTION, smi.AmdSmiTemperatureMetric.CURRENT
        )
        return _numbers(temperature_c=value)

    def _clock_speed(self, handle: Any) -> Record:
        info = self._smi.amdsmi_get_clock_info(handle, self._smi.AmdSmiClkType.GFX)
        return _numbers(sm_clock_mhz=info.get("clk", info.get("cur_clk")))

    def events(self, timeout_s: float) -> list[Record]:
        time.sleep(timeout_s)
        return []

    def watch(self, pids: Iterable[int]) -> None:
        """Amdsmi lists all processes anyway."""

    def visible(self, environ: Mapping[str, str]) -> list[str]:
        """ROCR_VISIBLE_DEVICES filters first; the HIP and CUDA variables choose among what is left.

        Source: torch/cuda/__init__.py, _parse_visible_devices and _raw_device_count_amdsmi.
        """
        uuids = [card.device.uuid for card in self._cards]
        hip = {card.hip_uuid: card.device.uuid for card in self._cards if card.hip_uuid}
        chosen = _choose(environ.get("ROCR_VISIBLE_DEVICES"), uuids, hip)
        return _choose(environ.get("HIP_VISIBLE_DEVICES", environ.get("CUDA_VISIBLE_DEVICES")), chosen, hip)

    def close(self) -> None:
        try:
            self._smi.amdsmi_shut_down()
        except self._smi.AmdSmiException:
            return


def _choose(value: str | None, uuids: list[str], hip: Mapping[str, str]) -> list[str]:
    if value is None:
        return uuids
    chosen: list[str] = []
    for entry in (part.strip() for part in value.split(",")):
        if re.fullmatch(r"\d+", entry) and int(entry) < len(uuids):
            uuid = uuids[int(entry)]
        elif hip.get(entry) in uuids:
            uuid = hip[entry]
        else:
            break  # an invalid entry ends the list
        if uuid not in chosen:
            chosen.append(uuid)
    return chosen


def _number(value: Any) -> float | None:
    """A reading, or None for "N/A" and zero, which some cards give for "not measured"."""
    return float(value) if isinstance(value, (int, float)) and value > 0 else None


def _numbers(**values: Any) -> Record:
    return {name: round(value) for name, value in values.items() if isinstance(value, (int, float))}
