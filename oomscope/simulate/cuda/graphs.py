"""CUDA graphs and memory pools: allocations go to private pools; a replay does nothing."""

from __future__ import annotations

import itertools
from typing import Any

import torch

_graph_ids = itertools.count(1)
_user_ids = itertools.count(1)


def install(mode: Any) -> None:
    """Replace the dummies of a CPU build."""
    device = mode.device
    graphs, memory = torch.cuda.graphs, torch.cuda.memory
    graph_class = _graph_class(device)
    torch.cuda.CUDAGraph = graphs.CUDAGraph = graph_class
    capturing = torch._C._cuda_isCurrentStreamCapturing = lambda: bool(device.captures)
    graphs._cuda_isCurrentStreamCapturing = torch.cuda._cuda_isCurrentStreamCapturing = capturing
    graphs.is_current_stream_capturing = torch.cuda.is_current_stream_capturing = capturing
    handle = graphs.graph_pool_handle = torch.cuda.graph_pool_handle = lambda: (0, next(_graph_ids))
    graphs._graph_pool_handle = torch._C._graph_pool_handle = handle
    torch._C._host_emptyCache = lambda: None
    for name in ("_cuda_CUDAAllocator_AllocatorState", "_set_cached_tensors_enabled"):
        if not hasattr(torch._C, name):  # the compiler imports them where there is CUDA
            setattr(torch._C, name, type(name, (), {}))

    def begin(index: int, pool: tuple[int, int]) -> None:
        device.allocator(index).retain_pool(pool)
        device.pools.append(pool)

    def end(index: int, pool: tuple[int, int]) -> None:
        device.pools.remove(pool)

    def release(index: int, pool: tuple[int, int]) -> None:
        device.allocator(index).release_pool(pool)

    for name, function in {
        "beginAllocateCurrentThreadToPool": begin,
        "beginAllocateToPool": begin,
        "endAllocateToPool": end,
        "releasePool": release,
    }.items():
        setattr(torch._C, f"_cuda_{name}", function)
        setattr(memory, f"_cuda_{name}", function)
    torch.cuda.MemPool = memory.MemPool = _pool_class(device)


def _graph_class(device: Any) -> Any:
    class CUDAGraph:
        """`torch.cuda.CUDAGraph`: what is captured keeps its memory in a private pool."""

        def __init__(self, keep_graph: bool = False) -> None:
            self._pool: tuple[int, int] | None = None
            self._index = 0

        def capture_begin(self, pool: Any = None, capture_error_mode: str = "global", **_kwargs: Any) -> None:
            self._pool = pool if pool is not None else (0, next(_graph_ids))
            self._index = device.current
            allocator = device.allocator(self._index)
            allocator.retain_pool(self._pool)
            allocator.begin_capture(self._pool)
            device.pools.append(self._pool)
            device.captures += 1

        def capture_end(self) -> None:
            device.pools.remove(self._pool)
            device.captures -= 1
            device.allocator(self._index).end_capture(self._pool)

        def pool(self) -> Any:
            return self._pool

        def reset(self) -> None:
            if self._pool is not None:
                device.allocator(self._index).release_pool(self._pool)
                self._pool = None

        def replay(self) -> None:
            return None

        def __getattr__(self, name: str) -> Any:
            if name.startswith("__"):
                raise AttributeError(name)
            return lambda *_args, **_kwargs: None

    return CUDAGraph


def _pool_class(device: Any) -> Any:
    class MemPool:
        """`torch.cuda.MemPool`."""

        def __init__(self, allocator: Any = None, use_on_oom: bool = False, no_split: bool = False) -> None:
            self.id = (next(_user_ids), 0)
            self.allocator = allocator
            pool = device.allocator(device.current).pool(self.id)
            pool.use_on_oom, pool.no_split = use_on_oom, no_split

        def use_count(self) -> int:
            return 1

        def snapshot(self, include_traces: bool = True) -> Any:
            return [each for each in device.snapshot()["segments"] if each["segment_pool_id"] == self.id]

    return MemPool
