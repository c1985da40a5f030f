"""`oomscope inspect` and `oomscope diff` as text: aligned columns, no boxes, fit to be piped."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.diff import Change, Difference
from oomscope.core.snapshot.history import History, sentence
from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.ranges import paired_ranges, uses_compile
from oomscope.core.snapshot.stack_rules import is_user_code
from oomscope.report.snapshot_json import all_warnings
from oomscope.units import format_bytes, format_change
from oomscope.views.snapshot import (
    callers,
    count,
    fragmentation_sentences,
    frame_text,
    moment_name,
    plain,
    ranking,
    stack_label,
    title,
)

SourceOf = Callable[[str, int], "str | None"]
"""(file, line) -> its text when the file is at hand."""


def snapshot_text(
    snapshot: Snapshot,
    analyses: list[DeviceAnalysis],
    moments: list[Focus],
    *,
    by: str = "stack",
    top: int = 10,
    source_of: SourceOf | None = None,
) -> str:
    """The whole report."""
    lines = [title(snapshot), *_settings(snapshot)]
    for analysis, focus in zip(analyses, moments, strict=True):
        if not analysis.totals.segments and not len(analysis.device.events):
            lines += ["", f"device {analysis.device.device}   empty"]
            continue
        lines += ["", *_device(analysis, focus, by, top, source_of)]
    warnings = all_warnings(snapshot, analyses)
    if warnings:
        lines += ["", "Warnings", *(f"  {each.code}: {plain(each.message)}" for each in warnings)]
    return "\n".join(lines) + "\n"


def _settings(snapshot: Snapshot) -> Iterator[str]:
    text = str(snapshot.settings.get("PYTORCH_CUDA_ALLOC_CONF") or "")
    if text:
        yield f"allocator settings: {plain(text)}"
    if snapshot.settings.get("expandable_segments") is False and "expandable_segments:True" in text:
        yield "  expandable_segments was asked for but is off"
    if uses_compile(snapshot):
        yield "torch.compile is in use"
    ranges = paired_ranges(snapshot)
    if ranges:
        names = ", ".join(sorted({each.name for each in ranges})[:4])
        yield f"{count(len(ranges), 'annotated range')}: {plain(names)}"


def _device(
    analysis: DeviceAnalysis, focus: Focus, by: str, top: int, source_of: SourceOf | None
) -> Iterator[str]:
    totals = analysis.totals
    yield (
        f"device {analysis.device.device}   reserved {format_bytes(totals.reserved)}   "
        f"active {format_bytes(totals.active)}   "
        f"{count(totals.segments, 'segment')}, {count(totals.blocks, 'block')}"
    )
    yield f"  {sentence(analysis.history)}"
    yield from _peak(analysis)
    for oom in analysis.ooms:
        free = "" if oom.device_free_bytes is None else f", {format_bytes(oom.device_free_bytes)} free"
        yield (
            f"  OUT OF MEMORY at event {oom.event_index + analysis.device.skipped_events:,}: "
            f"tried {format_bytes(oom.requested_bytes)}{free}; "
            f"{format_bytes(oom.live_bytes)} live just before"
        )
    yield ""
    live = int(analysis.lives.size[analysis.alive(focus.row)].sum())
    yield f"  {moment_name(analysis, focus).capitalize()}: {format_bytes(live)} live"
    for share in analysis.composition(focus.row):
        part = share.bytes / live if live else 0
        yield f"  {format_bytes(share.bytes):>12} {part:>5.0%}  {share.category.label:<16} {share.evidence}"
    yield ""
    yield from _holders(analysis, focus, by, top, source_of)
    yield from _segments(analysis)
    yield from _left_behind(analysis, top)


def _peak(analysis: DeviceAnalysis) -> Iterator[str]:
    if not analysis.history.is_usable:
        return
    peak, row = analysis.peak
    where = f"at event {row + analysis.device.skipped_events:,}" if row >= 0 else "before the first event"
    reserved = analysis.reserved.peak(analysis.device.n_analysed)[0]
    yield f"  peak {format_bytes(peak)} {where}; reserved at most {format_bytes(reserved)}"


def _holders(
    analysis: DeviceAnalysis, focus: Focus, by: str, top: int, source_of: SourceOf | None
) -> Iterator[str]:
    rows = ranking(analysis, focus.row, by, top)
    if rows:
        yield f"  Largest by {by}"
    for row in rows:
        blocks = f"×{row.blocks:,}"
        yield f"  {format_bytes(row.bytes):>12} {blocks:>8}  {row.label}"
        if by != "stack" or row.stack < 0:
            continue
        frames = callers(analysis.snapshot.stacks, row.stack, limit=4)
        text = source_of(frames[0].file, frames[0].line) if source_of and frames else None
        if text:
            yield f"{'':26}{plain(text)}"
        for frame in frames[1:]:
            if is_user_code(frame):
                yield f"{'':26}from {frame_text(frame)}"


def _segments(analysis: DeviceAnalysis) -> Iterator[str]:
    said = fragmentation_sentences(analysis)
    if not said:
        return
    yield ""
    yield "  Segments at the end"
    for text in said:
        yield f"    {text}"
    for pin in analysis.pins[:3]:
        held = stack_label(analysis.snapshot.stacks, pin.stack)
        yield (
            f"    segment {pin.address:#x}: {format_bytes(pin.live_bytes)} live in "
            f"{count(pin.live_blocks, 'block')} keep {format_bytes(pin.total_bytes)} ({held})"
        )


def _left_behind(analysis: DeviceAnalysis, top: int) -> Iterator[str]:
    if analysis.history is History.NONE or not analysis.survivors:
        return
    yield ""
    yield f"  Left alive step after step ({analysis.steps.count} steps, found by {analysis.steps.source})"
    for each in analysis.survivors[:top]:
        verdict = "  <- leak candidate" if each.is_steady else ""
        yield (
            f"  {format_bytes(each.bytes_per_step):>12} a step in {each.steps} of {each.inner_steps} steps  "
            f"{stack_label(analysis.snapshot.stacks, each.stack)}{verdict}"
        )


def diff_text(difference: Difference, names: tuple[str, str], *, top: int = 10) -> str:
    """The comparison of two states."""
    change = format_change(difference.after_bytes - difference.before_bytes)
    lines = [
        f"before  {format_bytes(difference.before_bytes):>12}  {plain(names[0])}",
        f"after   {format_bytes(difference.after_bytes):>12}  {plain(names[1])}",
        f"change  {change:>12}",
    ]
    parts = (
        ("Added", difference.added), ("Removed", difference.removed),
        ("Grown", difference.grown), ("Shrunk", difference.shrunk),
    )  # fmt: skip
    for word, changes in parts:
        if changes:
            total = sum(each.bytes for each in changes)
            lines += ["", f"{word}: {count(len(changes), 'stack')}, {format_change(total)}"]
            lines += [line for each in changes[:top] for line in _change(each)]
            if len(changes) > top:
                lines.append(f"{'':14}… {count(len(changes) - top, 'more stack')}")
    return "\n".join(lines) + "\n"


def _change(change: Change) -> Iterator[str]:
    own = [frame for frame in change.frames if is_user_code(frame)]
    frames = own or list(change.frames)
    label = frame_text(frames[0]) if frames else "no stack recorded"
    blocks = f"×{change.before_blocks} → ×{change.after_blocks}"
    yield f"{format_change(change.bytes):>14}  {label}   {blocks}"
    for frame in frames[1:3]:
        yield f"{'':16}from {frame_text(frame)}"
