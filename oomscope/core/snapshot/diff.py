"""What is live in one snapshot (or step, or rank) and not in another.

Stacks are matched by function, file and line; lines are first aligned per function, so that an edit which
shifts a function down does not make
everything in it new. The source text is no help here: on disk is one version of it, and the snapshots may
come from two.
"""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.columns import Frame
from oomscope.core.snapshot.groups import short_file
from oomscope.core.snapshot.stack_rules import shown_frames

Function = tuple[str, str]
"""(short file, function)."""
Key = tuple[tuple[str, str, int], ...]
LineMap = dict[Function, dict[int, int]]


@dataclass(frozen=True, slots=True)
class Side:
    """One of the two states that are compared: what is live just after `row`."""

    analysis: DeviceAnalysis
    row: int


@dataclass(frozen=True, slots=True)
class Change:
    """One stack whose live bytes differ."""

    before_bytes: int
    after_bytes: int
    before_blocks: int
    after_blocks: int
    frames: tuple[Frame, ...]
    """Innermost first; from the second side where it has the stack."""

    @property
    def bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(slots=True)
class Difference:
    """Changes, each list with the largest first."""

    before_bytes: int
    after_bytes: int
    added: list[Change]
    removed: list[Change]
    grown: list[Change]
    shrunk: list[Change]


def diff(before: Side, after: Side) -> Difference:
    """Changes of live requested bytes from one state to another."""
    first, second = _live(before), _live(after)
    aligned = align(_lines(first), _lines(second))
    old, new = _keyed(first, {}), _keyed(second, aligned)
    result = Difference(sum(row.bytes for row in first), sum(row.bytes for row in second), [], [], [], [])
    for key in old.keys() | new.keys():
        a, b = old.get(key), new.get(key)
        frames = (b or a or _Live((), 0, 0)).frames
        change = Change(
            a.bytes if a else 0, b.bytes if b else 0, a.blocks if a else 0, b.blocks if b else 0, frames
        )
        if a is None:
            result.added.append(change)
        elif b is None:
            result.removed.append(change)
        elif change.bytes > 0:
            result.grown.append(change)
        elif change.bytes < 0:
            result.shrunk.append(change)
    for changes in (result.added, result.removed, result.grown, result.shrunk):
        changes.sort(key=lambda each: (-abs(each.bytes), [str(frame) for frame in each.frames]))
    return result


@dataclass(slots=True)
class _Live:
    frames: tuple[Frame, ...]
    bytes: int
    blocks: int


def _live(side: Side) -> list[_Live]:
    """Live stacks by their Python frames, if there are any: C++ frames differ from build to build."""
    stacks = side.analysis.snapshot.stacks
    return [
        _Live(tuple(_compared(stacks[stack])), size, blocks)
        for stack, size, blocks in side.analysis.top(side.row)
    ]


def _compared(frames: list[Frame]) -> list[Frame]:
    python = [frame for frame in frames if frame.is_python]
    return python or shown_frames(frames)


def _lines(rows: list[_Live]) -> dict[Function, set[int]]:
    """Lines seen in each Python function."""
    found: dict[Function, set[int]] = defaultdict(set)
    for row in rows:
        for frame in row.frames:
            if frame.is_python:
                found[short_file(frame.file), frame.function].add(frame.line)
    return found


def align(before: dict[Function, set[int]], after: dict[Function, set[int]]) -> LineMap:
    """Lines of `after` -> lines of `before`, per function.

    The shift that matches most lines is taken (the smallest of equals); when as many lines stay unmatched on
    both sides, those
    are paired in order.
    """
    maps: LineMap = {}
    for function, new in after.items():
        old = before.get(function)
        if not old or old == new:
            continue
        shift = best_shift(old, new)
        mapped = {line: line + shift for line in new if line + shift in old}
        left_new = sorted(new - mapped.keys())
        left_old = sorted(old - set(mapped.values()))
        if len(left_new) == len(left_old):
            mapped.update(zip(left_new, left_old, strict=True))
        maps[function] = mapped
    return maps


def best_shift(old: set[int], new: set[int]) -> int:
    """What to add to the lines of `new` so that most of them are lines of `old`."""
    votes: dict[int, int] = defaultdict(int)
    for a in old:
        for b in new:
            votes[a - b] += 1
    return max(votes, key=lambda shift: (votes[shift], -abs(shift), shift))


def _keyed(rows: list[_Live], lines: LineMap) -> dict[Key, _Live]:
    found: dict[Key, _Live] = {}
    for row in rows:
        key = tuple(_frame_key(frame, lines) for frame in row.frames)
        known = found.get(key)
        if known is None:
            found[key] = _Live(row.frames, row.bytes, row.blocks)
        else:
            known.bytes += row.bytes
            known.blocks += row.blocks
    return found


def _frame_key(frame: Frame, lines: LineMap) -> tuple[str, str, int]:
    if not frame.is_python:
        return "", frame.function, 0
    file = short_file(frame.file)
    mapped = lines.get((file, frame.function))
    # A line that has no counterpart keeps apart from a line of the other side with the same number.
    line = frame.line if mapped is None else mapped.get(frame.line, -frame.line)
    return file, frame.function, line
