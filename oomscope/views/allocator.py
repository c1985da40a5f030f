"""Replays and what-if answers as sentences and table rows, for the command line and the screens alike."""

from __future__ import annotations

from dataclasses import dataclass

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.verify import Verification
from oomscope.core.allocator.whatif import Assessment, ConfigAssessment
from oomscope.units import format_bytes

#: Heads of the what-if table, in the order of the cells of a `WhatIfRow`.
WHATIF_HEADS = ("setting", "peak reserved", "smallest device", "retries", "fits")

#: Why the two numbers differ; one paragraph wherever both are shown.
TWO_NUMBERS = (
    "Peak reserved is what the allocator takes when nothing limits it. The smallest device on which everything "
    "fits is what decides: at a shortage, free segments go back to the driver first."
)


@dataclass(frozen=True, slots=True)
class WhatIfRow:
    """One setting, ready to show."""

    setting: str
    peak_reserved: str
    smallest_device: str
    retries: str
    fits: str
    is_recorded: bool
    is_recommended: bool

    @property
    def cells(self) -> tuple[str, str, str, str, str]:
        return (self.setting, self.peak_reserved, self.smallest_device, self.retries, self.fits)


def config_words(config: AllocatorConfig) -> str:
    """The setting as one would type it; "defaults" when there is nothing to type."""
    return config.to_text() or "defaults"


def range_words(low: int, high: int) -> str:
    """One size as "8.27 GiB", or "11.64 to 11.67 GiB" when address models differ."""
    first, last = format_bytes(low), format_bytes(high)
    if first == last:
        return first
    number, _, unit = first.rpartition(" ")
    return f"{number} to {last}" if last.endswith(unit) else f"{first} to {last}"


def replay_verdict(found: Verification) -> str:
    """One sentence: does the model reproduce this device's history?"""
    events = f"{len(found.history):,} events"
    if found.replay is None:
        return f"device {found.device}: no history to replay"
    if found.exact:
        return f"device {found.device}: the model reproduces all {events} exactly"
    assert found.replay.divergence is not None
    row = found.replay.divergence.row
    where = "in the final state" if row >= len(found.history) else f"at event {row:,}"
    return f"device {found.device}: the model differs from the {events} {where}"


def replay_details(found: Verification) -> list[tuple[str, str]]:
    """(label, text) lines below the verdict."""
    lines = [("settings", config_words(found.config))]
    if found.config.tiebreak != "address":
        lines.append(("ties", f"the oldest {found.config.tiebreak} first"))
    if found.inferred:
        lines.append(("inferred", ", ".join(found.inferred)))
    if found.replay is not None and found.replay.divergence is not None:
        divergence = found.replay.divergence
        lines.append(("recorded", divergence.recorded))
        lines.append(("the model", divergence.predicted))
        lines.append(("meaning", found.meaning or ""))
    lines.extend(("note", note) for note in found.notes)
    return lines


def whatif_rows(found: Assessment) -> list[WhatIfRow]:
    """The table, in the order the settings were tried."""
    return [_row(found, each) for each in found.configs]


def _row(found: Assessment, each: ConfigAssessment) -> WhatIfRow:
    text = each.config.to_text()
    is_recorded = found.recorded is not None and found.recorded.to_text() == text
    need = each.min_capacity_bytes
    fits = (
        {True: "yes", False: "no", None: "not sure"}[each.fits] if found.capacity_bytes is not None else "?"
    )
    return WhatIfRow(
        setting=config_words(each.config) + (" (as recorded)" if is_recorded else ""),
        peak_reserved=range_words(*each.peak_reserved_bytes),
        smallest_device=range_words(*need) if need is not None else "not searched",
        retries=str(each.retries) if found.capacity_bytes is not None else "-",
        fits=fits,
        is_recorded=is_recorded,
        is_recommended=found.recommended is not None and found.recommended.to_text() == text,
    )


def whatif_bound(found: Assessment) -> str:
    """The live peak, and what it says about the capacity."""
    sentence = f"Live blocks alone come to {format_bytes(found.live_peak_bytes)}: no setting needs less."
    if found.capacity_bytes is None:
        return sentence + " No capacity is known; give one with --capacity."
    source = "shown by the out-of-memory row" if found.capacity_source == "oom row" else "given"
    sentence += f" Capacity: {format_bytes(found.capacity_bytes)} ({source})."
    shortfall = found.shortfall_bytes
    if shortfall is not None and shortfall > 0:
        sentence += f" They exceed it by {format_bytes(shortfall)}: this is no matter of settings."
    return sentence


def whatif_advice(found: Assessment) -> str:
    """The recommendation, or why there is none."""
    if found.recommended is not None:
        return (
            f"Recommended: PYTORCH_CUDA_ALLOC_CONF={found.recommended.to_text()} "
            "(with it everything fits, as recorded it does not)"
        )
    recorded = None if found.recorded is None else found.find(found.recorded)
    if found.capacity_bytes is None or recorded is None:
        return "No recommendation: without a capacity no setting decides anything."
    if recorded.fits:
        return "No recommendation: the recorded setting fits."
    if any(each.fits is not False for each in found.configs):
        return "No recommendation: too close to call, the answer depends on where the driver places segments."
    return "No recommendation: no setting makes it fit."
