"""The allocator's state before any row of a replayed history, fast enough to move through it by hand.

States are kept at regular distances; any other is reached from the nearest one before it.
"""

from __future__ import annotations

from bisect import bisect_right
from dataclasses import dataclass

from oomscope.core.allocator.autopsy import segment_blocks, segment_heads
from oomscope.core.allocator.history import History
from oomscope.core.allocator.model import Block
from oomscope.core.allocator.operations import EMPTY, GROW
from oomscope.core.allocator.replay import Replay, Replayer
from oomscope.core.allocator.replay_driver import ReplayedAllocator
from oomscope.core.snapshot.columns import NO_STACK

#: Operations between two kept states, at least; and how many states are kept at most.
SPACING = 4096
MAX_STATES = 64

PoolId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class BlockView:
    """A block at some row; sizes in bytes."""

    address: int
    size: int
    requested: int
    state: str
    """torch's word: "active_allocated", "active_pending_free" or "inactive"."""
    row: int | None
    """Row that allocated it; None when it is free or older than the history."""
    stack: int
    """Stack of its allocation in the snapshot's table, or `NO_STACK`."""


@dataclass(frozen=True, slots=True)
class SegmentView:
    """A segment, or a contiguous mapped range of an expandable one, at some row."""

    address: int
    size: int
    stream: int
    pool: PoolId
    small: bool
    expandable: bool
    blocks: tuple[BlockView, ...]

    @property
    def free_bytes(self) -> int:
        return sum(block.size for block in self.blocks if block.state == "inactive")


class Scrubber:
    """Moves through a history that the model reproduces.

    Args:
        history: the rows.
        replay: an exact replay of them.

    Raises:
        ValueError: the replay is not exact, so there are no states to show.
    """

    def __init__(self, history: History, replay: Replay) -> None:
        if not replay.exact:
            raise ValueError("only an exact replay has a state at every row")
        self.history = history
        self._replayer = Replayer(
            history,
            replay.config,
            state=replay.initial,
            operations=replay.operations,
            readings=replay.readings,
        )
        self._stacks = {
            block.address: block.stack
            for segment in history.segments
            for block in segment.blocks
            if block.live
        }
        self._indices: list[int] = []
        self._rows: list[int] = []
        self._states: list[ReplayedAllocator] = []
        self._keep_states()

    def _keep_states(self) -> None:
        operations = self._replayer.operations
        count = len(operations.kinds)
        spacing = max(SPACING, count // MAX_STATES)
        for index in range(0, max(count, 1), spacing):
            self._indices.append(index)
            self._rows.append(self._first_row(index) if index else 0)
            self._states.append(self._replayer.copy())
            self._replayer.advance(index, min(index + spacing, count))

    def _first_row(self, index: int) -> int:
        """First row that the operation of that number comes from."""
        operations = self._replayer.operations
        kind, number = operations.kinds[index], operations.rows[index]
        if kind == GROW:
            growth = operations.growths[number]
            return min([*growth.lead, *growth.rows, growth.row])
        return operations.bursts[number][0] if kind == EMPTY else number

    def at(self, row: int) -> ReplayedAllocator:
        """The state before row `row` (0 to the number of rows); yours to change.

        The rows of one allocation are applied together, at its last one.
        """
        place = bisect_right(self._rows, row) - 1
        replayer = self._replayer
        replayer.allocator = self._states[place]
        replayer.allocator = replayer.copy()
        replayer.stop = row
        replayer.advance(self._indices[place])
        return replayer.allocator

    def segments(self, row: int) -> list[SegmentView]:
        """All segments before row `row`, by address."""
        heads = segment_heads(self.at(row))
        return [self._view(head) for head in sorted(heads, key=lambda block: block.address)]

    def _view(self, head: Block) -> SegmentView:
        blocks = segment_blocks(head)
        return SegmentView(
            address=head.address,
            size=sum(block.size for block in blocks),
            stream=head.owner.stream,
            pool=head.owner.pool.id,
            small=head.owner.small,
            expandable=head.reservation is not None,
            blocks=tuple(self._block(block) for block in blocks),
        )

    def _block(self, block: Block) -> BlockView:
        if not block.is_live:
            return BlockView(block.address, block.size, 0, "inactive", None, NO_STACK)
        row = block.context if isinstance(block.context, int) else None
        stack = self.history.stack[row] if row is not None else self._stacks.get(block.address, NO_STACK)
        state = "active_allocated" if block.allocated else "active_pending_free"
        return BlockView(block.address, block.size, block.requested, state, row, stack)
