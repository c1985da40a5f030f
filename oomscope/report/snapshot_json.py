"""The objects that `oomscope inspect --json` and `oomscope diff --json` print; see `oomscope/schemas/`."""

from __future__ import annotations

from typing import Any

import numpy as np

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.columns import Frame, Int32Array, IntArray
from oomscope.core.snapshot.curves import column_rows, curves_by
from oomscope.core.snapshot.diff import Change, Difference
from oomscope.core.snapshot.groups import by_line, by_module, by_size
from oomscope.core.snapshot.history import History
from oomscope.core.snapshot.model import Snapshot, SnapshotWarning
from oomscope.core.snapshot.ranges import paired_ranges, uses_compile
from oomscope.core.snapshot.stack_rules import shown_frames

TOP = 20
POINTS = 240
"""Points of a timeline at most."""


def snapshot_json(
    snapshot: Snapshot, analyses: list[DeviceAnalysis], moments: list[Focus], *, top: int = TOP
) -> dict[str, Any]:
    """`oomscope.snapshot/1`: sizes in bytes, event numbers as in the file."""
    return {
        "schema": "oomscope.snapshot/1",
        "name": snapshot.name,
        "torch_version": snapshot.torch_version,
        "torch_at_least": snapshot.torch_at_least,
        "rank": snapshot.identity.rank,
        "step": snapshot.identity.step,
        "pid": snapshot.identity.pid,
        "settings": snapshot.settings,
        "uses_compile": uses_compile(snapshot),
        "annotations": len(paired_ranges(snapshot)),
        "warnings": [
            {"code": each.code, "message": each.message} for each in all_warnings(snapshot, analyses)
        ],
        "devices": [
            device_json(analysis, focus, top=top) for analysis, focus in zip(analyses, moments, strict=True)
        ],
    }


def all_warnings(snapshot: Snapshot, analyses: list[DeviceAnalysis]) -> list[SnapshotWarning]:
    """What the loader noted, and what the analyses found."""
    found = list(snapshot.warnings)
    for analysis in analyses:
        number = analysis.device.device
        if analysis.history is History.CUT:
            text = f"device {number}: the history frees more than was there; it was cut or edited"
            found.append(SnapshotWarning("history-cut", text))
        if analysis.history is History.RING:
            text = f"device {number}: recording kept {len(analysis.device.events)} event only: no history"
            found.append(SnapshotWarning("history-ring", text))
        if analysis.history.is_usable and analysis.peak[0] > analysis.reserved.peak()[0]:
            text = f"device {number}: more was live than reserved at the peak: the file was edited or made up"
            found.append(SnapshotWarning("live-over-reserved", text))
        if analysis.device.skipped_events:
            text = f"device {number}: {analysis.device.skipped_events} older events were left out on request"
            found.append(SnapshotWarning("events-skipped", text))
    return found


def device_json(analysis: DeviceAnalysis, focus: Focus, *, top: int) -> dict[str, Any]:
    """One entry of "devices"."""
    return {
        "device": analysis.device.device,
        **_totals(analysis),
        **_history(analysis),
        **_at(analysis, focus, top),
        **_over_time(analysis, top),
        **_segments(analysis, top),
    }


def _totals(analysis: DeviceAnalysis) -> dict[str, Any]:
    totals = analysis.totals
    return {
        "reserved_bytes": totals.reserved,
        "allocated_bytes": totals.allocated,
        "active_bytes": totals.active,
        "requested_bytes": totals.requested,
        "inactive_bytes": totals.inactive,
        "largest_inactive_bytes": totals.largest_inactive,
        "pending_free_bytes": totals.pending_free,
        "whole_free_bytes": totals.whole_free,
        "segments": totals.segments,
        "blocks": totals.blocks,
    }


def _history(analysis: DeviceAnalysis) -> dict[str, Any]:
    device = analysis.device
    first = device.skipped_events
    peak_bytes, peak_row = analysis.peak
    return {
        "events": len(device.events),
        "skipped_events": first,
        "baseline_requested_bytes": analysis.live.before,
        "peak_requested_bytes": peak_bytes,
        "peak_event_index": None if analysis.history is History.NONE else _event(peak_row, first),
        "baseline_reserved_bytes": analysis.reserved.before,
        "peak_reserved_bytes": analysis.reserved.peak(device.n_analysed)[0],
        "history": analysis.history.value,
        "oom": [
            {
                "event_index": each.event_index + first,
                "requested_bytes": each.requested_bytes,
                "device_free_bytes": each.device_free_bytes,
                "live_bytes": each.live_bytes,
                "reserved_bytes": each.reserved_bytes,
                "frames": frames_json(analysis.snapshot.stacks[each.stack]),
            }
            for each in analysis.ooms
        ],
    }


def _at(analysis: DeviceAnalysis, focus: Focus, top: int) -> dict[str, Any]:
    """What is live at one moment."""
    alive = analysis.alive(focus.row)
    lives, stacks = analysis.lives, analysis.snapshot.stacks
    without = analysis.history is History.NONE
    return {
        "at": {
            "reason": focus.reason,
            "event_index": None if without else _event(focus.row, analysis.device.skipped_events),
            "live_bytes": int(lives.size[alive].sum()),
        },
        "composition": [
            {
                "category": each.category.label,
                "bytes": each.bytes,
                "blocks": each.blocks,
                "evidence": each.evidence,
            }
            for each in analysis.composition(focus.row)
        ],
        "top": [
            {"bytes": size, "blocks": blocks, "frames": frames_json(stacks[stack])}
            for stack, size, blocks in analysis.top(focus.row)[:top]
        ],
        "lines": [_group(each) for each in by_line(stacks, lives, alive)[:top]],
        "modules": [_group(each) for each in by_module(stacks, lives, alive)[:top]],
        "sizes": [
            {"up_to_bytes": bound, "bytes": size, "blocks": blocks}
            for bound, size, blocks in by_size(lives, alive)
        ],
    }


