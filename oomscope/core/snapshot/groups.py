"""Live memory by stack, by line of the program, by module and by size class."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field

import numpy as np

from oomscope.core.snapshot.columns import BoolArray, Frame, IntArray, StackTable
from oomscope.core.snapshot.lifetimes import Lifetimes
from oomscope.core.snapshot.stack_rules import is_user_code, user_frame


@dataclass(slots=True)
class Group:
    """Allocations that share something."""

    key: Hashable
    label: str
    bytes: int
    blocks: int
    stacks: list[int] = field(default_factory=list)
    """Stack numbers, largest first; -1 = no stack recorded."""


def by_stack(lives: Lifetimes, alive: BoolArray) -> list[tuple[int, int, int]]:
    """(stack, bytes, blocks), largest first; stack -1 collects what has none."""
    stack = lives.stack[alive].astype(np.int64) + 1
    if not len(stack):
        return []
    size = np.bincount(stack, weights=lives.size[alive])
    count = np.bincount(stack)
    order = np.argsort(-size, kind="stable")
    return [(number - 1, int(size[number]), int(count[number])) for number in order.tolist() if count[number]]


def grouped(lives: Lifetimes, alive: BoolArray, key_of: Callable[[int], tuple[Hashable, str]]) -> list[Group]:
    """Groups of stacks with the same key, largest first.

    Args:
        lives: the allocations.
        alive: which of them count.
        key_of: stack number -> (key, label).
    """
    found: dict[Hashable, Group] = {}
    for stack, size, blocks in by_stack(lives, alive):
        key, label = key_of(stack)
        group = found.setdefault(key, Group(key, label, 0, 0))
        group.bytes += size
        group.blocks += blocks
        group.stacks.append(stack)
    return sorted(found.values(), key=lambda group: -group.bytes)


def by_line(stacks: StackTable, lives: Lifetimes, alive: BoolArray) -> list[Group]:
    """By the innermost line of the program's own code."""

    def key_of(stack: int) -> tuple[Hashable, str]:
        frame = user_frame(stacks, stack)
        if frame is None:
            return ("", stack < 0), "no stack recorded" if stack < 0 else "no Python frame (autograd threads)"
        return (frame.file, frame.line), f"{short_file(frame.file)}:{frame.line} {frame.function}"

    return grouped(lives, alive, key_of)


def by_module(stacks: StackTable, lives: Lifetimes, alive: BoolArray) -> list[Group]:
    """By the innermost `forward` of the program: the nearest thing to a module that a stack shows."""

    def key_of(stack: int) -> tuple[Hashable, str]:
        frame = module_frame(stacks[stack])
        if frame is None:
            return None, "outside any module's forward"
        return (frame.file, frame.function), f"{short_file(frame.file)} {frame.function}"

    return grouped(lives, alive, key_of)


def module_frame(frames: list[Frame]) -> Frame | None:
    """The innermost frame that is a module's `forward`: the program's own if there is one."""
    forwards = [frame for frame in frames if frame.function == "forward" and frame.file.endswith(".py")]
    return next((frame for frame in forwards if is_user_code(frame)), forwards[0] if forwards else None)


def by_size(lives: Lifetimes, alive: BoolArray) -> list[tuple[int, int, int]]:
    """(upper bound in bytes, bytes, blocks) per power of two, ascending; the bound is inclusive."""
    size: IntArray = lives.size[alive]
    if not len(size):
        return []
    power = np.ceil(np.log2(np.maximum(size, 512))).astype(np.int64)
    total, count = np.bincount(power, weights=size), np.bincount(power)
    return [(1 << each, int(total[each]), int(count[each])) for each in np.flatnonzero(count).tolist()]


_BACKWARD = re.compile(r"autograd::(?:generated::)?(\w+?)(?:Backward\d*)?(?:::|_)apply")


def frame_label(frame: Frame) -> str:
    """`model.py:210 forward` for Python, the operation without its signature for C++."""
    if frame.is_python:
        return f"{short_file(frame.file)}:{frame.line} {frame.function}"
    backward = _BACKWARD.search(frame.function)
    if backward:
        return f"backward of {backward.group(1)} (autograd)"
    return frame.function.split("(")[0][:100] or frame.file


def short_file(file: str) -> str:
    """The last two parts of a path, or what follows site-packages."""
    parts = file.replace("\\", "/").split("/")
    for marker in ("site-packages", "dist-packages"):
        if marker in parts:
            return "/".join(parts[parts.index(marker) + 1 :])
    return "/".join(parts[-2:])
