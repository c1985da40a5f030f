"""Title and alert line of the Snapshot screen, as data."""

from __future__ import annotations

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.history import sentence
from oomscope.units import format_bytes
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.snapshot import plain


def snapshot_headline(name: str, analysis: DeviceAnalysis | None) -> Headline:
    """File, rank, size of the history, peak; without an analysis the file's name alone."""
    facts = [Fact(plain(name), 9)]
    if analysis is not None:
        rank = analysis.snapshot.identity.rank
        if rank is not None:
            facts.append(Fact(f"rank {rank}", 8))
        facts.append(Fact(f"{len(analysis.device.events):,} events", 5))
        facts.append(Fact(f"{format_bytes(analysis.totals.reserved)} reserved at the end", 3))
        if analysis.history.is_usable:
            row = analysis.peak[1] + analysis.device.skipped_events
            facts.append(Fact(f"peak {format_bytes(analysis.peak[0])} @ event {row:,}", 7))
    return Headline("◫", "info", "SNAPSHOT", tuple(facts))


def snapshot_alert(analysis: DeviceAnalysis) -> Alert:
    """The out-of-memory error, else what the history covers."""
    if not analysis.ooms:
        return Alert("info" if analysis.history.is_usable else "warn", sentence(analysis.history))
    oom = analysis.ooms[-1]
    free = "" if oom.device_free_bytes is None else f", {format_bytes(oom.device_free_bytes)} free"
    where = f"event {oom.event_index + analysis.device.skipped_events:,}"
    tried, live = format_bytes(oom.requested_bytes), format_bytes(oom.live_bytes)
    return Alert("error", f"out of memory at {where}: tried {tried}{free}, {live} live")
