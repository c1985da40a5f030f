"""Numbers for repeated things: frames, stacks, streams, pools and texts, each stored once.

Torch shares frame lists between the rows of one allocation through the pickle memo, so object identity finds
most repeats without looking
inside; comparison by content finds the rest (torch 2.0 shares nothing). The raw object must stay alive while
an `Interner` is in use.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from oomscope.core.snapshot.columns import NO_STACK, Frame, StackTable

MAX_STREAMS = 1 << 20
MAX_POOLS = 1 << 15
"""`Events.pool` is int16."""

MAX_LOOKALIKES = 16
"""Stacks compared one by one before their frames are looked up instead; bounds the work on a hostile file."""


def _sample(frames: list[Any]) -> tuple[int, ...]:
    """Length of a stack and identities of a few of its frames: equal for equal stacks of shared frames."""
    count = len(frames)
    if not count:
        return ()
    return (count, id(frames[0]), id(frames[count // 2]), id(frames[count // 3]), id(frames[-1 - count // 5]))


def clean_text(value: object) -> str:
    """`value` as text that can be encoded: lone surrogates, which a pickle may hold, become "?"."""
    text = value if type(value) is str else "" if value is None else brief(value)
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def brief(value: object) -> str:
    """`value` for a message, at most 40 characters; containers by type only, as theirs may be endless."""
    if type(value) is int and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    if value is None or type(value) in (str, bytes, int, float, bool):
        return repr(value[:40] if isinstance(value, (str, bytes)) else value)[:42]
    return f"of type {type(value).__name__}"


class Interner:
    """Collects the shared tables of one snapshot."""

    def __init__(self) -> None:
        self.frames: list[Frame] = []
        self.stacks: list[tuple[int, ...]] = []
        self.streams: list[int] = []
        self.pools: list[tuple[int, int]] = []
        self.texts: list[str] = []
        self.bad_frames = 0
        """Frames or stacks that were not of torch's form and were left out."""
        self.taken: Callable[[int], Any] | None = None
        """The list that a scanner took out of the stream; what refers to it holds its number instead."""
        self.stack_of_list: dict[int, int] = {}
        """id() of a frames list already seen -> stack number."""
        self._lookalikes: dict[tuple[int, ...], list[tuple[list[Any], int]]] = {}
        self._frame_of_dict: dict[int, int] = {}
        self._frame_numbers: dict[tuple[Any, ...], int] = {}
        self._stack_numbers: dict[tuple[int, ...], int] = {}
        self._stream_numbers: dict[int, int] = {}
        self._pool_numbers: dict[tuple[int, int], int] = {}
        self._text_numbers: dict[str, int] = {}

    def stack(self, frames: object) -> int:
        """Number of a stack given as torch's list of frame dictionaries; `NO_STACK` for None."""
        known = self.stack_of_list.get(id(frames))
        if known is not None:
            return known
        if frames is None:
            return NO_STACK
        if type(frames) is int and self.taken is not None:
            return self.stack(self.taken(frames))
        if type(frames) is not list:
            self.bad_frames += 1
            return NO_STACK
        bucket = self._lookalikes.setdefault(_sample(frames), [])
        for other, number in bucket:
            if other == frames:  # compares identities first: a few nanoseconds a frame
                self.stack_of_list[id(frames)] = number
                return number
        key = tuple([number for frame in frames if (number := self._frame(frame)) >= 0])
        number = self._remember(frames, key)
        if len(bucket) < MAX_LOOKALIKES:
            bucket.append((frames, number))
        return number

    def formatted_stack(self, lines: object) -> int:
        """Number of a stack given as formatted Python lines (`forward_frames`), innermost first."""
        if type(lines) is int and self.taken is not None:
            lines = self.taken(lines)
        if not isinstance(lines, (list, tuple)):
            return NO_STACK
        known = self.stack_of_list.get(id(lines))
        if known is not None:
            return known
        return self._remember(lines, tuple(self._frame_number(*parse_formatted(line)) for line in lines))

    def _remember(self, owner: object, key: tuple[int, ...]) -> int:
        number = self._stack_numbers.get(key)
        if number is None:
            number = self._stack_numbers[key] = len(self.stacks)
            self.stacks.append(key)
        self.stack_of_list[id(owner)] = number
        return number

    def _frame(self, frame: object) -> int:
        known = self._frame_of_dict.get(id(frame))
        if known is not None:
            return known
        if type(frame) is not dict:
            self.bad_frames += 1
            return -1
        number = self._frame_number(frame.get("filename"), frame.get("line"), frame.get("name"))
        self._frame_of_dict[id(frame)] = number
        return number

    def _frame_number(self, file: object, line: object, function: object) -> int:
        line = line if type(line) is int and 0 <= line < 1 << 31 else 0
        key = (clean_text(file), line, clean_text(function))
        number = self._frame_numbers.get(key)
        if number is None:
            number = self._frame_numbers[key] = len(self.frames)
            self.frames.append(Frame(*key))
        return number

    def stream(self, handle: object) -> int:
        """Index of a stream handle.

        Raises:
            ValueError: not a 64-bit integer, or more streams than any program has.
        """
        if not isinstance(handle, int) or not -(1 << 63) <= handle < 1 << 64:
            raise ValueError(f"stream is {brief(handle)}")
        number = self._stream_numbers.get(handle)
        if number is None:
            if len(self.streams) >= MAX_STREAMS:
                raise ValueError(f"more than {MAX_STREAMS} streams")
            number = self._stream_numbers[handle] = len(self.streams)
            self.streams.append(int(handle))
        return number

    def pool(self, pool_id: object) -> int:
        """Index of a pool id, a pair of integers; -1 for None.

        Raises:
            ValueError: not a pair of integers, or too many pools.
        """
        if pool_id is None:
            return -1
        if (
            not isinstance(pool_id, (tuple, list))
            or len(pool_id) != 2
            or not all(isinstance(part, int) for part in pool_id)
        ):
            raise ValueError(f"pool id is {brief(pool_id)}")
        key = (int(pool_id[0]), int(pool_id[1]))
        number = self._pool_numbers.get(key)
        if number is None:
            if len(self.pools) >= MAX_POOLS:
                raise ValueError(f"more than {MAX_POOLS} pools")
            number = self._pool_numbers[key] = len(self.pools)
            self.pools.append(key)
        return number

    def text(self, value: object) -> int:
        """Index of a text; -1 for None."""
        if value is None:
            return -1
        key = clean_text(value)
        number = self._text_numbers.get(key)
        if number is None:
            number = self._text_numbers[key] = len(self.texts)
            self.texts.append(key)
        return number

    def numbers(self, values: Iterable[object], kind: str) -> list[int]:
        """Numbers of many values of one kind ("stream", "pool", "text", "stack", "formatted_stack")."""
        one = getattr(self, kind)
        return [one(value) for value in values]

    def table(self) -> StackTable:
        return StackTable.from_lists(self.frames, self.stacks)


def parse_formatted(line: object) -> tuple[str, int, str]:
    """(file, line, function) of one formatted traceback line such as `File "a.py", line 3, in forward`."""
    text = clean_text(line).strip()
    head, _, function = text.partition(", in ")
    file, _, number = head.partition(", line ")
    file = file.removeprefix("File ").strip('"')
    digits = number.strip()
    return (
        file,
        int(digits) if digits.isascii() and digits.isdigit() and len(digits) < 9 else 0,
        function.split("\n")[0],
    )
