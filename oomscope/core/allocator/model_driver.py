"""The memory driver below the caching allocator: cudaMalloc, cuMemCreate and addresses, with a capacity.

Standard library only, Python 3.9: this module also runs inside training jobs.

The real driver's choice of addresses is unknown: it reuses holes in no simple order. Addresses decide ties
between equally large free blocks, so a prediction is made under several address models and reported as a
range.
"""

from __future__ import annotations

from bisect import insort

from .model_blocks import FreeList
from .model_config import ROUND_LARGE

#: Where device memory starts; 47-bit addresses as in real snapshots.
BASE_ADDRESS = 0x7F0000000000
#: Total memory assumed for the size of an address reservation when no capacity is given.
UNLIMITED_TOTAL = 1 << 37

#: Ways to choose the address of a new segment:
#: "holes" reuses the lowest hole of the same size and else grows upwards; "up" and "down" never reuse;
#: "alternate" takes either end in turn.
ADDRESS_MODELS = ("holes", "up", "down", "alternate")


class VirtualDriver:
    """Hands out addresses and counts bytes.

    Args:
        capacity: bytes that this process can get in all; None for no limit. reserved_by_others: bytes of
        the card that are gone before (context, other processes); they only appear
            in `total_bytes`.
        total_bytes: the card's total memory as cudaMemGetInfo reports it; default `capacity +
        reserved_by_others`.
            The address range reserved for an expandable segment follows from it.
        addresses: one of `ADDRESS_MODELS`.
    """

    def __init__(
        self,
        capacity: int | None,
        *,
        reserved_by_others: int = 0,
        total_bytes: int | None = None,
        addresses: str = "holes",
    ) -> None:
        if addresses not in ADDRESS_MODELS:
            raise ValueError(f"address model {addresses!r}: choose from {', '.join(ADDRESS_MODELS)}")
        if total_bytes is None:
            total_bytes = UNLIMITED_TOTAL if capacity is None else capacity + reserved_by_others
        self.capacity = capacity
        self.reserved_by_others = reserved_by_others
        self.total_bytes = total_bytes
        self.addresses = addresses
        self.used_bytes = 0
        self._highest = self._lowest = BASE_ADDRESS
        self._flip = False
        self._holes: dict[int, list[int]] = {}

    @property
    def free_bytes(self) -> int:
        """What cudaMemGetInfo would call free; without a limit, what is left of `total_bytes`, at least 0."""
        limit = self.total_bytes if self.capacity is None else self.capacity
        return max(0, limit - self.used_bytes)

    def malloc(self, size: int) -> int | None:
        """An address as from cudaMalloc, or None when `size` bytes are not there."""
        if self.capacity is not None and self.used_bytes + size > self.capacity:
            return None
        self.used_bytes += size
        return self._place(size)

    def free(self, address: int, size: int) -> None:
        """Take back what `malloc` gave."""
        self.used_bytes -= size
        self._vacate(address, size)

    def reserve(self, size: int, owner: FreeList | None = None) -> int:
        """An address range without memory, as from cuMemAddressReserve."""
        return self._place(size)

    def release(self, address: int, size: int) -> None:
        """Give a reserved range back."""
        self._vacate(address, size)

    def map(self, address: int, size: int) -> bool:
        """Put memory behind `size` bytes at `address`; False when memory is short."""
        if self.capacity is not None and self.used_bytes + size > self.capacity:
            return False
        self.used_bytes += size
        return True

    def unmap(self, address: int, size: int) -> None:
        """Take the memory behind a range back."""
        self.used_bytes -= size

    def _place(self, size: int) -> int:
        span = (size + ROUND_LARGE - 1) & -ROUND_LARGE
        downwards = self.addresses == "down"
        if self.addresses == "holes":
            holes = self._holes.get(size)
            if holes:
                return holes.pop(0)
        elif self.addresses == "alternate":
            self._flip = not self._flip
            downwards = self._flip
        if downwards:
            self._lowest -= span
            return self._lowest
        address = self._highest
        self._highest += span
        return address

    def _vacate(self, address: int, size: int) -> None:
        if self.addresses == "holes":
            insort(self._holes.setdefault(size, []), address)
