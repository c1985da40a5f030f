"""What the Snapshot screen shows at one moment, computed away from the UI thread.

A `Wish` says what is asked for (moment, range, width, filter, order); a `Picture` is the answer. Both are
plain data, so a picture can be made in a worker and dropped when a newer wish is there.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from oomscope.core.snapshot.analysis import DeviceAnalysis
from oomscope.core.snapshot.categories import Category
from oomscope.core.snapshot.columns import BoolArray, Frame
from oomscope.core.snapshot.curves import column_rows
from oomscope.core.snapshot.flame import Node, call_tree, fold
from oomscope.core.snapshot.groups import by_stack, module_frame, short_file
from oomscope.core.snapshot.model import DEFAULT_POOL, Snapshot
from oomscope.views.snapshot import stack_label
from oomscope.views.snapshot_exact import UNDER_WAY, ExactReplay, SegmentPicture, picture_of

IntArray = NDArray[np.int64]

ORDERS = ("size", "age", "category", "address", "code")
"""What allocations can be sorted by."""

GROUPS = ("category", "module", "calls")
"""First level of the icicle: a category, a module, or none."""


Part = tuple[str, int] | None
"""A stream or a pool, or all; see `Wish.part`."""


@dataclass(frozen=True, slots=True)
class Wish:
    """What to show."""

    row: int
    """Moment: just after this row; -1 = before the first."""
    start: int = 0
    stop: int = 0
    """Rows of the timeline, `start` up to `stop`."""
    width: int = 80
    """Columns of the timeline."""
    group: str = "category"
    folded: bool = True
    order: str = "size"
    reverse: bool = False
    needle: str = ""
    """Only allocations whose stack, category or size class contains this, ignoring case."""
    stacks: frozenset[int] | None = None
    """Only allocations of these stacks."""
    part: Part = None
    """Only one stream or one pool, in all views: ("stream", index into `Snapshot.streams`) or ("pool", index into
    `Snapshot.pools`, -1 for the allocations whose pool is not known)."""


@dataclass(slots=True)
class Timeline:
    """Levels in bytes per column."""

    rows: IntArray
    """(width,) int64 ascending: the row that stands for each column, the highest of its stretch."""
    levels: IntArray
    """(n_categories, width) int64."""
    reserved: IntArray
    """(width,) int64."""


@dataclass(slots=True)
class Picture:
    """The answer to a wish."""

    wish: Wish
    timeline: Timeline
    tree: Node
    segments: SegmentPicture
    allocations: IntArray
    """(m,) int64, rows of `Lifetimes` in the order asked for."""
    live_bytes: int
    shown_bytes: int
    """Of the allocations that pass the filter."""
    totals: dict[Category, int] = field(default_factory=dict)


class Painter:
    """Makes pictures of one device; keeps what the next picture is likely to need again."""

    def __init__(self, analysis: DeviceAnalysis) -> None:
        self.analysis = analysis
        self.exact: ExactReplay | None = None
        """Its replay, once there is one; set from outside."""
        self.without = UNDER_WAY
        """Why there is no replay."""
        self._timeline: tuple[tuple[int, int, int, Part], Timeline] | None = None
        self._trees: dict[tuple[int, str, bool, Part], Node] = {}
        self._part: tuple[Part, BoolArray] | None = None
        self._segments: tuple[tuple[int, ExactReplay | None, str], SegmentPicture] | None = None
        self.label = lru_cache(maxsize=100_000)(self._label)
        self.searched = lru_cache(maxsize=100_000)(self._searched)

    def _label(self, stack: int) -> str:
        return stack_label(self.analysis.snapshot.stacks, stack)

    def picture(self, wish: Wish) -> Picture:
        """Everything for one wish; tens of milliseconds on a million rows."""
        lives = self.analysis.lives
        alive = np.flatnonzero(self._alive(wish.row, wish.part))
        chosen = self._filtered(alive, wish)
        category = self.analysis.category[alive]
        sums = np.bincount(category, weights=lives.size[alive], minlength=len(Category)).astype(np.int64)
        return Picture(
            wish=wish,
            timeline=self.timeline(wish.start, wish.stop, wish.width, wish.part),
            tree=self.tree(wish.row, wish.group, wish.folded, wish.part),
            segments=self.segments(wish.row),
            allocations=self._ordered(chosen, wish),
            live_bytes=int(lives.size[alive].sum()),
            shown_bytes=int(lives.size[chosen].sum()),
            totals={each: int(sums[each]) for each in Category if sums[each]},
        )

    def _alive(self, row: int, part: Part) -> BoolArray:
        alive, within = self.analysis.alive(row), self._within(part)
        return alive if within is None else alive & within

    def _within(self, part: Part) -> BoolArray | None:
        """(n_allocations,) bool: those of a part; None for all of them."""
        if part is None:
            return None
        if self._part is None or self._part[0] != part:
            kind, number = part
            found = self.analysis.part(stream=number) if kind == "stream" else self.analysis.part(pool=number)
            self._part = part, found
        return self._part[1]

    def timeline(self, start: int, stop: int, width: int, part: Part = None) -> Timeline:
        """Levels of `width` columns over rows `start` to `stop`."""
        key = (start, stop, width, part)
        if self._timeline is None or self._timeline[0] != key:
            rows = column_rows(self.analysis.live.after, start, stop, width)
            levels = self.analysis.category_curves(rows, self._within(part))
            reserved = np.array([self.analysis.reserved.at(row) for row in rows.tolist()], np.int64)
            self._timeline = key, Timeline(rows, levels, reserved)
        return self._timeline[1]

    def tree(self, row: int, group: str, folded: bool, part: Part = None) -> Node:
        """Calls that hold memory just after `row`."""
        key = (row, group, folded, part)
        if key not in self._trees:
            if len(self._trees) > 64:
                self._trees.clear()
            tree = self._grouped(self._alive(row, part), group)
            self._trees[key] = fold(tree) if folded else tree
        return self._trees[key]

    def _grouped(self, alive: BoolArray, group: str) -> Node:
        analysis = self.analysis
        stacks, top_rows = analysis.snapshot.stacks, by_stack(analysis.lives, alive)
        if group == "calls":
            return call_tree(stacks, top_rows, root="all live memory")
        if group == "module":
            return call_tree(stacks, top_rows, root="all live memory", group=self._module)
        top = Node("all live memory")
        for each in Category:
            rows = by_stack(analysis.lives, alive & (analysis.category == each))
            if not rows:
                continue
            part = call_tree(stacks, rows, root=each.label)
            part.parent = top
            top.children[each.label] = part
            top.bytes += part.bytes
            top.blocks += part.blocks
        return top

    def _module(self, stack: int) -> str:
        frame = module_frame(self.analysis.snapshot.stacks[stack])
        return f"{short_file(frame.file)} {frame.function}" if frame else "outside any module's forward"

    def segments(self, row: int) -> SegmentPicture:
        """Segments just after `row`, exact if the replay is there and covers it."""
        key = (row, self.exact, self.without)
        if self._segments is None or self._segments[0] != key:
            self._segments = key, picture_of(self.analysis, *key)
        return self._segments[1]

    def _filtered(self, alive: IntArray, wish: Wish) -> IntArray:
        lives = self.analysis.lives
        stack = lives.stack[alive]
        keep = np.ones(len(alive), np.bool_)
        if wish.stacks is not None:
            keep &= np.isin(stack, list(wish.stacks))
        if wish.needle:
            needle = wish.needle.lower()
            named = [one for one in np.unique(stack).tolist() if needle in self.searched(one)]
            kinds = [int(each) for each in Category if needle in each.label]
            keep &= np.isin(stack, named) | np.isin(self.analysis.category[alive], kinds)
        return alive[keep]

    def _searched(self, stack: int) -> str:
        """All that a filter looks at in a stack."""
        return " ".join(str(frame) for frame in self.frames(stack)).lower() or self.label(stack).lower()

    def _ordered(self, chosen: IntArray, wish: Wish) -> IntArray:
        lives = self.analysis.lives
        size = -lives.size[chosen]
        keys: dict[str, IntArray] = {
            "size": size,
            "age": lives.birth[chosen],
            "category": self.analysis.category[chosen] * (1 << 44) + size,
            "address": lives.address[chosen],
            "code": lives.stack[chosen].astype(np.int64) * (1 << 44) + size,
        }
        order = chosen[np.argsort(keys[wish.order], kind="stable")]
        return order[::-1] if wish.reverse else order

    def frames(self, stack: int) -> list[Frame]:
        return self.analysis.snapshot.stacks[stack]


def part_label(snapshot: Snapshot, part: tuple[str, int]) -> str:
    """A stream or pool for people."""
    kind, number = part
    if kind == "stream":
        return f"stream {snapshot.streams[number]}"
    if number < 0:
        return "pool not known"
    first, second = snapshot.pools[number]
    return "default pool" if (first, second) == DEFAULT_POOL else f"pool {first}.{second}"
