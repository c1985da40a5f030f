"""The allocator's state at the failure, replayed, and the same allocations under other settings.

Nothing is claimed unless the model reproduces the recorded history; then other settings are tried only where
perfect packing would have served the request, because otherwise none can help.
"""

from __future__ import annotations

from oomscope.core.allocator.measures import OomMeasures, at_oom
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig
from oomscope.core.allocator.requests import requests_of
from oomscope.core.allocator.verify import Verification, verify
from oomscope.core.allocator.whatif import Budget, evaluate
from oomscope.core.diagnosis.evidence import AllocatorFact, LiveGroup, OomFact, WhatIf, Where
from oomscope.core.diagnosis.survivors import user_chain
from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.live.evidence_source import source_line

SETTINGS = ("expandable_segments:True", "max_split_size_mb:128")
"""Settings that are tried, the better one first."""
SECONDS = 6.0
"""Time for trying them; a verdict must not keep a person waiting."""
MAX_ROWS = 1_000_000
"""Longer histories are not replayed here; `oomscope whatif` does it in its own time."""


def allocator_facts(
    analysis: DeviceAnalysis, oom: OomFact | None
) -> tuple[AllocatorFact | None, tuple[str, ...]]:
    """(facts, notes) for the failure in `analysis`; (None, reason) when it cannot be judged."""
    if not analysis.ooms:
        return None, ()
    if len(analysis.device.events) > MAX_ROWS:
        return None, ("the history is too long to replay here: oomscope whatif replays it",)
    checked = verify(analysis.snapshot, analysis.device)
    if checked.replay is None:
        return None, ()
    measures = at_oom(
        analysis.snapshot,
        analysis.device,
        capacity=oom.usable_bytes if oom is not None and oom.source != "snapshot" else None,
        verification=checked,
    )
    if measures is None:
        reason = checked.meaning or "the model does not reproduce it"
        return None, (f"the recorded history was not replayed: {reason}",)
    short = measures.shortfall0_bytes
    packing_helps = short is not None and short <= 0 and bool(checked.exact)
    facts = AllocatorFact(
        request=measures.request_bytes,
        active=measures.active_bytes,
        reserved=measures.reserved_bytes,
        shortfall=short,
        pending_free=measures.pending_free_bytes,
        internal=measures.rounding_bytes,
        stranded=measures.stranded_bytes,
        largest_usable=measures.largest_usable_bytes,
        usable_free=measures.usable_free_bytes,
        other_pools_free=measures.other_free_bytes,
        private_pools=_private_bytes(analysis),
        exact=checked.exact,
        what_ifs=_what_ifs(checked, measures) if packing_helps else (),
        pins=_pins(analysis, measures),
    )
    return facts, ()


def _private_bytes(analysis: DeviceAnalysis) -> int:
    """Allocated bytes in pools of CUDA graphs and MemPools, at the end of the file."""
    segments, pools = analysis.device.segments, analysis.snapshot.pools
    private = [index for index, pool in enumerate(pools) if tuple(pool) != DEFAULT_POOL]
    return int(segments.allocated_size[[int(p) in private for p in segments.pool]].sum()) if private else 0


def _what_ifs(checked: Verification, measures: OomMeasures) -> tuple[WhatIf, ...]:
    """The same requests up to the failure, under other settings, within the same capacity."""
    if checked.replay is None or measures.capacity_bytes is None:
        return ()
    trace = requests_of(checked.replay, checked.history, stop=measures.row + 1)
    budget = Budget(SECONDS)
    tried = []
    for text in SETTINGS:
        config = AllocatorConfig.parse(text)
        if config.expandable_segments and checked.config.expandable_segments:
            continue
        found = evaluate(trace, config, capacity=measures.capacity_bytes, search=False, budget=budget)
        if found.fits is not None:
            tried.append(WhatIf(text, found.fits, found.peak_reserved_bytes[1]))
        if found.fits:
            break  # one that fits decides the case; the others are for the list of fixes
    return tuple(tried)


def _pins(analysis: DeviceAnalysis, measures: OomMeasures) -> tuple[LiveGroup, ...]:
    """Live blocks that keep mostly empty segments from being returned, grouped by their line."""
    groups: dict[Where | None, list[int]] = {}
    for pin in measures.pins:
        user = user_chain(analysis.snapshot.stacks[pin.holder.stack]) if pin.holder.stack >= 0 else []
        frame = user[0] if user else None
        where = (
            Where(frame.file, frame.line, frame.function, source_line(frame.file, frame.line))
            if frame
            else None
        )
        entry = groups.setdefault(where, [0, 0, 0])
        entry[0] += pin.free_bytes
        entry[1] += 1
        entry[2] = max(entry[2], pin.holder.size)
    ranked = sorted(groups.items(), key=lambda item: -item[1][0])
    return tuple(
        LiveGroup(free, count, "pin", where, None, most) for where, (free, count, most) in ranked[:3]
    )
