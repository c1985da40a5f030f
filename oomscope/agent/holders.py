"""Who holds what grows: the variable whose container, or whose autograd graph, is longer at every look.

The watch is armed by growth (of allocated bytes between steps, or of the process's own memory), or by the detail mode.
It then looks a few times, some steps apart, at what the script can reach by name; what has grown at each look is
reported as `holder`. All looks together take less than one per cent of the job's time.
"""

from __future__ import annotations

import collections
import gc
import sys
import time
from typing import Any, Callable

from .guard import guarded
from .reach import Item, Place, Walk, user_frames

MIN_LOOKS = 3
"""Growth between fewer looks may be a batch that is kept for one step."""
BUDGET = 0.01
"""Share of the job's time that all looks together may take."""
FREE_NS = 40_000_000
"""So much may be spent before the first steps have paid for it."""
FIRST_STEP = 3
_EVERY = 3
"""Steps between two looks, as long as nothing is found; then it doubles."""
_CHECK_EVERY = 4
_DEVICE_NOISE = 1 << 20
_HOST_NOISE = 4 << 20
"""Growth of resident bytes within `_CHECK_EVERY` steps that is not the allocator's own unrest."""
_MAX_NODES = 20_000
"""Nodes of autograd graphs that one look counts, over all tensors."""
_MAX_TRACKED = 4000
_REPORTED = 3


class _Track:
    """One container or tensor over several looks."""

    __slots__ = ("first_step", "grown", "last", "last_step", "looks", "start")

    def __init__(self, size: int, step: int) -> None:
        self.start = self.last = size
        self.first_step = self.last_step = step
        self.looks = 1
        self.grown = 0

    def add(self, size: int, step: int) -> None:
        self.looks += 1
        self.grown += size > self.last
        self.last, self.last_step = size, step

    @property
    def is_growing(self) -> bool:
        return self.looks >= MIN_LOOKS and self.grown == self.looks - 1

    @property
    def per_step(self) -> float:
        return (self.last - self.start) / max(1, self.last_step - self.first_step)


