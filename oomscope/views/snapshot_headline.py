"""Title and alert line of the Snapshot screen, as data."""

from __future__ import annotations

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.history import sentence
from oomscope.units import format_bytes
from oomscope.views.headline import Alert, Fact, Headline
from oomscope.views.snapshot import count, plain
from oomscope.views.snapshot_exact import Failure

_NAME = 36
"""Characters of a file name: with a peak they fit in 80 columns."""


def snapshot_headline(name: str, analysis: DeviceAnalysis | None) -> Headline:
    """File, rank, size of the history, peak; without an analysis the file's name alone."""
    facts = [Fact(_shortened(plain(name)), 9)]
    if analysis is not None:
        rank = analysis.snapshot.identity.rank
        if rank is not None:
            facts.append(Fact(f"rank {rank}", 8))
        facts.append(Fact(f"{len(analysis.device.events):,} events", 5))
        facts.append(Fact(f"{format_bytes(analysis.totals.reserved)} reserved at the end", 3))
        if analysis.history.is_usable:
            row = analysis.peak[1] + analysis.device.skipped_events
            facts.append(Fact(f"peak {format_bytes(analysis.peak[0])}", 7))
            facts.append(Fact(f"at event {row:,}", 2))
    return Headline("◫", "info", "SNAPSHOT", tuple(facts))


def _shortened(name: str) -> str:
    """A file name with its beginning and its end, so that room for a fact is left."""
    return name if len(name) <= _NAME else f"{name[: _NAME // 2 - 1]}…{name[-_NAME // 2 :]}"


def snapshot_alert(analysis: DeviceAnalysis, failure: Failure | None = None) -> Alert:
    """The out-of-memory error, with what stood in its way if that is known; else what the history covers.

    Args:
        analysis: the device.
        failure: what a replay says about the error to speak of; without it the last one is spoken of.
    """
    if not analysis.ooms:
        left_out = analysis.device.skipped_events
        skipped = f" {count(left_out, 'older event')} left out on request." if left_out else ""
        severity = "info" if analysis.history.is_usable else "warn"
        return Alert(severity, sentence(analysis.history) + skipped)
    oom = analysis.ooms[-1]
    if failure is not None:
        oom = next((each for each in analysis.ooms if each.event_index == failure.row), oom)
    free = "" if oom.device_free_bytes is None else f", {format_bytes(oom.device_free_bytes)} free"
    where = f"event {oom.event_index + analysis.device.skipped_events:,}"
    tried, live = format_bytes(oom.requested_bytes), format_bytes(oom.live_bytes)
    if failure is not None and failure.blocks and failure.found is not None:
        number, size = len(failure.blocks), format_bytes(failure.found.live_bytes)
        verb = "stands" if number == 1 else "stand"
        in_way = f"{count(number, 'block')}, {size}, {verb} in the way of {tried}"
        return Alert("error", f"out of memory: {in_way} ({where}{free}, {live} live)")
    return Alert("error", f"out of memory at {where}: tried {tried}{free}, {live} live")
