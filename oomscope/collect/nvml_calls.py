"""Single NVML questions with their version traps, and what NVML's errors mean.

nvidia-ml-py looks every function up by name: one that the driver lacks raises NVMLError 13, and an
unversioned call with an older driver raises NVMLLibraryMismatchError, which is *not* an NVMLError.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import pynvml as nvml

from oomscope.collect.base import Availability, Record

#: Raised by the binding when a versioned structure is newer than the driver; absent in older bindings.
MismatchError: type[Exception] = getattr(
    nvml, "NVMLLibraryMismatchError", type("NoMismatch", (Exception,), {})
)

#: Answers that do not change from one sample to the next.
PERMANENT = frozenset(
    {
        nvml.NVML_ERROR_NOT_SUPPORTED,
        nvml.NVML_ERROR_FUNCTION_NOT_FOUND,
        nvml.NVML_ERROR_NO_PERMISSION,
        nvml.NVML_ERROR_INVALID_ARGUMENT,
    }
)

#: Bits of nvmlClocksEventReasons (nvml.h) that mean "slower than it could be"; idle (0x1) is not one.
THROTTLE = {
    0x2: "application_clocks",
    0x4: "sw_power_cap",
    0x8: "hw_slowdown",
    0x10: "sync_boost",
    0x20: "sw_thermal",
    0x40: "hw_thermal",
    0x80: "hw_power_brake",
    0x100: "display_clocks",
}

_INIT_HELP = {
    nvml.NVML_ERROR_LIBRARY_NOT_FOUND: (
        "no_library",
        "libnvidia-ml.so.1 was not found: there is no NVIDIA driver here, or the container was started "
        "without it "
        "(docker run --gpus all; NVIDIA_DRIVER_CAPABILITIES must include utility)",
    ),
    nvml.NVML_ERROR_DRIVER_NOT_LOADED: (
        "no_driver",
        "the NVIDIA kernel module is not loaded (modprobe nvidia), or this container has no /dev/nvidiactl",
    ),
    nvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH: (
        "mismatch",
        "the driver was upgraded without a reboot, so library and kernel module differ; running jobs go on: "
        "reboot, or reload the nvidia modules",
    ),
    nvml.NVML_ERROR_NO_PERMISSION: (
        "permission",
        "no permission on /dev/nvidia*: check the device cgroup of the container and the group of the "
        "device files",
    ),
    nvml.NVML_ERROR_UNKNOWN: (
        "unknown",
        "NVML answers 'Unknown Error'; in a container a `systemctl daemon-reload` on the host leaves this "
        "behind: "
        "restart the container (NVIDIA/nvidia-container-toolkit#48)",
    ),
    nvml.NVML_ERROR_GPU_IS_LOST: (
        "lost",
        "a GPU has fallen off the bus (Xid 79 in the kernel log): reboot this machine",
    ),
}


def initialise() -> Availability:
    """nvmlInit, with the reason and the remedy when it fails."""
    if not hasattr(nvml, "nvmlInitWithFlags"):
        return Availability(
            False,
            "shadowed",
            "another package has overwritten the module pynvml: pip uninstall pynvml nvidia-ml-py3, "
            "then pip install --force-reinstall nvidia-ml-py",
        )
    try:
        nvml.nvmlInit()
    except nvml.NVMLError as error:
        code, text = _INIT_HELP.get(error.value, ("other", f"NVML cannot be started: {error}"))
        return Availability(False, code, text)
    return Availability(True)


def text_of(value: str | bytes) -> str:
    return value.decode(errors="replace") if isinstance(value, bytes) else value


def memory(handle: Any) -> Record:
    """Sizes in bytes. The second version of the call (driver 510) separates what the driver holds back."""
    try:
        info = nvml.nvmlDeviceGetMemoryInfo(handle, version=nvml.nvmlMemory_v2)
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        info = nvml.nvmlDeviceGetMemoryInfo(handle)
        return {"total_bytes": info.total, "used_bytes": info.used, "free_bytes": info.free}
    return {
        "total_bytes": info.total,
        "used_bytes": info.used,
        "free_bytes": info.free,
        "driver_reserved_bytes": info.reserved,
    }


def utilization(handle: Any) -> Record:
    rates = nvml.nvmlDeviceGetUtilizationRates(handle)
    return {"utilization_pct": rates.gpu, "memory_utilization_pct": rates.memory}


def power(handle: Any) -> Record:
    return {"power_mw": nvml.nvmlDeviceGetPowerUsage(handle)}


def power_limit(handle: Any) -> Record:
    return {"power_limit_mw": nvml.nvmlDeviceGetEnforcedPowerLimit(handle)}


def temperature(handle: Any) -> Record:
    """Core temperature; nvmlDeviceGetTemperature goes away with CUDA 14 (deprecation note in nvml.h)."""
    try:
        return {"temperature_c": nvml.nvmlDeviceGetTemperatureV(handle, nvml.NVML_TEMPERATURE_GPU)}
    except (AttributeError, MismatchError):
        pass
    except nvml.NVMLError as error:
        if error.value != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
    return {"temperature_c": nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)}


def clock(handle: Any) -> Record:
    return {"sm_clock_mhz": nvml.nvmlDeviceGetClockInfo(handle, nvml.NVML_CLOCK_SM)}


def throttle(handle: Any) -> Record:
    """Why the clock is lower than it could be; the call was renamed in driver 535."""
    try:
        bits = nvml.nvmlDeviceGetCurrentClocksEventReasons(handle)
    except (AttributeError, nvml.NVMLError) as error:
        if getattr(error, "value", nvml.NVML_ERROR_FUNCTION_NOT_FOUND) != nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
            raise
        bits = nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)
    return {"throttle": [name for bit, name in THROTTLE.items() if bits & bit]}


def ecc(handle: Any) -> Record:
    count = nvml.nvmlDeviceGetTotalEccErrors(
        handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    )
    return {"ecc_uncorrected": count}


def remapped_rows(handle: Any) -> Record:
    return {"remapped_rows_pending": bool(nvml.nvmlDeviceGetRemappedRows(handle)[2])}


def pcie(handle: Any) -> Record:
    """KiB/s over the last 20 ms; each of the two calls blocks for those 20 ms (NVML reference)."""
    return {
        "pcie_tx_kib_s": nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_TX_BYTES),
        "pcie_rx_kib_s": nvml.nvmlDeviceGetPcieThroughput(handle, nvml.NVML_PCIE_UTIL_RX_BYTES),
    }


def nvlink(handle: Any) -> Record:
    """Data counters of all links together, KiB since the driver was loaded."""
    every_link = 0xFFFFFFFF
    fields = nvml.nvmlDeviceGetFieldValues(
        handle,
        [
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_TX, every_link),
            (nvml.NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_RX, every_link),
        ],
    )
    for field in fields:
        if field.nvmlReturn != nvml.NVML_SUCCESS:
            raise nvml.NVMLError(field.nvmlReturn)
    return {"nvlink_tx_kib": fields[0].value.ullVal, "nvlink_rx_kib": fields[1].value.ullVal}


class _LongProcessInfo(ctypes.Structure):
    """The 32-byte record that drivers 530.41 to 535.54 write into the `_v3` list, which has 24-byte ones."""

    _fields_ = [
        ("pid", ctypes.c_uint),
        ("usedGpuMemory", ctypes.c_ulonglong),
        ("gpuInstanceId", ctypes.c_uint),
        ("computeInstanceId", ctypes.c_uint),
        ("usedGpuCcProtectedMemory", ctypes.c_ulonglong),
    ]


_NO_INSTANCE = 0xFFFFFFFF
_NO_VALUE = 0xFFFFFFFFFFFFFFFF


class ProcessLists:
    """Who holds memory on a device, over all versions of the call.

    One object per driver: it remembers which version answers.
    """

    def __init__(self) -> None:
        self._long_records = _exists("nvmlDeviceGetConfComputeMemSizeInfo") and not _exists(
            "nvmlDeviceGetRunningProcessDetailList"
        )
        self._version: dict[str, str] = {}

    def read(self, handle: Any, kind: str) -> list[Record]:
        """Processes with a context of `kind` ("Compute", "Graphics"); `used_bytes` may be None (hidden)."""
        candidates = [self._version[kind]] if kind in self._version else ["_v3", "_v2"]
        for version in candidates:
            name = f"nvmlDeviceGet{kind}RunningProcesses{version}"
            try:
                if version == "_v3" and self._long_records:
                    rows = _long_list(name, handle)
                else:
                    rows = getattr(nvml, name)(handle)
            except (AttributeError, MismatchError):
                continue
            except nvml.NVMLError as error:
                if error.value == nvml.NVML_ERROR_FUNCTION_NOT_FOUND:
                    continue
                raise
            self._version[kind] = version
            return [_row(row, kind) for row in rows]
        raise nvml.NVMLError(nvml.NVML_ERROR_FUNCTION_NOT_FOUND)


def _row(row: Any, kind: str) -> Record:
    used = row.usedGpuMemory
    out: Record = {
        "pid": int(row.pid),
        "used_bytes": None if used is None or used == _NO_VALUE else int(used),
        "type": kind.lower(),
    }
    if row.gpuInstanceId is not None and row.gpuInstanceId != _NO_INSTANCE:
        out["gpu_instance"] = int(row.gpuInstanceId)
    return out


def _long_list(name: str, handle: Any) -> list[_LongProcessInfo]:
    call: Callable[..., int] = nvml._nvmlGetFunctionPointer(name)
    count = ctypes.c_uint(0)
    result = call(handle, ctypes.byref(count), None)
    for _ in range(3):  # processes may start between the two calls
        if result != nvml.NVML_ERROR_INSUFFICIENT_SIZE:
            break
        count.value = count.value * 2 + 5
        rows = (_LongProcessInfo * count.value)()
        result = call(handle, ctypes.byref(count), rows)
        if result == nvml.NVML_SUCCESS:
            return list(rows[: count.value])
    if result == nvml.NVML_SUCCESS:
        return []
    raise nvml.NVMLError(result)


def _exists(name: str) -> bool:
    try:
        nvml._nvmlGetFunctionPointer(name)
    except nvml.NVMLError:
        return False
    return True
