"""The allocator's state at the failure, replayed, and the same allocations under other settings."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import AllocatorFact, OomFact
from oomscope.core.snapshot.analysis import DeviceAnalysis


def allocator_facts(analysis: DeviceAnalysis, oom: OomFact | None) -> tuple[AllocatorFact | None, tuple[str, ...]]:
    """(facts, notes) for the failure in `analysis`; (None, reason) when it cannot be judged."""
    return None, ()
