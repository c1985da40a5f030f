"""Replays and what-if answers as sentences and table rows, for the command line and the screens alike."""

from __future__ import annotations

from dataclasses import dataclass

from oomscope.core.allocator.measures import OomMeasures
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.verify import Verification
from oomscope.core.allocator.whatif import Assessment, ConfigAssessment
from oomscope.core.diagnosis.survivors import user_chain
from oomscope.core.snapshot.columns import StackTable
from oomscope.units import format_bytes

#: Blocks in the way that are named one by one.
MAX_NAMED = 5

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


def whatif_bounds(found: Assessment) -> list[str]:
    """The live peak, the best placement, the capacity, and what they say about each other."""
    lines = [f"Live blocks alone come to {format_bytes(found.live_peak_bytes)}: no setting needs less."]
    if found.offline_bytes is not None and found.offline_bytes > found.live_peak_bytes:
        lines.append(
            f"Placed in one range with knowledge of the future: {format_bytes(found.offline_bytes)}."
        )
    if found.capacity_bytes is None:
        return [*lines, "No capacity is known; give one with --capacity."]
    source = "shown by the out-of-memory row" if found.capacity_source == "oom row" else "given"
    lines.append(f"Capacity: {format_bytes(found.capacity_bytes)} ({source}).")
    shortfall = found.shortfall_bytes
    if shortfall is not None and shortfall > 0:
        lines.append(f"Live blocks exceed it by {format_bytes(shortfall)}: this is no matter of settings.")
    return lines


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


def place_words(stacks: StackTable, stack: int) -> str | None:
    """The user's own frame of a stack, as "keep_result, model.py:77"; None when there is none."""
    frames = stacks[stack] if stack >= 0 else []
    chain = user_chain(frames) or [frame for frame in frames if frame.is_python][:1]
    return f"{chain[0].function}, {chain[0].file}:{chain[0].line}" if chain else None


def failure_lines(found: OomMeasures, stacks: StackTable) -> list[str]:
    """What stood between the failed request and its memory."""
    request = format_bytes(found.request_bytes)
    lines = [
        f"The request that failed (event {found.row:,}): {request}. Free in its pool and stream: "
        f"{format_bytes(found.usable_free_bytes)}, the largest piece {format_bytes(found.largest_usable_bytes)}."
    ]
    short = found.shortfall0_bytes
    if short is not None and short > 0:
        lines.append(f"It lacked {format_bytes(short)} even with perfect packing.")
    elif found.autopsy is not None:
        blocks = found.autopsy.blocks
        total = format_bytes(found.autopsy.live_bytes)
        lines.append(f"Fewest blocks in its way: {len(blocks)}, together {total}.")
        for block in blocks[:MAX_NAMED]:
            age = "older than the history" if block.age_rows is None else f"{block.age_rows:,} events old"
            place = place_words(stacks, block.stack) or "stack unknown"
            lines.append(f"  {format_bytes(block.size)}  {place}, {age}")
    return lines


def failure_json(found: OomMeasures | None, stacks: StackTable) -> dict[str, object] | None:
    """The entry `failure` of a device in oomscope.whatif/1."""
    if found is None:
        return None
    blocks = () if found.autopsy is None else found.autopsy.blocks
    return {
        "event_index": found.row,
        "request_bytes": found.request_bytes,
        "shortfall_bytes": found.shortfall0_bytes,
        "usable_free_bytes": found.usable_free_bytes,
        "largest_usable_bytes": found.largest_usable_bytes,
        "in_the_way": [
            {"size_bytes": block.size, "allocated_at": block.row, "where": place_words(stacks, block.stack)}
            for block in blocks
        ],
    }
