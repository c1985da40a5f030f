"""Snapshots for other tools: Perfetto, flame graphs, spreadsheets, and plain JSON."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator
from itertools import pairwise
from typing import IO, Any

import numpy as np

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import IntArray
from oomscope.core.snapshot.flame import call_tree, folded_lines
from oomscope.core.snapshot.ranges import paired_ranges
from oomscope.report.snapshot_json import frames_json
from oomscope.views.snapshot import stack_label

MAX_POINTS = 50_000
"""Points per counter in a Perfetto trace; more make its page slow. The highest of each stretch is kept."""


def highest_rows(after: IntArray, columns: int) -> IntArray:
    """Rows to draw when there is room for `columns` points: the highest row of each stretch, ascending."""
    total = len(after)
    if total <= columns:
        return np.arange(total, dtype=np.int64)
    edges = np.linspace(0, total, columns + 1).astype(np.int64)
    rows = [int(start + np.argmax(after[start:stop])) for start, stop in pairwise(edges.tolist())]
    return np.array(rows, np.int64)


def write_perfetto(out: IO[str], analyses: list[DeviceAnalysis]) -> None:
    """Chrome trace-event JSON for ui.perfetto.dev: counters per device, annotated ranges, errors."""
    out.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for number, event in enumerate(_trace_events(analyses)):
        out.write((",\n" if number else "") + json.dumps(event))
    out.write("\n]}\n")


def _trace_events(analyses: list[DeviceAnalysis]) -> Iterator[dict[str, Any]]:
    for analysis in analyses:
        pid = analysis.device.device
        yield {"ph": "M", "name": "process_name", "pid": pid, "args": {"name": f"device {pid}"}}
        if not analysis.history.is_usable:
            continue
        rows = highest_rows(analysis.live.after, MAX_POINTS)
        times = _times(analysis, rows)
        levels = analysis.category_curves(rows)
        reserved = analysis.reserved.after[rows]
        for column, time in enumerate(times):
            parts = {each.label: int(levels[each, column]) for each in Category if levels[each].any()}
            yield {"ph": "C", "name": "live bytes", "pid": pid, "ts": time, "args": parts}
            total = {"reserved": int(reserved[column])}
            yield {"ph": "C", "name": "reserved bytes", "pid": pid, "ts": time, "args": total}
        for oom in analysis.ooms:
            time = _times(analysis, np.array([oom.event_index]))[0]
            args = {"requested_bytes": oom.requested_bytes}
            yield {
                "ph": "i",
                "name": "out of memory",
                "pid": pid,
                "tid": 0,
                "ts": time,
                "s": "p",
                "args": args,
            }
    if analyses:
        for each in paired_ranges(analyses[0].snapshot, with_compile=True):
            if each.start_us is not None and each.end_us is not None:
                length = each.end_us - each.start_us
                place = {"pid": max(each.device, 0), "tid": 1, "ts": each.start_us}
                yield {"ph": "X", "name": each.name, "dur": length, **place}


def _times(analysis: DeviceAnalysis, rows: IntArray) -> list[int]:
    """Microseconds of rows; their numbers when the history has no times."""
    events = analysis.device.events
    times: list[int] = events.time_us[rows].tolist() if events.has_times else rows.tolist()
    return times


def write_flamegraph(out: IO[str], analyses: list[DeviceAnalysis], moments: list[Focus]) -> None:
    """Folded stacks with bytes, for flamegraph.pl, inferno or speedscope."""
    for analysis, focus in zip(analyses, moments, strict=True):
        tree = call_tree(
            analysis.snapshot.stacks, analysis.top(focus.row), root=f"device {analysis.device.device}"
        )
        for line in folded_lines(tree):
            out.write(line + "\n")


COLUMNS = (
    "device", "address", "bytes", "stream", "category", "step",
    "born_event", "released_event", "freed_event", "where", "stack",
)  # fmt: skip


def write_csv(out: IO[str], analyses: list[DeviceAnalysis]) -> None:
    """One line per allocation; an empty event means before the history or never."""
    writer = csv.writer(out)
    writer.writerow(COLUMNS)
    for analysis in analyses:
        stacks, streams = analysis.snapshot.stacks, analysis.snapshot.streams
        wheres = {-1: ("no stack recorded", "")}
        for row in _allocations(analysis):
            stack = row["stack"]
            if stack not in wheres:
                wheres[stack] = stack_label(stacks, stack), " < ".join(frames_json(stacks[stack]))
            writer.writerow(
                [
                    analysis.device.device, hex(row["address"]), row["bytes"], streams[row["stream"]],
                    Category(row["category"]).label, "" if row["step"] is None else row["step"],
                    *("" if row[key] is None else row[key] for key in ("born", "released", "freed")),
                    *(_harmless(text) for text in wheres[stack]),
                ]
            )  # fmt: skip


def _harmless(text: str) -> str:
    """Text that a spreadsheet does not take for a formula."""
    return "'" + text if text[:1] in ("=", "+", "-", "@", "\t", "\r") else text


def _allocations(analysis: DeviceAnalysis) -> Iterator[dict[str, Any]]:
    lives, first = analysis.lives, analysis.device.skipped_events
    steps = analysis.steps.of(lives.birth) if analysis.steps.source != "none" else None
    columns = (lives.address, lives.size, lives.stream, lives.stack, analysis.category)
    parts = [column.tolist() for column in columns]
    rows = zip(*parts, lives.birth.tolist(), lives.release.tolist(), lives.death.tolist(), strict=True)
    for number, (address, size, stream, stack, category, born, released, freed) in enumerate(rows):
        yield {
            "address": address,
            "bytes": size,
            "stream": stream,
            "stack": stack,
            "category": category,
            "step": int(steps[number]) if steps is not None and born >= 0 else None,
            "born": born + first if born >= 0 else None,
            "released": released + first if released < lives.n_events else None,
            "freed": freed + first if freed < lives.n_events else None,
        }


def write_json(out: IO[str], analyses: list[DeviceAnalysis]) -> None:
    """`oomscope.allocations/1`: every allocation as columns, with the tables they refer to."""
    snapshot = analyses[0].snapshot if analyses else None
    found: dict[str, Any] = {
        "schema": "oomscope.allocations/1",
        "streams": snapshot.streams if snapshot else [],
        "categories": [each.label for each in Category],
        "stacks": []
        if snapshot is None
        else [frames_json(snapshot.stacks[n]) for n in range(len(snapshot.stacks))],
        "devices": [],
    }
    for analysis in analyses:
        rows = list(_allocations(analysis))
        names = ("address", "bytes", "stream", "stack", "category", "step", "born", "released", "freed")
        found["devices"].append(
            {"device": analysis.device.device, **{name: [row[name] for row in rows] for name in names}}
        )
    json.dump(found, out)
    out.write("\n")
