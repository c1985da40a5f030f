"""`torch.accelerator` over the simulated device, and the copy functions of DataParallel."""

from __future__ import annotations

from typing import Any

import torch


def install(mode: Any) -> None:
    """Make CUDA the accelerator."""
    core = torch._C
    cuda = torch.cuda
    accelerator = torch.accelerator
    device = torch.device("cuda")
    for name, function in {
        "_accelerator_getAccelerator": lambda *_: device,
        "_get_accelerator": lambda *_: device,
        "_accelerator_getDeviceIndex": lambda: mode.device.current,
        "_accelerator_setDeviceIndex": lambda index: core._cuda_setDevice(index),
        "_accelerator_exchangeDevice": lambda index: core._cuda_exchangeDevice(index),
        "_accelerator_maybeExchangeDevice": lambda index: core._cuda_exchangeDevice(index),
        "_accelerator_synchronizeDevice": lambda *_: mode.streams.catch_up(),
        "_accelerator_setStream": mode.streams.make_current,
        "_accelerator_emptyCache": lambda *_: core._cuda_emptyCache(),
        "_accelerator_isAllocatorInitialized": lambda *_: True,
        "_accelerator_getDeviceStats": lambda index: core._cuda_memoryStats(index),
        "_accelerator_getMemoryInfo": lambda index: cuda.mem_get_info(index),
        "_accelerator_resetPeakStats": lambda index: core._cuda_resetPeakMemoryStats(index),
        "_accelerator_resetAccumulatedStats": lambda index: core._cuda_resetAccumulatedMemoryStats(index),
    }.items():
        setattr(core, name, function)
    accelerator.current_accelerator = lambda check_available=False: device
    accelerator.is_available = lambda: True
    accelerator.device_count = lambda: mode.device.count
    core._scatter = _scatter
    core._gather = _gather
    core._broadcast_coalesced = lambda tensors, devices, _size: [
        [tensor.to(torch.device("cuda", index)) for tensor in tensors] for index in devices
    ]


def _scatter(
    tensor: Any, devices: list[int], chunk_sizes: Any = None, dim: int = 0, streams: Any = None
) -> list[Any]:
    chunks = tensor.split(chunk_sizes, dim) if chunk_sizes else tensor.chunk(len(devices), dim)
    return [chunk.to(torch.device("cuda", index)) for chunk, index in zip(chunks, devices)]


def _gather(tensors: list[Any], dim: int, destination: Any = None) -> Any:
    target = torch.device("cpu") if destination == -1 else torch.device("cuda", destination or 0)
    return torch.cat([tensor.to(target) for tensor in tensors], dim)
