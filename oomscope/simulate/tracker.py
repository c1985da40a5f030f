"""Follows every storage on the simulated device: one allocation while it lives, and what it was for.

A storage is allocated when an operation's output shows it for the first time and freed by the callback of a
weak reference to it. The Python object of a storage is kept by C++ as long as any tensor needs it, so the
callback runs exactly when the last C++ or Python owner lets go, also in the middle of a backward pass.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Iterator
from types import FrameType
from typing import Any, Callable

import torch

from .device import Device
from .frames import Stack, StackTable

_SEQUENCE_LIMIT = 500_000
"""Forward operations that are remembered at most; each optimizer step forgets them all."""
Storage = Any
Tensor = Any


class Allocation:
    """One block of device memory, from its birth to its death."""

    __slots__ = (
        "birth",
        "block",
        "born_epoch",
        "category",
        "device",
        "died_epoch",
        "grad",
        "module",
        "phase",
        "size",
        "unknown",
    )

    def __init__(self, block: Any, device: int) -> None:
        self.block = block
        self.device = device
        self.size: int = block.size
        """Bytes after the allocator's rounding."""
        self.birth = 0
        self.born_epoch = 0
        self.died_epoch = -1
        self.unknown = (0, 0)
        """Bytes by which the real block may be smaller and larger, where a library decides."""
        self.category: str | None = None
        """Set when it is known what the memory is for; see `composition.category_of` for the rest."""
        self.phase = "init"
        self.grad = False
        """Whether autograd was recording."""
        self.module: str | None = None
        """Path of the innermost `torch.nn.Module` that was running."""


class Peak:
    """The highest point of allocated bytes on one device, with everything that was alive at it."""

    def __init__(self) -> None:
        self.bytes = 0
        self.reserved = 0
        """The highest reserved bytes; not at the same moment."""
        self.event = 0
        self.phase = "init"
        self.where: tuple[int | None, str | None] = (None, None)
        self.died_since: list[Allocation] = []
        """Allocations that were alive at the peak and are dead now."""


