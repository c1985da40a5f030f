"""Sentences and rows about a snapshot that the text report and the screen share."""

from __future__ import annotations

import re
from dataclasses import dataclass

from oomscope.core.snapshot.analysis import DeviceAnalysis, Focus
from oomscope.core.snapshot.columns import Frame, StackTable
from oomscope.core.snapshot.groups import by_line, by_module, by_size, frame_label
from oomscope.core.snapshot.model import Snapshot
from oomscope.core.snapshot.stack_rules import is_user_code, shown_frames, user_frame
from oomscope.units import format_bytes

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069]")


def plain(text: str) -> str:
    """`text` from a file, without characters that could steer a terminal or reorder a line."""
    return _CONTROL.sub("�", text)


def count(number: int, noun: str) -> str:
    """`1 event`, `27,358 events`."""
    return f"{number:,} {noun}{'' if number == 1 else 's'}"


def title(snapshot: Snapshot) -> str:
    """Name and what the file itself says about where it is from."""
    parts = [plain(snapshot.name)]
    identity = snapshot.identity
    for word, value in (("rank", identity.rank), ("step", identity.step), ("pid", identity.pid)):
        if value is not None:
            parts.append(f"{word} {value}")
    parts.append(_version(snapshot))
    parts.append(count(snapshot.n_events, "event"))
    return " · ".join(parts)


def _version(snapshot: Snapshot) -> str:
    if snapshot.torch_version:
        return f"torch {snapshot.torch_version}"
    return (
        f"torch {snapshot.torch_at_least} or later" if snapshot.torch_at_least else "torch version not shown"
    )


def moment_name(analysis: DeviceAnalysis, focus: Focus) -> str:
    """`at the peak (event 1,182,004)`."""
    event = focus.row + analysis.device.skipped_events
    place = f"event {event:,}" if focus.row >= 0 else "before the first event"
    if focus.reason == "oom":
        return f"just before the out-of-memory error (after {place})"
    if focus.reason == "peak":
        return f"at the peak ({place})"
    if focus.reason == "end":
        return "at the end"
    return (
        f"at {focus.reason}"
        if focus.reason.startswith("event")
        else f"at the peak of {focus.reason} ({place})"
    )


def frame_text(frame: Frame) -> str:
    """`model.py:210 forward`, safe to print."""
    return plain(frame_label(frame))


def stack_label(stacks: StackTable, stack: int) -> str:
    """One line for a stack: the program's own line, else the operation."""
    if stack < 0:
        return "no stack recorded"
    frame = user_frame(stacks, stack)
    if frame is not None:
        return frame_text(frame)
    shown = shown_frames(stacks[stack])
    telling = next((frame for frame in shown if "autograd" in frame.function), shown[0] if shown else None)
    return frame_text(telling) if telling else "autograd (no frames)"


def callers(stacks: StackTable, stack: int, *, limit: int) -> list[Frame]:
    """The program's own frames of a stack, innermost first; its other Python frames if it has none."""
    shown = shown_frames(stacks[stack])
    own = [frame for frame in shown if is_user_code(frame)]
    return (own or shown)[:limit]


@dataclass(frozen=True, slots=True)
class Row:
    """One line of a ranking."""

    label: str
    bytes: int
    blocks: int
    stack: int = -1
    """A stack to show details of, or -1."""


def ranking(analysis: DeviceAnalysis, row: int, by: str, limit: int) -> list[Row]:
    """The largest holders of memory just after `row`, by "stack", "line", "module" or "size"."""
    stacks, lives, alive = analysis.snapshot.stacks, analysis.lives, analysis.alive(row)
    if by == "stack":
        return [
            Row(stack_label(stacks, stack), size, blocks, stack)
            for stack, size, blocks in analysis.top(row)[:limit]
        ]
    if by == "size":
        sizes = sorted(by_size(lives, alive), key=lambda each: -each[1])
        return [Row(f"up to {format_bytes(bound, 0)}", size, blocks) for bound, size, blocks in sizes[:limit]]
    groups = by_line(stacks, lives, alive) if by == "line" else by_module(stacks, lives, alive)
    return [Row(plain(group.label), group.bytes, group.blocks, group.stacks[0]) for group in groups[:limit]]


def fragmentation_sentences(analysis: DeviceAnalysis) -> list[str]:
    """What the segments at the end say, largest concern first; empty when nothing is free in them."""
    totals = analysis.totals
    if not totals.inactive:
        return []
    stranded = sum(pool.stranded_bytes for pool in analysis.pools)
    said = [
        f"{format_bytes(totals.inactive)} of {format_bytes(totals.reserved)} reserved is unused; "
        f"the largest free block is {format_bytes(totals.largest_inactive)}"
    ]
    if totals.whole_free:
        said.append(
            f"{format_bytes(totals.whole_free)} of it is in segments without live blocks: returned on demand"
        )
    if stranded:
        said.append(f"{format_bytes(stranded)} of it is stranded beside live blocks in {_segments(analysis)}")
    if totals.pending_free:
        said.append(f"{format_bytes(totals.pending_free)} is freed but still used by another stream")
    private = [pool for pool in analysis.pools if pool.is_private]
    if private:
        held = sum(pool.reserved_bytes for pool in private)
        names = len({pool.pool for pool in private})
        said.append(
            f"{format_bytes(held)} is reserved by {count(names, 'private pool')} (CUDA graphs or MemPools)"
        )
    return said


def _segments(analysis: DeviceAnalysis) -> str:
    pools = [pool for pool in analysis.pools if pool.stranded_bytes]
    return count(sum(pool.segments for pool in pools), "segment")
