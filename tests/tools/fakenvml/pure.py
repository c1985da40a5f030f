# ruff: noqa: N802  # the methods carry NVML's own names
"""A fake without a compiler: a Python object in the place of `pynvml.nvmlLib`.

nvidia-ml-py passes ctypes references and buffers to whatever it finds there, so the binding's own code
(versions, sizes of structures, exceptions) still runs. Replacing the module pynvml instead would hide exactly
those errors.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pynvml as nvml

_HANDLE_BASE = 1
_NONE32 = 0xFFFFFFFF


class PureLib:
    """GPUs as dictionaries: name, uuid, total, used, reserved, util, power_mw, temp, procs [(pid, used)].

    Args:
        gpus: one dictionary per GPU; change them while it is in use.
        missing: functions that this driver does not have.
        errors: function -> error code it returns.
    """

    def __init__(
        self,
        gpus: Sequence[dict[str, Any]],
        missing: Sequence[str] = (),
        errors: Mapping[str, int] | None = None,
    ) -> None:
        self.gpus, self.missing, self.errors = list(gpus), set(missing), dict(errors or {})
        self.calls: dict[str, int] = {}

    def __getattr__(self, name: str) -> Callable[..., int]:
        method = getattr(type(self), f"_{name}", None)
        if method is None or name in self.missing:
            raise AttributeError(name)

        def call(*args: Any) -> int:
            self.calls[name] = self.calls.get(name, 0) + 1
            return self.errors.get(name) or method(self, *args) or nvml.NVML_SUCCESS

        return call

    def _gpu(self, handle: Any) -> dict[str, Any]:
        value = ctypes.cast(handle, ctypes.c_void_p).value
        assert value is not None
        return self.gpus[value - _HANDLE_BASE]

    def _nvmlInitWithFlags(self, flags: Any) -> None: ...

    def _nvmlShutdown(self) -> None: ...

    def _nvmlErrorString(self, code: Any) -> bytes:
        return b"error"

    def _nvmlDeviceGetCount_v2(self, count: Any) -> None:
        count._obj.value = len(self.gpus)

    def _nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int | None:
        if index.value >= len(self.gpus):
            return int(nvml.NVML_ERROR_INVALID_ARGUMENT)
        value = ctypes.c_void_p(index.value + _HANDLE_BASE)
        ctypes.memmove(ctypes.byref(handle._obj), ctypes.byref(value), ctypes.sizeof(value))
        return None

    def _nvmlSystemGetDriverVersion(self, buffer: Any, size: Any) -> None:
        buffer.value = b"580.65.06"

    def _nvmlDeviceGetName(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = str(self._gpu(handle).get("name", "Fake GPU")).encode()

    def _nvmlDeviceGetUUID(self, handle: Any, buffer: Any, size: Any) -> None:
        buffer.value = str(self._gpu(handle)["uuid"]).encode()

    def _nvmlDeviceGetPciInfo_v3(self, handle: Any, info: Any) -> None:
        index = self.gpus.index(self._gpu(handle))
        info._obj.busId = f"00000000:{0x10 + index:02X}:00.0".encode()

    def _nvmlDeviceGetMemoryInfo_v2(self, handle: Any, memory: Any) -> None:
        gpu, out = self._gpu(handle), memory._obj
        out.total, out.reserved, out.used = gpu["total"], gpu.get("reserved", 0), gpu["used"]
        out.free = out.total - out.used - out.reserved

    def _nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> None:
        gpu, out = self._gpu(handle), memory._obj
        out.total, out.used = gpu["total"], gpu["used"] + gpu.get("reserved", 0)
        out.free = out.total - out.used

    def _nvmlDeviceGetUtilizationRates(self, handle: Any, rates: Any) -> None:
        rates._obj.gpu, rates._obj.memory = self._gpu(handle).get("util", 0), 0

    def _nvmlDeviceGetPowerUsage(self, handle: Any, power: Any) -> None:
        power._obj.value = self._gpu(handle).get("power_mw", 0)

    def _nvmlDeviceGetTemperature(self, handle: Any, sensor: Any, out: Any) -> None:
        out._obj.value = self._gpu(handle).get("temp", 0)

    def _nvmlDeviceGetClockInfo(self, handle: Any, kind: Any, out: Any) -> None:
        out._obj.value = self._gpu(handle).get("sm_clock", 0)

    def _nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, rows: Any) -> int | None:
        found = self._gpu(handle).get("procs", [])
        if rows is None:
            count._obj.value = len(found)
            return int(nvml.NVML_ERROR_INSUFFICIENT_SIZE) if found else None
        for row, (pid, used) in zip(rows, found, strict=False):
            row.pid, row.usedGpuMemory, row.gpuInstanceId, row.computeInstanceId = pid, used, _NONE32, _NONE32
        count._obj.value = len(found)
        return None
