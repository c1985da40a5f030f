"""Streams and events. Work is done the moment it is queued; streams matter to the allocator only."""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import torch

_CUDA = 1
_POOL = 32
"""Streams that torch hands out before it starts again with the first (c10/cuda/CUDAStream.cpp)."""


def install(mode: Any) -> None:
    """Replace the stream and event classes of torch.cuda, which a CPU build has as dummies."""
    cuda = torch.cuda
    state = _Streams(mode)
    stream_class = _stream_class(state)
    state.stream_class = stream_class
    cuda.Stream = cuda.streams.Stream = cuda.ExternalStream = cuda.streams.ExternalStream = stream_class
    cuda.Event = cuda.streams.Event = Event
    cuda.current_stream, cuda.default_stream = state.current, state.default
    cuda.set_stream = state.make_current
    cuda.StreamContext = _context_class(state)
    cuda.stream = cuda.StreamContext
    torch._C._cuda_synchronize = lambda: state.catch_up()
    torch._C._cuda_getCurrentStream = lambda index: _numbers(state.current(index))
    torch._C._cuda_getDefaultStream = lambda index: _numbers(state.default(index))
    torch._C._cuda_getCurrentRawStream = lambda index: state.current(index).stream_id
    torch._C._accelerator_getStream = lambda index=-1: state.current(None if index < 0 else index)
    mode.streams = state


def _numbers(stream: Any) -> tuple[int, int, int]:
    return stream.stream_id, stream.device_index, _CUDA


class _Streams:
    """Which stream is current in which thread."""

    def __init__(self, mode: Any) -> None:
        self.mode = mode
        self.stream_class: Any = None
        self._defaults: dict[int, Any] = {}
        self._local = threading.local()
        self._count = itertools.count()

    def next_id(self) -> int:
        return next(self._count) % _POOL + 1

    def index(self, device: Any) -> int:
        if device is None:
            return int(self.mode.device.current)
        if isinstance(device, int):
            return device
        found = torch.device(device).index
        return int(self.mode.device.current if found is None else found)

    def default(self, device: Any = None) -> Any:
        index = self.index(device)
        if index not in self._defaults:
            self._defaults[index] = self.stream_class(stream_id=0, device_index=index)
        return self._defaults[index]

    def current(self, device: Any = None) -> Any:
        chosen = getattr(self._local, "stream", None)
        index = self.index(device)
        return chosen if chosen is not None and chosen.device_index == index else self.default(index)

    def make_current(self, stream: Any) -> None:
        if stream is None:
            return
        self._local.stream = stream
        self.mode.tracker.streams.id = stream.stream_id

    def catch_up(self) -> None:
        """Everything queued is done: blocks that waited for another stream are free."""
        for allocator in self.mode.device.allocators.values():
            allocator.process_events()


class Event:
    """`torch.cuda.Event`: complete as soon as it is recorded; times are those of the host."""

    def __init__(
        self, enable_timing: bool = False, blocking: bool = False, interprocess: bool = False, **_kwargs: Any
    ) -> None:
        self._time = time.perf_counter()

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None:
        return None

    def query(self) -> bool:
        return True

    def synchronize(self) -> None:
        torch._C._cuda_synchronize()

    def elapsed_time(self, end: Event) -> float:
        """Milliseconds, at least one microsecond."""
        return max((end._time - self._time) * 1e3, 1e-3)

    def ipc_handle(self) -> bytes:
        return b""


def _stream_class(state: _Streams) -> Any:
    class Stream(torch.Stream):  # type: ignore[misc]
        """`torch.cuda.Stream` of the simulated device."""

        def __new__(
            cls,
            device: Any = None,
            priority: int = 0,
            stream_id: Any = None,
            device_index: Any = None,
            device_type: Any = None,
            stream_ptr: Any = None,
            **_kwargs: Any,
        ) -> Any:
            if stream_id is None:
                stream_id = state.next_id()
            index = state.index(device) if device_index is None else device_index
            return torch.Stream.__new__(cls, stream_id=stream_id, device_index=index, device_type=_CUDA)

        @property
        def cuda_stream(self) -> int:
            return int(self.stream_id)

        @property
        def _as_parameter_(self) -> int:
            return int(self.stream_id)

        @property
        def priority(self) -> int:
            return 0

        @staticmethod
        def priority_range() -> tuple[int, int]:
            return (0, -5)

        def wait_event(self, event: Any) -> None:
            return None

        def wait_stream(self, stream: Any) -> None:
            return None

        def record_event(self, event: Any = None) -> Any:
            return event or Event()

        def synchronize(self) -> None:
            state.catch_up()

        def query(self) -> bool:
            return True

        def native_handle(self) -> int:
            return int(self.stream_id)

        def __enter__(self) -> Any:
            self.__dict__.setdefault("_before", []).append(state.current(self.device_index))
            state.make_current(self)
            return self

        def __exit__(self, *_error: Any) -> None:
            state.make_current(self._before.pop())

        def __repr__(self) -> str:
            return f"<torch.cuda.Stream device=cuda:{self.device_index} cuda_stream={self.stream_id:#x}>"

    return Stream


def _context_class(state: _Streams) -> Any:
    class StreamContext:
        """`with torch.cuda.stream(s):`; nothing for None."""

        def __init__(self, stream: Any) -> None:
            self.stream = stream
            self._before: Any = None

        def __enter__(self) -> None:
            if self.stream is not None:
                self._before = state.current(self.stream.device_index)
                state.make_current(self.stream)

        def __exit__(self, *_error: Any) -> None:
            if self.stream is not None:
                state.make_current(self._before)

    return StreamContext