class HolderProbe:
    """Called after each step, in the training thread; emits `holder` records.

    Args:
        emit: takes records.
        own_folder: prefix of our own files.
        always: look without waiting for growth (detail mode).
        host_counts: whether resident bytes say anything (they do not under a simulated device).
    """

    def __init__(
        self,
        torch: Any,
        emit: Callable[[dict[str, Any]], None],
        *,
        own_folder: str,
        always: bool,
        host_counts: bool,
    ) -> None:
        self._torch = torch
        self._emit = emit
        self._own = own_folder
        self._always = always
        self._host_counts = host_counts
        self._started = time.monotonic_ns()
        self._spent = 0
        self._nodes_left = _MAX_NODES
        self._next = FIRST_STEP
        self._every = _EVERY
        self._checked: tuple[int, int, int] | None = None
        self._rising = 0
        self._tracks: dict[tuple[Any, ...], _Track] = {}
        self._told: dict[tuple[Any, ...], int] = {}

    @guarded("holders")
    def after_step(self, step: int, low: int | None, rss: int) -> None:
        """`low`: allocated bytes that were left between two steps, None without a device; `rss`: resident bytes."""
        if step % _CHECK_EVERY == 0:
            self._check(step, low, rss)
        if step < self._next or not (self._always or self._rising >= 2):
            return
        now = time.monotonic_ns()
        if self._spent > FREE_NS + BUDGET * (now - self._started):
            return
        collects = gc.isenabled()
        # A look makes many small objects that die with it. A full collection in its midst costs ten looks.
        gc.disable()
        try:
            self.look(step, sys._getframe(1))
        finally:
            if collects:
                gc.enable()
        self._spent += time.monotonic_ns() - now
        self._next = step + self._every

    def _check(self, step: int, low: int | None, rss: int) -> None:
        before, self._checked = self._checked, (step, low or 0, rss)
        if before is None or step <= FIRST_STEP:
            return
        grows = low is not None and low - before[1] > _DEVICE_NOISE
        if self._host_counts and rss - before[2] > _HOST_NOISE:
            grows = True
        self._rising = self._rising + 1 if grows else 0

    def look(self, step: int, frame: Any) -> None:
        """Look once, and report what has grown at every look so far."""
        self._nodes_left = _MAX_NODES
        sizes: dict[tuple[Any, ...], tuple[int, Item]] = {}
        for item in Walk(self._torch, user_frames(frame, self._is_foreign), self._is_foreign):
            size = self._size(item)
            if size is not None and len(sizes) < _MAX_TRACKED:
                sizes[(item.place.path, item.place.scope, type(item.value).__name__)] = (size, item)
        tracks = {}
        for key, (size, _) in sizes.items():
            track = self._tracks.get(key)
            if track is None:
                track = _Track(size, step)
            else:
                track.add(size, step)
            tracks[key] = track
        self._tracks = tracks
        self._report(step, sizes)

    def _is_foreign(self, file: str) -> bool:
        """A file of installed code, of the interpreter, or of ours."""
        path = file.replace("\\", "/")
        if path.startswith(self._own) or (path.startswith("<") and not path.startswith("<ipython")):
            return True
        return "/site-packages/" in path or "/dist-packages/" in path or "/lib/python3" in path

    def _size(self, item: Item) -> int | None:
        """Items of a container that changes, nodes of a variable's graph; None where there is nothing to watch."""
        value = item.value
        if self._is_tensor(value):
            own = "[" not in item.place.path  # of what lies in a container, the container's length tells
            return self._graph_size(value) if own and value.grad_fn is not None else None
        if type(value) in (tuple, frozenset):
            return None
        return len(value)

    def _graph_size(self, tensor: Any) -> int | None:
        """Nodes of the autograd graph that hangs on `tensor`; None when this look has seen enough nodes."""
        seen: set[Any] = set()
        left = [tensor.grad_fn]
        while left and len(seen) < self._nodes_left:
            node = left.pop()
            if node is None or node in seen:
                continue
            seen.add(node)
            left += [following for following, _ in node.next_functions]
        self._nodes_left -= len(seen)
        return len(seen) if self._nodes_left > 0 else None

    def _is_tensor(self, value: Any) -> bool:
        return issubclass(type(value), self._torch.Tensor)

    def _report(self, step: int, sizes: dict[tuple[Any, ...], tuple[int, Item]]) -> None:
        found = []
        for key, track in self._tracks.items():
            if track.is_growing and key in sizes:
                place, value = sizes[key][1]
                record = self._record(step, track, place, value)
                if record is not None:
                    found.append((record["bytes_per_step"], key, record))
        found.sort(key=lambda each: -each[0])
        for bytes_per_step, key, record in found[:_REPORTED]:
            if bytes_per_step > 1.5 * self._told.get(key, -1) or key not in self._told:
                self._told[key] = bytes_per_step
                self._emit(record)
        if found:
            self._every = min(256, self._every * 2)

    def _record(self, step: int, track: _Track, place: Place, value: Any) -> dict[str, Any] | None:
        is_tensor = self._is_tensor(value)
        newest, bytes_each, graph = (None, 0, True) if is_tensor else self._newest(value)
        if not is_tensor and newest is None:
            return None
        return {
            "k": "holder",
            "step": step,
            "path": place.path,
            "scope": place.scope,
            "file": place.file,
            "line": place.line,
            "owner": type(value).__name__,
            "item": "autograd graph" if is_tensor else newest,
            "count": track.last,
            "count_per_step": round(track.per_step, 3),
            "bytes_per_step": round(track.per_step * bytes_each),
            "has_graph": graph,
        }

    def _newest(self, value: Any) -> tuple[str | None, int, bool]:
        """(what the newest items are, bytes of one, whether a graph hangs on it)."""
        if type(value) is set:
            items = [next(iter(value))] if value else []
        elif issubclass(type(value), dict):
            items = [next(reversed(value.values()))] if value else []
        else:
            items = [value[-1]] if value else []
        if not items:
            return None, 0, False
        text = type(items[0]).__name__
        total, graph, left = 0, False, collections.deque(items)
        for _ in range(64):
            if not left:
                break
            each = left.popleft()
            if self._is_tensor(each):
                if total == 0:
                    shape = "x".join(map(str, each.shape)) or "scalar"
                    text = f"{shape} {str(each.dtype).replace('torch.', '')} tensor on {each.device.type}"
                total += each.nelement() * each.element_size()
                graph = graph or each.grad_fn is not None
            elif type(each) in (list, tuple):
                left.extend(each[:32])
            elif type(each) is dict:
                left.extend(list(each.values())[:32])
            else:
                total += _bytes(each)
        return text, total, graph


def _bytes(value: Any) -> int:
    """Bytes of a plain object; an array's data counts."""
    size = getattr(type(value), "nbytes", None)
    if size is not None and type(value).__module__.partition(".")[0] == "numpy":
        return int(value.nbytes)
    if type(value) in (str, bytes, bytearray, int, float, bool, complex):
        return sys.getsizeof(value)
    return 0