def _over_time(analysis: DeviceAnalysis, top: int) -> dict[str, Any]:
    steps, stacks = analysis.steps, analysis.snapshot.stacks
    used = sorted(set(analysis.lives.stream.tolist()))
    curves = [(number, analysis.curve(stream=number)) for number in used]
    return {
        "streams": [
            {
                "stream": analysis.snapshot.streams[number],
                "peak_bytes": curve.peak(analysis.device.n_analysed)[0],
                "end_bytes": curve.at(len(curve.after) - 1),
            }
            for number, curve in curves
        ],
        "timeline": _timeline(analysis),
        "steps": {"count": steps.count if steps.source != "none" else None, "source": steps.source},
        "survivors": [
            {
                "bytes": each.bytes,
                "blocks": each.blocks,
                "bytes_per_step": each.bytes_per_step,
                "steps": each.steps,
                "inner_steps": each.inner_steps,
                "steady": each.is_steady,
                "frames": frames_json(stacks[each.stack]),
            }
            for each in analysis.survivors[:top]
        ],
    }


def _timeline(analysis: DeviceAnalysis) -> dict[str, Any] | None:
    """Levels over the history, in all and of each stream and pool; None when the history does not tell them.

    Each point stands for a stretch of rows and is the one at which most was live, so that no peak is lost.
    """
    count = analysis.device.n_analysed
    if not analysis.history.is_usable or not count:
        return None
    rows = column_rows(analysis.live.after, 0, count, min(count, POINTS))
    lives, snapshot = analysis.lives, analysis.snapshot

    def levels(of_each: IntArray | Int32Array) -> list[tuple[int, list[int]]]:
        """(number, live bytes at `rows`) of each stream or pool."""
        used, group = np.unique(of_each, return_inverse=True)
        return list(zip(used.tolist(), curves_by(lives, group, len(used), rows).tolist(), strict=True))

    return {
        "event_index": (rows + analysis.device.skipped_events).tolist(),
        "live_bytes": analysis.live.after[rows].tolist(),
        "reserved_bytes": analysis.reserved.after[rows].tolist(),
        "streams": [
            {"stream": snapshot.streams[number], "live_bytes": each} for number, each in levels(lives.stream)
        ],
        "pools": [
            {"pool": list(snapshot.pools[number]) if number >= 0 else None, "live_bytes": each}
            for number, each in levels(analysis.pool)
        ],
    }


def _segments(analysis: DeviceAnalysis, top: int) -> dict[str, Any]:
    stacks = analysis.snapshot.stacks
    return {
        "pools": [
            {
                "pool": list(each.pool),
                "stream": each.stream,
                "size_class": "large" if each.is_large else "small",
                "segments": each.segments,
                "reserved_bytes": each.reserved_bytes,
                "active_bytes": each.active_bytes,
                "inactive_bytes": each.inactive_bytes,
                "largest_free_bytes": each.largest_free_bytes,
                "free_blocks": each.free_blocks,
                "whole_free_bytes": each.whole_free_bytes,
                "stranded_bytes": each.stranded_bytes,
                "pending_bytes": each.pending_bytes,
            }
            for each in analysis.pools
        ],
        "pins": [
            {
                "address": each.address,
                "total_bytes": each.total_bytes,
                "free_bytes": each.free_bytes,
                "live_blocks": each.live_blocks,
                "live_bytes": each.live_bytes,
                "frames": frames_json(stacks[each.stack]),
            }
            for each in analysis.pins[:top]
        ],
    }


def diff_json(difference: Difference, names: tuple[str, str]) -> dict[str, Any]:
    """`oomscope.diff/1`: "bytes" is the change, after minus before."""
    return {
        "schema": "oomscope.diff/1",
        "before": {"name": names[0], "bytes": difference.before_bytes},
        "after": {"name": names[1], "bytes": difference.after_bytes},
        "added": [_change(each) for each in difference.added],
        "removed": [_change(each) for each in difference.removed],
        "grown": [_change(each) for each in difference.grown],
        "shrunk": [_change(each) for each in difference.shrunk],
    }


def frames_json(frames: list[Frame] | tuple[Frame, ...]) -> list[str]:
    """Texts "file:line function" for the frames that people want to see, innermost first."""
    return [str(frame) for frame in shown_frames(list(frames))]


def _event(row: int, first: int) -> int:
    return row if row < 0 else row + first


def _group(group: Any) -> dict[str, Any]:
    return {"label": group.label, "bytes": group.bytes, "blocks": group.blocks}


def _change(change: Change) -> dict[str, Any]:
    return {
        "bytes": change.bytes,
        "before_bytes": change.before_bytes,
        "after_bytes": change.after_bytes,
        "before_blocks": change.before_blocks,
        "after_blocks": change.after_blocks,
        "frames": frames_json(change.frames),
    }
