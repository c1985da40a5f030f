"""Memory statistics, history, snapshots and limits: what torch.cuda.memory asks of C++."""

from __future__ import annotations

import sys
from typing import Any

import torch


def install(mode: Any) -> None:
    """Put the functions into `torch._C`."""
    for name, function in _functions(mode).items():
        setattr(torch._C, f"_cuda_{name}", function)
    cuda = torch.cuda
    cuda.memory._lazy_init = cuda._lazy_init

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        index = cuda._get_device_index(device, optional=True)
        return mode.device.free_bytes(index), mode.device.total_bytes

    def used(device: Any = None) -> int:
        free, total = mem_get_info(device)
        return total - free

    cuda.mem_get_info = cuda.memory.mem_get_info = mem_get_info
    cuda.device_memory_used = used
    cuda.list_gpu_processes = cuda.memory.list_gpu_processes = lambda device=None: "no processes are running"


def _functions(mode: Any) -> dict[str, Any]:
    device = mode.device
    raw: dict[int, Any] = {}

    def record(
        enabled: str | None = "all", context: str | None = "all", stacks: str = "all",
        max_entries: int = sys.maxsize, clear_history: bool = False, *_rest: Any,
    ) -> None:  # fmt: skip
        device.history.record(enabled, context, max_entries, clear_history)

    def record_legacy(
        enabled: bool, record_context: bool = True, trace_alloc_max_entries: int = 1,
        trace_alloc_record_context: bool = False, *_rest: Any,
    ) -> None:  # fmt: skip
        record(
            "all" if enabled else None, "all" if record_context else None, "python", trace_alloc_max_entries
        )

    def raw_alloc(count: int, stream: int) -> int:
        allocation = mode.tracker.malloc(count, device.current, "other", stream)
        raw[allocation.block.address] = allocation
        return int(allocation.block.address)

    def clear_workspaces() -> None:
        for allocation in mode.workspaces.values():
            if allocation is not None:
                mode.tracker.free(allocation)
        mode.workspaces.clear()

    return {
        "emptyCache": lambda *_: device.empty_cache(),
        "memoryStats": lambda index: device.allocator(index).memory_stats(),
        "resetPeakMemoryStats": lambda index: device.allocator(index).reset_peaks(),
        "resetAccumulatedMemoryStats": lambda index: device.allocator(index).reset_accumulated(),
        "hostMemoryStats": dict,
        "resetPeakHostMemoryStats": lambda: None,
        "resetAccumulatedHostMemoryStats": lambda: None,
        "setMemoryFraction": lambda share, index: device.allocator(index).set_memory_fraction(share),
        "getMemoryFraction": lambda index: device.memory_fraction(index),
        "memorySnapshot": lambda *_: device.snapshot(),
        "record_memory_history": record,
        "record_memory_history_legacy": record_legacy,
        "isHistoryEnabled": lambda: device.history.enabled,
        "attach_out_of_memory_observer": device.observers.append,
        "setMemoryMetadata": lambda text: None,
        "getMemoryMetadata": lambda: "",
        "cudaCachingAllocator_raw_alloc": raw_alloc,
        "cudaCachingAllocator_raw_delete": lambda address: mode.tracker.free(raw.pop(address)),
        "cudaCachingAllocator_is_enabled": lambda: True,
        "cudaCachingAllocator_enable": lambda enabled: None,
        "getAllocatorBackend": lambda: "native",
        "clearCublasWorkspaces": clear_workspaces,
        "ipc_collect": lambda: None,
    }
