"""A snapshot as one HTML file that needs no network: timeline by category, and calls at the cursor."""

from __future__ import annotations

import html
import json
from importlib.resources import files
from typing import Any

import numpy as np

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import IntArray
from oomscope.core.snapshot.history import sentence
from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.stack_rules import tree_frames
from oomscope.report.snapshot_export import highest_rows
from oomscope.views.snapshot import frame_text, moment_name, title

COLUMNS = 1600
"""Points of the timeline: more than a screen has pixels for."""

MAX_ALLOCATIONS = 20_000
"""Allocations that the page can attribute at any moment; the smaller ones are summed up per moment."""


def snapshot_html(snapshot: Snapshot, analyses: list[DeviceAnalysis], moments: list[Focus]) -> str:
    """The page."""
    devices = [_device(analysis, focus) for analysis, focus in zip(analyses, moments, strict=True)]
    numbers = {frame: number for number, frame in enumerate(snapshot.stacks.frames)}
    used = sorted({stack for device in devices for stack in device["stack"] if stack >= 0})
    data = {
        "title": title(snapshot),
        "categories": [each.label for each in Category],
        "frames": [frame_text(frame) for frame in snapshot.stacks.frames],
        "stacks": {
            stack: [numbers[frame] for frame in reversed(tree_frames(snapshot.stacks[stack]))]
            for stack in used
        },
        "devices": devices,
    }
    # In a script element only "<" can end the data early.
    text = json.dumps(data, separators=(",", ":")).replace("<", "\\u003c")
    page = files("oomscope.report").joinpath("snapshot.html").read_text(encoding="utf-8")
    return page.replace("{{title}}", html.escape(snapshot.name)).replace("{{data}}", text)


def _device(analysis: DeviceAnalysis, focus: Focus) -> dict[str, Any]:
    rows = highest_rows(analysis.live.after, COLUMNS) if analysis.history.is_usable else np.zeros(0, np.int64)
    if not len(rows):
        rows = np.array([focus.row], np.int64)
    elif focus.row >= 0:
        rows = np.union1d(rows, [focus.row])
    levels = analysis.category_curves(rows)
    lives = analysis.lives
    kept = _largest(lives.size)
    small = np.ones(len(lives), np.bool_)
    small[kept] = False
    events = analysis.device.events
    times = (events.time_us[rows] - events.time_us[0]).tolist() if events.has_times and rows[0] >= 0 else None
    return {
        "device": analysis.device.device,
        "history": sentence(analysis.history),
        "first": analysis.device.skipped_events,
        "rows": rows.tolist(),
        "times_us": times,
        "levels": levels.tolist(),
        "reserved": [analysis.reserved.at(row) for row in rows.tolist()],
        "focus": int(np.searchsorted(rows, focus.row)),
        "focus_name": moment_name(analysis, focus),
        "ooms": [
            {"row": each.event_index, "bytes": each.requested_bytes, "free": each.device_free_bytes}
            for each in analysis.ooms
        ],
        "steps": analysis.steps.rows.tolist()[:2000],
        "composition": [
            {"label": each.category.label, "bytes": each.bytes, "evidence": each.evidence}
            for each in analysis.composition(focus.row)
        ],
        "born": lives.birth[kept].tolist(),
        "freed": lives.death[kept].tolist(),
        "bytes": lives.size[kept].tolist(),
        "stack": lives.stack[kept].tolist(),
        "category": analysis.category[kept].tolist(),
        "smaller": int(small.sum()),
    }


def _largest(size: IntArray) -> IntArray:
    if len(size) <= MAX_ALLOCATIONS:
        return np.arange(len(size), dtype=np.int64)
    kept: IntArray = np.sort(np.argpartition(-size, MAX_ALLOCATIONS)[:MAX_ALLOCATIONS])
    return kept
