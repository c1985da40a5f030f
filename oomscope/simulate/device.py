"""One process's view of the simulated cards: allocators, memory history, out-of-memory errors."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections import deque
from typing import Any, Callable, cast

import torch

from ..core.allocator.model import (
    DEFAULT_POOL,
    AllocatorConfig,
    AllocatorOutOfMemory,
    CachingAllocator,
    TraceRow,
    VirtualDriver,
    oom_message,
)
from . import guard
from .cards import Card
from .frames import Stack, StackTable
from .requests import RequestLog, request_log, tracer

OutOfMemoryObserver = Callable[[int, int, int, int], None]
"""(device, bytes wanted from the driver, total bytes, free bytes), as torch calls it."""
_UNLIMITED_ROWS = 1 << 62
_TORCH = (int(torch.__version__.split(".")[0]), int(torch.__version__.split(".")[1]))


class History:
    """The ring of allocator events that `torch.cuda.memory._record_memory_history` switches on."""

    def __init__(self, devices: int, stacks: StackTable) -> None:
        self.enabled = False
        self.context = False
        """Whether Python stacks are taken."""
        self.stacks = stacks
        self.rows: list[deque[TraceRow]] = [deque() for _ in range(devices)]

    def record(self, enabled: str | None, context: str | None, entries: int, clear: bool) -> None:
        """Switch recording on ("state", "all") or off (None)."""
        self.enabled = enabled == "all"
        self.context = enabled is not None and context is not None
        limit = entries if entries < _UNLIMITED_ROWS else None
        self.rows = [deque(() if clear or enabled is None else rows, maxlen=limit) for rows in self.rows]

    def traces(self) -> list[list[dict[str, Any]]]:
        """One list of rows per device in torch's schema."""
        return [[self._row(row) for row in rows] for rows in self.rows]

    def _row(self, row: TraceRow) -> dict[str, Any]:
        out: dict[str, Any] = {"action": row.action}
        if row.action == "oom":
            out["device_free"] = row.device_free
        else:
            out["addr"] = row.addr
        out.update(
            size=row.size,
            stream=row.stream,
            time_us=row.time_us,
            compile_context="N/A",
            user_metadata="",
            pool_id=(0, 0),
            frames=self.stacks.frames(cast("Stack | None", row.context)),
        )
        return out


