"""The arithmetic of an allocator's message: what its five numbers prove and what they exclude.

With T tried, C capacity, F free, A allocated by torch, U reserved but unallocated, everything else on the
card is N = C − F − A − U. Source of the thresholds: checked on some thirty public messages whose cause was
established independently; each constant says what it separates.
"""

from __future__ import annotations

from dataclasses import dataclass

from oomscope.core.diagnosis.message import OomMessage
from oomscope.units import GIB, TIB

ABSURD_BYTES = TIB
"""No single tensor of a training job is larger: such a size is an overflow or a wrong shape."""
FREE_FACTOR = 1.05
FREE_SLACK_BYTES = round(0.02 * GIB)
"""The driver needs whole 2 MiB pages and a little for itself.

More free memory than this and a refusal means a limit, not a shortage.
"""
CONTEXT_BYTES = round(0.8 * GIB)
"""CUDA context with cuBLAS, cuDNN and NCCL of one process: 0.3–0.8 GiB on public reports."""
FOREIGN_SHARE = 0.10
FOREIGN_FLOOR_BYTES = GIB
MAJOR_SHARE = 0.10
"""Idle cache below a tenth of what torch reserved is the last straw, not the load."""
GIANT_SHARE = 0.25
LIVE_SHARE = 0.85
IMPOSSIBLE_BYTES = 1 << 50
"""Larger numbers in a text are unsigned wrap-arounds ("17179869184.00 GiB"), not measurements."""


@dataclass(frozen=True)
class Arithmetic:
    """The numbers of one message, completed where one follows from the others.

    Bytes; None where nothing can be said.
    """

    tried: int | None
    capacity: int | None
    free: int | None
    allocated: int | None
    unallocated: int | None
    other: int | None
    """C − F − A − U: contexts, libraries and other processes.

    Negative where a driver pages to host memory.
    """
    own_other: int | None
    """Of `other`, what this process holds outside torch's allocator."""
    foreign: int | None
    """Of `other`, what other processes hold."""
    shortfall: int | None
    """T − F − U: what is missing even with perfect packing.

    ≤ 0 when a perfect allocator could have served the request.
    """
    tags: tuple[str, ...]

    def has(self, tag: str) -> bool:
        return tag in self.tags


def plausible(value: int | None) -> int | None:
    """`value`, or None where it is a wrapped negative number."""
    return value if value is not None and 0 <= value < IMPOSSIBLE_BYTES else None


def unallocated_bytes(message: OomMessage) -> int | None:
    """U: stated (2.1+), or reserved − allocated (≤ 2.0).

    The "cached" of torch ≤ 1.3 may exclude what is allocated: then 0.
    """
    if message.reserved_unallocated_bytes is not None:
        return plausible(message.reserved_unallocated_bytes)
    if message.reserved_bytes is None or message.allocated_bytes is None:
        return None
    return max(0, message.reserved_bytes - message.allocated_bytes)


def analyse(message: OomMessage) -> Arithmetic:
    """Arithmetic of `message`; `tags` is empty when the text does not hold all of T, C, F, A and U."""
    tried, capacity = message.tried_bytes, plausible(message.capacity_bytes)
    free, allocated = plausible(message.free_bytes), plausible(message.allocated_bytes)
    unallocated = unallocated_bytes(message)
    other = own = foreign = shortfall = None
    if capacity is not None and free is not None and allocated is not None and unallocated is not None:
        other = capacity - free - allocated - unallocated
        own, foreign = _split_other(message, capacity, free, allocated + unallocated, other)
    if tried is not None and free is not None and unallocated is not None:
        shortfall = tried - free - unallocated
    tags = _tags(tried, capacity, free, allocated, unallocated, other)
    if message.kind == "cuda_oom_1eb":
        tags = ("absurd_size",)
    return Arithmetic(tried, capacity, free, allocated, unallocated, other, own, foreign, shortfall, tags)


def _split_other(
    message: OomMessage, capacity: int, free: int, torch_bytes: int, other: int
) -> tuple[int | None, int | None]:
    """(own bytes outside torch, bytes of other processes), from what the text states."""
    this_process = plausible(message.this_process_bytes)
    if this_process is not None:
        return max(0, this_process - torch_bytes), max(0, capacity - free - this_process)
    listed = [count for _, count in message.other_processes if plausible(count) is not None]
    if not listed:
        return None, None
    # In a container the list may name this process by another pid: the entry that is as large as what torch
    # reserved.
    own = [
        count for count in listed if torch_bytes <= count <= torch_bytes + CONTEXT_BYTES + (torch_bytes >> 3)
    ]
    if own and other >= 0:
        return min(own) - torch_bytes, sum(listed) - min(own)
    return None, sum(listed)


def _tags(
    tried: int | None,
    capacity: int | None,
    free: int | None,
    allocated: int | None,
    unallocated: int | None,
    other: int | None,
) -> tuple[str, ...]:
    if tried is not None and tried > ABSURD_BYTES:
        return ("absurd_size",)
    if tried is not None and capacity is not None and tried > capacity:
        return ("impossible_request",)
    if tried is None or capacity is None or free is None or allocated is None:
        return ()
    if unallocated is None or other is None:
        return ()
    tags = []
    if free >= FREE_FACTOR * tried + FREE_SLACK_BYTES:
        tags.append("free_but_refused")
    if other > CONTEXT_BYTES + max(FOREIGN_FLOOR_BYTES, FOREIGN_SHARE * capacity):
        tags.append("foreign_memory")
    if free + unallocated >= tried:
        major = unallocated >= MAJOR_SHARE * (allocated + unallocated)
        tags.append("defragmentation_major" if major else "defragmentation_minor")
    else:
        tags.append("short_without_fragmentation")
    if tried >= GIANT_SHARE * capacity:
        tags.append("giant_request")
    if allocated >= LIVE_SHARE * capacity:
        tags.append("nearly_all_live")
    return tuple(tags)


#: One sentence per tag, for people.
MEANING = {
    "absurd_size": "the request is larger than any real tensor: an overflow or a wrong shape",
    "impossible_request": "the request alone is larger than the whole device",
    "free_but_refused": "the device had enough free memory and still refused: a limit, not a shortage",
    "foreign_memory": "much of the device is used outside this process's torch allocator",
    "defragmentation_major": "free and idle cached bytes together would have been enough; much is idle",
    "defragmentation_minor": "free and idle bytes together would just have been enough; little is idle",
    "short_without_fragmentation": "even perfect packing would not have been enough: no setting helps",
    "giant_request": "one request asks for a quarter of the device or more: look at that one tensor",
    "nearly_all_live": "torch's live tensors fill the device: look at what they are",
}

__all__ = ["MEANING", "Arithmetic", "analyse", "plausible", "unallocated_bytes"]
