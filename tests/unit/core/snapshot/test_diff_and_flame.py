"""Comparison that survives edited files, and the tree of calls."""

from __future__ import annotations

import copy
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from made_snapshots import MIB, Allocator, frame, training, wrap

from oomscope.core.snapshot.analysis import analyse
from oomscope.core.snapshot.columns import Frame, StackTable
from oomscope.core.snapshot.diff import Change, Difference, Side, align, best_shift, diff
from oomscope.core.snapshot.flame import call_tree, fold, folded_lines
from oomscope.core.snapshot.parse import parse_snapshot


def side(raw: dict[str, Any]) -> Side:
    analysis = analyse(parse_snapshot(raw))[0]
    return Side(analysis, len(analysis.device.events) - 1)


def shifted(raw: dict[str, Any], by: int) -> dict[str, Any]:
    raw = copy.deepcopy(raw)
    for rows in raw["device_traces"]:
        for row in rows:
            for each in row["frames"]:
                if each["filename"].startswith("/home") and each["line"] < 1000:
                    each["line"] += 1000 + by
    return raw


def changes(found: Difference) -> list[Change]:
    return [*found.added, *found.removed, *found.grown, *found.shrunk]


def test_same_is_no_difference() -> None:
    found = diff(side(training()), side(training()))
    assert changes(found) == []


def test_shifted_lines_are_no_difference() -> None:
    raw = training(steps=3, leak=True)
    found = diff(side(raw), side(shifted(raw, 12)))
    assert changes(found) == []


def test_growth_is_found_below_a_shift() -> None:
    found = diff(side(training(steps=3, leak=True)), side(shifted(training(steps=6, leak=True), 3)))
    (grown,) = found.grown
    assert grown.bytes == 3 * 5 * MIB
    assert grown.after_blocks - grown.before_blocks == 3
    assert not found.added


def test_added_and_removed() -> None:
    plain, leaking = side(training(steps=3)), side(training(steps=3, leak=True))
    assert [each.bytes for each in diff(plain, leaking).added] == [3 * 5 * MIB]
    assert [each.bytes for each in diff(leaking, plain).removed] == [-3 * 5 * MIB]


def test_sum_of_changes_is_the_change() -> None:
    found = diff(side(training(steps=2)), side(training(steps=5, leak=True, layers=4)))
    assert sum(each.bytes for each in changes(found)) == found.after_bytes - found.before_bytes


@given(st.sets(st.integers(1, 500), min_size=1, max_size=20), st.integers(-300, 300))
def test_alignment_undoes_a_shift(lines: set[int], shift: int) -> None:
    function = ("a.py", "f")
    moved = {line + shift for line in lines}
    assert best_shift(lines, moved) == -shift or len(lines) == 1 or lines == moved
    mapped = align({function: lines}, {function: moved}).get(function, {line: line for line in moved})
    assert mapped == {line + shift: line for line in lines}


def test_tree_sums_and_folded_lines() -> None:
    here = side(training())
    rows = here.analysis.top(here.row)
    tree = call_tree(here.analysis.snapshot.stacks, rows, root="all")
    assert tree.bytes == sum(size for _, size, _ in rows)
    for node in tree.walk():
        assert node.bytes >= sum(child.bytes for child in node.children.values())
    total = sum(int(line.rsplit(" ", 1)[1]) for line in folded_lines(tree))
    assert total == tree.bytes


def test_siblings_that_differ_by_index_are_folded() -> None:
    frames = [Frame("/w/net.py", 10, f"block_{number}") for number in range(48)] + [
        Frame("/w/net.py", 20, "head")
    ]
    frames += [Frame("/w/net.py", 5, "forward")]
    stacks = StackTable.from_lists(frames, [(number, 49) for number in range(49)])
    rows = [(number, 100, 1) for number in range(48)] + [(48, 7, 1)]
    tree = fold(call_tree(stacks, rows, root="all"))
    (forward,) = tree.children.values()
    labels = {child.label: child for child in forward.children.values()}
    assert set(labels) == {"w/net.py:10 block ×48", "w/net.py:20 head"}
    assert labels["w/net.py:10 block ×48"].bytes == 4800
    assert labels["w/net.py:10 block ×48"].copies == 48
    assert tree.bytes == 4807


def test_different_lines_are_not_folded() -> None:
    memory = Allocator()
    for line in range(1, 6):
        memory.stacks["here"] = [frame("/w/net.py", line, "forward")]
        memory.malloc(MIB, "here")
    here = side(wrap(memory))
    tree = fold(call_tree(here.analysis.snapshot.stacks, here.analysis.top(here.row), root="all"))
    assert len(tree.children) == 5