class Device:
    """The simulated cards of this process; all of one kind, and only those it uses hold anything."""

    def __init__(self, card: Card, count: int, capacity_bytes: int, stacks: StackTable) -> None:
        self.card = card
        self.count = count
        self.capacity_bytes = capacity_bytes
        """What cudaMalloc can hand out on each card."""
        self.history = History(count, stacks)
        self._logs: dict[int, RequestLog | None] = {}
        self.allocators: dict[int, CachingAllocator] = {}
        self.pools: list[tuple[int, int]] = []
        """Private pools that allocations go to now, innermost last."""
        self.captures = 0
        self._lock = threading.RLock()
        """Held while blocks change hands: snapshots are also taken from other threads."""
        self._busy = False
        self._to_free: deque[tuple[Any, int]] = deque()
        """Blocks whose last owner died while the allocator was at work."""
        self._waiting: set[int] = set()
        """Cards with blocks that wait for another stream."""
        self.observers: list[OutOfMemoryObserver] = []
        self.request_folder: str | None = None
        """Where a prediction run writes every request it makes."""
        self.settings = allocator_settings()
        self.config = AllocatorConfig.parse(self.settings)

    @property
    def current(self) -> int:
        """The current card of the calling thread."""
        return guard.current()

    @current.setter
    def current(self, index: int) -> None:
        guard.make_current(index)

    def grow(self, count: int) -> None:
        """Have at least `count` cards."""
        self.count = max(self.count, count)
        rows = self.history.rows
        rows.extend(deque(maxlen=rows[0].maxlen) for _ in range(self.count - len(rows)))

    @property
    def total_bytes(self) -> int:
        """The card's total capacity as programs see it.

        Never less than what is handed out and the context.
        """
        return max(self.card.usable_bytes, self.capacity_bytes + self.card.context_bytes)

    def allocator(self, index: int) -> CachingAllocator:
        """The caching allocator of card `index`."""
        found = self.allocators.get(index)
        if found is None:
            driver = VirtualDriver(
                self.capacity_bytes,
                reserved_by_others=self.total_bytes - self.capacity_bytes,
                total_bytes=self.total_bytes,
            )
            log = self._logs[index] = request_log(self.request_folder, index)
            trace = tracer(log, self._tracer(index))
            found = CachingAllocator(self.config, driver, device=index, tracer=trace, clock=_now_us)
            self.allocators[index] = found
        return found

    def empty_cache(self) -> None:
        """What `torch.cuda.empty_cache()` does to the current device."""
        self.allocator(self.current).empty_cache()
        log = self._logs[self.current]
        if log is not None:
            log.emptied()

    def _tracer(self, index: int) -> Callable[[TraceRow], None]:
        history = self.history

        def trace(row: TraceRow) -> None:
            if history.enabled:
                history.rows[index].append(row)

        return trace

    def malloc(self, count: int, index: int, stream: int, stack: Stack | None) -> Any:
        """A block of at least `count` bytes.

        Raises:
            torch.OutOfMemoryError: in torch's own words, after every observer was called.
        """
        allocator = self.allocators.get(index) or self.allocator(index)
        if index in self._waiting:
            # The other stream is assumed to keep up with this one: the lower bound of what a card would show.
            self._waiting.discard(index)
            allocator.process_events()
        pool = self.pools[-1] if self.pools else DEFAULT_POOL
        with self._lock:
            self._busy = True
            try:
                return allocator.allocate(count, stream, stack, pool)
            except AllocatorOutOfMemory as error:
                failed = error
            finally:
                self._busy = False
                self._free_later_ones()
        free = self.free_bytes(index)
        for observer in list(self.observers):
            observer(index, failed.segment_size, self.total_bytes, free)
        message = oom_message(
            failed, total_bytes=self.total_bytes, process_bytes=self.total_bytes - free, torch_version=_TORCH
        )
        raise torch.OutOfMemoryError(message)

    def free(self, block: Any, index: int) -> None:
        """Give a block back; later, when the garbage collector asks in the middle of another allocator call."""
        with self._lock:
            self._to_free.append((block, index))
            if not self._busy:
                self._free_later_ones()

    def _free_later_ones(self) -> None:
        while self._to_free:
            block, index = self._to_free.popleft()
            if block.stream_uses:
                self._waiting.add(index)
            self._busy = True
            try:
                self.allocators[index].free_block(block)
            finally:
                self._busy = False

    def free_bytes(self, index: int) -> int:
        """What cudaMemGetInfo calls free."""
        found = self.allocators.get(index)
        return self.capacity_bytes if found is None else found.driver.free_bytes

    def memory_fraction(self, index: int) -> float:
        """The share of the card that this process may use."""
        allowed = self.allocator(index).allowed_bytes
        return 1.0 if allowed is None else allowed / self.total_bytes

    def record_stream(self, address: int, index: int, stream: int) -> None:
        self.allocators[index].record_stream(address, stream)

    def snapshot(self) -> dict[str, Any]:
        """`torch._C._cuda_memorySnapshot()`."""
        collects = gc.isenabled()
        gc.disable()  # a collection would free blocks between the lines below; torch holds its lock here
        try:
            with self._lock:
                return self._snapshot()
        finally:
            if collects:
                gc.enable()

    def _snapshot(self) -> dict[str, Any]:
        segments = []
        frames = self.history.stacks.frames
        for index in sorted(self.allocators):
            for segment in self.allocators[index].segments():
                segment["frames"] = frames(segment["frames"])
                for block in segment["blocks"]:
                    block["frames"] = frames(block["frames"])
                segments.append(segment)
        return {
            "segments": segments,
            "device_traces": self.history.traces(),
            "external_annotations": [],
            "allocator_settings": self.config.to_settings(self.settings),
        }


def allocator_settings() -> str:
    """The text of PYTORCH_CUDA_ALLOC_CONF, else of PYTORCH_ALLOC_CONF."""
    return os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or os.environ.get("PYTORCH_ALLOC_CONF") or ""


def _now_us() -> int:
    return time.time_ns() // 1000
