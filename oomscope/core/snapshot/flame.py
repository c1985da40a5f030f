"""Live memory as a tree of calls, outermost first: what an icicle or a flame graph shows.

Built from stacks, not from allocations: a hundred thousand live blocks share a few hundred stacks.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

from oomscope.core.snapshot.columns import Frame, StackTable
from oomscope.core.snapshot.groups import frame_label, short_file
from oomscope.core.snapshot.stack_rules import tree_frames

MIN_SIBLINGS = 3
"""Fewer siblings that differ only by index are shown as they are."""

_INDEX = re.compile(r"\d+")


@dataclass(slots=True)
class Node:
    """A call and everything allocated below it."""

    label: str
    frame: Frame | None = None
    bytes: int = 0
    blocks: int = 0
    parent: Node | None = None
    children: dict[str, Node] = field(default_factory=dict)
    stacks: list[int] = field(default_factory=list)
    """Stacks that end here."""
    copies: int = 1
    """How many siblings that differ only by index were folded into this one."""

    def ordered(self) -> list[Node]:
        """Children, largest first."""
        return sorted(self.children.values(), key=lambda child: (-child.bytes, child.label))

    def walk(self) -> Iterator[Node]:
        """This node and all below it, parents first; iterative."""
        waiting = [self]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())

    def path(self) -> list[str]:
        """Labels from the root to this node."""
        labels: list[str] = []
        node: Node | None = self
        while node is not None:
            labels.append(node.label)
            node = node.parent
        return labels[::-1]

    def stacks_below(self) -> set[int]:
        return {stack for node in self.walk() for stack in node.stacks}


def call_tree(
    stacks: StackTable,
    rows: Iterable[tuple[int, int, int]],
    *,
    root: str,
    group: Callable[[int], str] | None = None,
    keep: Callable[[list[Frame]], list[Frame]] = tree_frames,
) -> Node:
    """The tree of some live memory.

    Args:
        stacks: all stacks.
        rows: (stack, bytes, blocks) as `groups.by_stack` gives them.
        root: label of the root.
        group: a first level above the stacks, such as the category of a stack.
        keep: frames of a stack (innermost first) -> those to show.
    """
    top = Node(root)
    for stack, size, blocks in rows:
        node = top
        _count(node, size, blocks)
        if group is not None:
            node = _child(node, group(stack), None)
            _count(node, size, blocks)
        frames = keep(stacks[stack])
        for frame in reversed(frames):
            node = _child(node, frame_label(frame), frame)
            _count(node, size, blocks)
        if not frames:
            node = _child(node, "no stack recorded" if stack < 0 else "autograd (no frames)", None)
            _count(node, size, blocks)
        node.stacks.append(stack)
    return top


def _child(node: Node, label: str, frame: Frame | None) -> Node:
    child = node.children.get(label)
    if child is None:
        child = node.children[label] = Node(label, frame, parent=node)
    return child


def _count(node: Node, size: int, blocks: int) -> None:
    node.bytes += size
    node.blocks += blocks


def fold(node: Node) -> Node:
    """A copy of a tree in which siblings that differ only by an index are one node, `Block ×48`.

    The index must be in the name of a function, module or file; different lines of a file are different
    code and stay apart.
    """
    top = _copy(node, node.label, None)
    waiting = [(top, [node])]
    while waiting:
        target, sources = waiting.pop()
        children = [child for source in sources for child in source.children.values()]
        for alike in _alike(children):
            names = {child.label for child in alike}
            fewest = len(names) >= MIN_SIBLINGS
            for part in [alike] if fewest else _same_label(alike):
                label = f"{_unindexed(part[0])} ×{len(names)}" if fewest else part[0].label
                child = _merged(part, label, target)
                child.copies = len(names) if fewest else max(each.copies for each in part)
                target.children[label] = child
                waiting.append((child, part))
    return top


def _alike(children: list[Node]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for child in children:
        groups.setdefault(_index_key(child), []).append(child)
    return list(groups.values())


def _same_label(nodes: list[Node]) -> list[list[Node]]:
    groups: dict[str, list[Node]] = {}
    for node in nodes:
        groups.setdefault(node.label, []).append(node)
    return list(groups.values())


def _index_key(node: Node) -> str:
    if node.frame is None or not node.frame.is_python:
        return _INDEX.sub("#", node.label)
    frame = node.frame
    return f"{_INDEX.sub('#', frame.file)}:{frame.line} {_INDEX.sub('#', frame.function)}"


def _unindexed(node: Node) -> str:
    if node.frame is None or not node.frame.is_python:
        return re.sub(r"\[\d+\]|[._]?\d+", "", node.label).strip(" .") or node.label
    frame = node.frame
    parts = (short_file(frame.file), frame.function)
    file, function = (re.sub(r"\[\d+\]|[._]?\d+", "", part) for part in parts)
    return f"{file}:{frame.line} {function}"


def _copy(node: Node, label: str, parent: Node | None) -> Node:
    return Node(label, node.frame, node.bytes, node.blocks, parent, {}, list(node.stacks), node.copies)


def _merged(nodes: list[Node], label: str, parent: Node) -> Node:
    merged = _copy(nodes[0], label, parent)
    merged.bytes = sum(each.bytes for each in nodes)
    merged.blocks = sum(each.blocks for each in nodes)
    merged.stacks = [stack for each in nodes for stack in each.stacks]
    return merged


def folded_lines(node: Node) -> list[str]:
    """`a;b;c bytes` per stack: the format of flamegraph.pl, speedscope and inferno."""
    lines = []
    for each in node.walk():
        own = each.bytes - sum(child.bytes for child in each.children.values())
        if own > 0:
            lines.append(";".join(label.replace(";", ",") for label in each.path()) + f" {own}")
    return sorted(lines)