class Tracker:
    """Storages of simulated tensors and their allocations."""

    def __init__(self, device: Device, stacks: StackTable) -> None:
        self.device = device
        self.stacks = stacks
        self.live: dict[int, list[Any]] = {}
        """id of a storage -> [weak reference, allocation or None, device, bytes]."""
        self.allocations: set[Allocation] = set()
        self.peaks: dict[int, Peak] = {}
        self.optimizers: weakref.WeakSet[Any] = weakref.WeakSet()
        self.module_names: weakref.WeakKeyDictionary[Any, str] = weakref.WeakKeyDictionary()
        """Path of every module below the outermost one that contains it."""
        self.where: Any = None
        """Callable of the agent that tells (step, phase); None without an agent."""
        self.phase = "init"
        self.epoch = 0
        self.events = 0
        self.hint: str | None = None
        """Category of allocations made now, set around code whose purpose is known."""
        self.sequence: dict[int, tuple[str | None, Stack | None]] = {}
        """Autograd sequence number -> (module, stack) of the forward operation."""
        self.streams = threading.local()
        self.closing = False
        self.on_first_use: Callable[[], None] = lambda: None
        """Called before the first allocation on each card."""
        self._resize = torch.UntypedStorage.resize_

    # --- phases

    def enter(self, phase: str) -> str:
        """Change the phase; returns the one before."""
        before, self.phase = self.phase, phase
        self.epoch += 1
        return before

    @property
    def stream(self) -> int:
        """Id of the calling thread's current stream."""
        return getattr(self.streams, "id", 0)

    # --- memory

    def malloc(
        self, count: int, index: int, category: str | None = None, stream: int | None = None
    ) -> Allocation | None:
        """Allocate `count` bytes on device `index`; None for nothing.

        Raises:
            torch.OutOfMemoryError: the card is full.
        """
        if count == 0:
            return None
        device = self.device
        frame = sys._getframe(1)
        module, stack = self._origin(frame, device.history.context)
        block = device.malloc(count, index, self.stream if stream is None else stream, stack)
        made = Allocation(block, index)
        self.events += 1
        made.birth = self.events
        made.born_epoch = self.epoch
        made.category = category or self.hint
        made.phase = self.phase
        made.grad = torch.is_grad_enabled()
        made.module = module
        self.allocations.add(made)
        peak = self.peaks.get(index)
        if peak is None:
            peak = self.peaks[index] = Peak()
            self.on_first_use()
        allocator = device.allocators[index]
        current = allocator.allocated_bytes
        if allocator.reserved_bytes > peak.reserved:
            peak.reserved = allocator.reserved_bytes
        if current > peak.bytes:
            peak.bytes = current
            peak.event = self.events
            peak.phase = self.phase
            if self.where is not None:
                peak.where = self.where()
            if peak.died_since:
                peak.died_since = []
        return made

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back."""
        self.events += 1
        allocation.died_epoch = self.epoch
        self.allocations.discard(allocation)
        peak = self.peaks[allocation.device]
        if allocation.birth <= peak.event:
            peak.died_since.append(allocation)
        self.device.free(allocation.block, allocation.device)

    def borrow(self, sizes: list[int], index: int) -> None:
        """Memory that a kernel takes for itself and gives back before it returns."""
        taken = []
        try:
            for size in sizes:
                taken.append(self.malloc(size, index, "workspaces"))  # noqa: PERF401  # an OOM must free the others
        finally:
            for allocation in taken:
                if allocation is not None:
                    self.free(allocation)

    def _origin(self, frame: FrameType | None, want_stack: bool) -> tuple[str | None, Stack | None]:
        """The module and Python stack that an allocation belongs to.

        In a backward pass there are no Python frames of the model: those of the forward operation are found
        by the sequence number of the running autograd node.
        """
        if torch._C._current_graph_task_id() != -1 and not torch.is_grad_enabled():
            node = torch._C._current_autograd_node()
            if node is not None:
                return self._forward_of(node._sequence_nr(), frame, want_stack)
        module = self._running_module(frame)
        stack = self.stacks.take(frame) if want_stack else None
        if torch.is_grad_enabled():
            if module is not None and self.phase == "init":
                self.enter("forward")
            if len(self.sequence) > _SEQUENCE_LIMIT:
                self.sequence.clear()
            self.sequence[torch._C._autograd._get_sequence_nr() - 1] = (module, stack)
        return module, stack

    def _running_module(self, frame: FrameType | None) -> str | None:
        """Path of the innermost module on the stack."""
        module = next(_running_modules(frame), None)
        if module is None:
            return None
        name = self.module_names.get(module)
        if name is None:
            *_, outermost = _running_modules(frame)
            self.name_modules(outermost)
            name = self.module_names.setdefault(module, type(module).__name__)
        return name

    def name_modules(self, root: Any) -> None:
        """Name every module below `root` that has no name yet."""
        for path, module in root.named_modules():
            self.module_names.setdefault(module, path or type(module).__name__)

    def _forward_of(
        self, number: int, frame: FrameType | None, want_stack: bool
    ) -> tuple[str | None, Stack | None]:
        for candidate in range(number, number - 24, -1):
            found = self.sequence.get(candidate)
            if found is not None:
                return found
        return None, self.stacks.take(frame) if want_stack else None

    # --- storages

    def track(self, tensor: Tensor) -> None:
        """Allocate the storage of `tensor` unless it is known already."""
        try:
            storage = tensor.untyped_storage()
        except NotImplementedError:
            return  # sparse: its indices and values were tracked when they were made
        record = self.live.get(id(storage))
        if record is not None and record[0]() is storage:
            if record[3] != storage.nbytes():
                self._resized(storage, record)
            return
        index = tensor.fake_device.index or 0
        count = storage.nbytes()
        self._register(storage, self.malloc(count, index), index, count)

    def know(self, tensor: Tensor) -> None:
        """Take the storage of `tensor` for somebody else's memory."""
        storage = tensor.untyped_storage()
        self._register(storage, None, tensor.fake_device.index or 0, storage.nbytes())

    def allocation_of(self, tensor: Tensor) -> Allocation | None:
        """The allocation behind a tensor, None if it has none on the simulated device."""
        if tensor.layout is not torch.strided:
            return None
        storage = tensor.untyped_storage()
        record = self.live.get(id(storage))
        if record is None or record[0]() is not storage:
            return None
        found: Allocation | None = record[1]
        return found

    def adopt(self, new: Tensor, old: Tensor) -> bool:
        """Let `new` take over the memory of `old`: they are one tensor on a real device."""
        storage, taken = old.untyped_storage(), new.untyped_storage()
        record = self.live.get(id(storage))
        if record is None or record[0]() is not storage or record[1] is None:
            return False
        if storage.nbytes() != taken.nbytes():
            return False
        allocation, record[1] = record[1], None
        self._register(taken, allocation, record[2], record[3])
        return True

    def _register(self, storage: Storage, allocation: Allocation | None, index: int, count: int) -> None:
        key = id(storage)
        live = self.live

        def died(reference: Any) -> None:
            record = live.get(key)
            if record is not None and record[0] is reference:
                del live[key]
                if record[1] is not None and not self.closing:
                    self.free(record[1])

        live[key] = [weakref.ref(storage, died), allocation, index, count]

    def _resized(self, storage: Storage, record: list[Any]) -> None:
        count = storage.nbytes()
        if count == record[3]:
            return
        old = record[1]
        if count == 0:
            record[1], record[3] = None, 0
        else:
            record[1] = self.malloc(count, record[2], old.category if old is not None else None)
            record[3] = count
        if old is not None:
            self.free(old)

    def follow_resizes(self) -> None:
        """Notice `UntypedStorage.resize_`, by which sharded training frees and refills its buffers."""
        original = self._resize
        tracker = self

        def resize_(storage: Storage, size: int) -> Storage:
            result = original(storage, size)
            record = tracker.live.get(id(storage))
            if record is not None and record[0]() is storage:
                tracker._resized(storage, record)
            return result

        torch.UntypedStorage.resize_ = resize_


_CALL = torch.nn.Module._call_impl.__code__


def _running_modules(frame: FrameType | None) -> Iterator[Any]:
    """The modules whose forward is on the stack, innermost first."""
    while frame is not None:
        if frame.f_code is _CALL:
            owner = frame.f_locals.get("self")
            if owner is not None:
                yield owner
        frame = frame.f_back
