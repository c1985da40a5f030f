"""What the allocator tells: errors, statistics, and segments in the schema of torch's snapshots.

Standard library only, Python 3.9: this module also runs inside training jobs.
"""

from __future__ import annotations

from typing import Any

from .model_blocks import DEFAULT_POOL, Block, FreeList
from .model_config import UNLIMITED
from .model_oom import AllocatorOutOfMemory
from .model_release import Releasing
from .model_state import TraceRow


class Reporting(Releasing):
    """Numbers and descriptions of the current state."""

    def _error(
        self, requested: int, size: int, owner: FreeList, preempted: bool = False
    ) -> AllocatorOutOfMemory:
        private = sum(
            block.size for block in self.free_blocks.values() if block.owner.pool.id != DEFAULT_POOL
        )
        return AllocatorOutOfMemory(
            requested,
            size,
            self.driver.free_bytes,
            segment_size=self.config.segment_size(size),
            allocated_bytes=self.allocated_bytes,
            reserved_bytes=self.reserved_bytes,
            private_free_bytes=private,
            allowed_bytes=self.allowed_bytes,
            preempted=preempted,
            stream=owner.stream,
            device=self.device,
        )

    def _out_of_memory(
        self, requested: int, size: int, owner: FreeList, context: Any
    ) -> AllocatorOutOfMemory:
        self.num_ooms += 1
        error = self._error(requested, size, owner)
        if self._tracer is not None:
            row = TraceRow(
                "oom", 0, size, owner.stream, self._clock(), context, error.device_free, owner.pool.id
            )
            self._tracer(row)
        return error

    def memory_stats(self) -> dict[str, Any]:
        """What torch._C._cuda_memoryStats() returns: nested counters, bytes and counts.

        Raises:
            RuntimeError: made with `detailed_stats=False`.
        """
        if self.stats is None:
            raise RuntimeError("this allocator keeps totals only (detailed_stats=False)")
        result = self.stats.to_dict()
        result["num_alloc_retries"] = self.num_alloc_retries
        result["num_ooms"] = self.num_ooms
        result["num_sync_all_streams"] = self.num_sync_all_streams
        result["num_device_alloc"] = self.num_device_alloc
        result["num_device_free"] = self.num_device_free
        limit = self.config.max_split_size
        result["max_split_size"] = -1 if limit == UNLIMITED else limit
        return result

    def reset_peaks(self) -> None:
        """torch.cuda.reset_peak_memory_stats()."""
        self.peak_allocated_bytes = self.allocated_bytes
        self.peak_active_bytes = self.active_bytes
        self.peak_reserved_bytes = self.reserved_bytes
        self.peak_requested_bytes = self.requested_bytes
        if self.stats is not None:
            self.stats.reset_peaks()

    def reset_accumulated(self) -> None:
        """torch.cuda.reset_accumulated_memory_stats()."""
        self.num_alloc_retries = self.num_ooms = self.num_sync_all_streams = 0
        self.num_device_alloc = self.num_device_free = 0
        if self.stats is not None:
            self.stats.reset_accumulated()

    def segments(self) -> list[dict[str, Any]]:
        """All segments with their blocks in the schema of torch.cuda.memory._snapshot()["segments"].

        An expandable segment appears once per contiguous mapped range. Inactive blocks keep the requested
        size of their last use, as in torch.
        """
        heads = [
            block
            for block in (*self.free_blocks.values(), *self.live.values())
            if block.prev is None or not block.prev.mapped
        ]
        return [self._segment(head) for head in sorted(heads, key=lambda block: block.address)]

    def _segment(self, head: Block) -> dict[str, Any]:
        blocks: list[dict[str, Any]] = []
        total = allocated = active = requested = 0
        block: Block | None = head
        while block is not None and block.mapped:
            total += block.size
            if block.is_live:
                active += block.size
                requested += block.requested
                allocated += block.size if block.allocated else 0
            blocks.append(_block_row(block))
            block = block.next
        return {
            "device": self.device,
            "address": head.address,
            "total_size": total,
            "allocated_size": allocated,
            "active_size": active,
            "requested_size": requested,
            "stream": head.owner.stream,
            "segment_type": "small" if head.owner.small else "large",
            "segment_pool_id": head.owner.pool.id,
            "is_expandable": head.reservation is not None,
            "frames": head.segment_context or [],
            "blocks": blocks,
        }


def _block_row(block: Block) -> dict[str, Any]:
    state = "active_allocated" if block.allocated else "active_pending_free" if block.pending else "inactive"
    return {
        "address": block.address,
        "size": block.size,
        "requested_size": block.requested,
        "state": state,
        "frames": (block.context or []) if block.is_live else [],
    }
