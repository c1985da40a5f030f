"""Python stacks of allocations: cheap to take, resolved only when somebody reads them."""

from __future__ import annotations

import os
from types import CodeType, FrameType
from typing import Any

import torch

Stack = tuple[Any, ...]
"""(code, last instruction, code, last instruction, …), innermost frame first."""

_OURS = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
"""Our whole package: the frames of agent and fixes are no part of the program either."""
_HIDDEN = tuple(
    os.path.join(os.path.dirname(torch.__file__), name)
    for name in (
        "_ops.py",
        os.path.join("utils", "_python_dispatch.py"),
        os.path.join("_subclasses", "fake_tensor.py"),
    )
)
_LIMIT = 64
"""Frames kept; deeper ones are the launcher's."""


class StackTable:
    """Interns stacks, and turns them into the frame dictionaries of torch's snapshots."""

    def __init__(self) -> None:
        self._stacks: dict[Stack, Stack] = {}
        self._lines: dict[tuple[CodeType, int], dict[str, Any]] = {}

    def take(self, frame: FrameType | None) -> Stack:
        """The stack from `frame` outwards."""
        found: list[Any] = []
        add = found.append
        count = 0
        while frame is not None and count < _LIMIT:
            add(frame.f_code)
            add(frame.f_lasti)
            frame = frame.f_back
            count += 1
        stack = tuple(found)
        return self._stacks.setdefault(stack, stack)

    def frames(self, stack: Stack | None) -> list[dict[str, Any]]:
        """`[{"filename", "line", "name"}, …]`, innermost first, without the simulation's own frames."""
        if not stack:
            return []
        out = []
        for index in range(0, len(stack), 2):
            code = stack[index]
            if code.co_filename.startswith(_OURS) or code.co_filename in _HIDDEN:
                continue
            key = (code, stack[index + 1])
            line = self._lines.get(key)
            if line is None:
                line = {"filename": code.co_filename, "line": _line(*key), "name": code.co_name}
                self._lines[key] = line
            out.append(line)
        return out


def _line(code: CodeType, instruction: int) -> int:
    """Line number of an instruction offset."""
    lines = getattr(code, "co_lines", None)
    if lines is not None:  # Python 3.10 and later
        for start, end, line in lines():
            if start <= instruction < end and line is not None:
                return int(line)
        return code.co_firstlineno
    import dis

    best = code.co_firstlineno
    for offset, line in dis.findlinestarts(code):
        if offset > instruction:
            break
        if line is not None:
            best = line
    return best
