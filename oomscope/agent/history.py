"""Torch's allocation history: a bounded ring, switched on unless the job records one itself."""

from __future__ import annotations

from typing import Any

#: Entries of the ring when the settings name none: some hundred MB at most, mostly shared stacks.
MAX_ENTRIES = 100_000


def start_history(torch: Any, settings: dict[str, Any]) -> bool:
    """Switch the history on as agent.json says; False when it is not wanted, not there, or the job's own.

    Stacks are kept of allocations only (`context="alloc"`): nothing here reads where a tensor was freed, and
    gathering a stack is all that a history costs (about 1 µs at 20 Python frames, 2 at 40).
    """
    record = getattr(torch.cuda.memory, "_record_memory_history", None)
    if record is None or not settings.get("enabled", True) or is_recording(torch):
        return False
    record(
        enabled="all",
        context="alloc",
        stacks=settings.get("stacks", "python"),
        max_entries=int(settings.get("max_entries", MAX_ENTRIES)),
    )
    return True


def stop_history(torch: Any) -> None:
    """Switch it off; what was recorded is lost."""
    torch.cuda.memory._record_memory_history(enabled=None)


def is_recording(torch: Any) -> bool:
    """Whether a history is on already."""
    enabled = getattr(torch._C, "_cuda_isHistoryEnabled", None)
    if enabled is not None:
        return bool(enabled())
    return any(torch.cuda.memory._snapshot().get("device_traces") or [])
