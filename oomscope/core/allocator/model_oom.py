"""The out-of-memory error of the model, and torch's wording of it.

Standard library only, Python 3.9: this module also runs inside training jobs.

Source: TORCH_CHECK_WITH(OutOfMemoryError, …) in c10/cuda/CUDACachingAllocator.cpp, 2.4 to 2.13.
"""

from __future__ import annotations

from collections.abc import Iterable

from ...units import GIB, KIB, MIB


class AllocatorOutOfMemory(MemoryError):  # noqa: N818  # the name says what happened, as torch's does
    """A request that could not be served; all sizes in bytes, as they were when it failed.

    Attributes:
        requested: what the program asked for.
        rounded: the block it needed; the size of the `oom` row.
        segment_size: what was asked from the driver; the number in "Tried to allocate".
        device_free: free memory of the card at that moment.
        allocated_bytes: bytes of allocated blocks.
        reserved_bytes: bytes held from the driver.
        private_free_bytes: free bytes of private pools, which the message counts as allocated.
        allowed_bytes: the limit by memory fraction, None without one.
        preempted: refused before the driver was asked (`throw_on_cudamalloc_oom`).
    """

    def __init__(
        self,
        requested: int,
        rounded: int,
        device_free: int,
        *,
        segment_size: int,
        allocated_bytes: int,
        reserved_bytes: int,
        private_free_bytes: int = 0,
        allowed_bytes: int | None = None,
        preempted: bool = False,
        stream: int = 0,
        device: int = 0,
    ) -> None:
        super().__init__(f"out of memory: {requested} bytes requested, {device_free} free on the device")
        self.requested = requested
        self.rounded = rounded
        self.segment_size = segment_size
        self.device_free = device_free
        self.allocated_bytes = allocated_bytes
        self.reserved_bytes = reserved_bytes
        self.private_free_bytes = private_free_bytes
        self.allowed_bytes = allowed_bytes
        self.preempted = preempted
        self.stream = stream
        self.device = device


def oom_message(
    error: AllocatorOutOfMemory,
    *,
    total_bytes: int,
    process_bytes: int | None = None,
    other_processes: Iterable[tuple[int, int]] = (),
    torch_version: tuple[int, int] = (2, 13),
) -> str:
    """The message of `error`, word for word as torch writes it.

    Args:
        error: the failed request.
        total_bytes: the card's total capacity.
        process_bytes: what this process uses of the card including the context; left out when None.
        other_processes: (process id, bytes) of the others on the card.
        torch_version: the name of the variable in the advice changed in 2.10.
    """
    processes = "".join(
        f"Process {pid} has {format_size(used)} memory in use. " for pid, used in other_processes
    )
    if process_bytes is not None:
        processes += (
            f"Including non-PyTorch memory, this process has {format_size(process_bytes)} memory in use. "
        )
    allowed = "" if error.allowed_bytes is None else f"{format_size(error.allowed_bytes)} allowed; "
    private = ""
    if error.private_free_bytes:
        private = (
            f"with {format_size(error.private_free_bytes)} allocated in private pools (e.g., CUDA Graphs), "
        )
    held = error.reserved_bytes - error.allocated_bytes - error.private_free_bytes
    variable = "PYTORCH_ALLOC_CONF" if torch_version >= (2, 10) else "PYTORCH_CUDA_ALLOC_CONF"
    return (
        f"CUDA out of memory. Tried to allocate {format_size(error.segment_size)}. "
        f"GPU {error.device} has a total capacity of {format_size(total_bytes)} "
        f"of which {format_size(error.device_free)} is free. {processes}{allowed}"
        f"Of the allocated memory {format_size(error.allocated_bytes + error.private_free_bytes)} "
        f"is allocated by PyTorch, {private}and {format_size(held)} is reserved by PyTorch but unallocated. "
        f"If reserved but unallocated memory is large try setting {variable}=expandable_segments:True "
        "to avoid fragmentation.  See documentation for Memory Management  "
        "(https://pytorch.org/docs/stable/notes/cuda.html#environment-variables)"
    )


def format_size(size: int) -> str:
    """A size as torch writes it: "20.00 MiB", "512 bytes". Source: `format_size` in c10."""
    if size <= KIB:
        return f"{size} bytes"
    if size <= MIB:
        return f"{size / KIB:.2f} KiB"
    if size <= GIB:
        return f"{size / MIB:.2f} MiB"
    return f"{size / GIB:.2f} GiB"
