"""A program's requests without any addresses: what it asked for and gave back, in order.

The same requests can be run under other settings and capacities. That assumes that a program does not look
at its allocator: true for training code, not for libraries that size workspaces by free memory.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from oomscope.core.allocator.history import FREE_COMPLETED, History
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig, TraceRow
from oomscope.core.allocator.operations import COMPLETED, FREE, FREE_LATER, GROW, MALLOC, Operations
from oomscope.core.allocator.pools import PoolFinder
from oomscope.core.allocator.replay import Replay

PoolId = tuple[int, int]

#: Kinds of requests. TRY is an allocation that failed: it is asked for and given back at once.
ASK, GIVE, GIVE_LATER, DONE, CLEAR, TRY = range(6)


@dataclass(slots=True)
class RequestTrace:
    """Requests in order, as parallel lists.

    `slot` numbers the allocations; a free names the slot of its allocation. Sizes are as requested. The first
    `n_initial` requests are the allocations that were live before the first row.
    """

    kind: list[int] = field(default_factory=list)
    slot: list[int] = field(default_factory=list)
    size: list[int] = field(default_factory=list)
    stream: list[int] = field(default_factory=list)
    pool: list[PoolId] = field(default_factory=list)
    row: list[int] = field(default_factory=list)
    """Row of the history; -1 for what was there before."""
    n_initial: int = 0
    n_slots: int = 0

    def __len__(self) -> int:
        return len(self.kind)

    def ask(
        self, size: int, stream: int = 0, pool: PoolId = DEFAULT_POOL, row: int = -1, kind: int = ASK
    ) -> int:
        """Append an allocation of `size` bytes; returns its slot."""
        slot = self.n_slots
        self.n_slots += 1
        self._append(kind, slot, size, stream, pool, row)
        return slot

    def give(self, slot: int, row: int = -1, kind: int = GIVE) -> None:
        """Append a free of the allocation in `slot`; or only its request (GIVE_LATER) or completion (DONE)."""
        self._append(kind, slot, 0, 0, DEFAULT_POOL, row)

    def clear(self, row: int = -1) -> None:
        """Append a call of empty_cache()."""
        self._append(CLEAR, -1, 0, 0, DEFAULT_POOL, row)

    def _append(self, kind: int, slot: int, size: int, stream: int, pool: PoolId, row: int) -> None:
        self.kind.append(kind)
        self.slot.append(slot)
        self.size.append(size)
        self.stream.append(stream)
        self.pool.append(pool)
        self.row.append(row)

    def live_peak(self, config: AllocatorConfig | None = None) -> tuple[int, int]:
        """(bytes, row) of the highest sum of live blocks, rounded as `config` does (default: to 512 bytes).

        No allocator needs less than this: it is the bound that settings cannot beat.
        """
        round_size = (config or AllocatorConfig()).round_size
        sizes: dict[int, int] = {}
        live = peak = 0
        at = -1
        for kind, slot, size, row in zip(self.kind, self.slot, self.size, self.row, strict=True):
            if kind in (ASK, TRY):
                rounded = round_size(size)
                live += rounded
                if live > peak:
                    peak, at = live, row
                if kind == TRY:
                    live -= rounded
                else:
                    sizes[slot] = rounded
            elif kind in (GIVE, DONE):
                live -= sizes.pop(slot, 0)
        return peak, at

    @classmethod
    def from_rows(cls, rows: Iterable[TraceRow]) -> RequestTrace:
        """The requests behind rows of the model's tracer, from the start of a run.

        A call of empty_cache() shows in the contexts of the rows, where these are lists of frames.
        """
        trace = cls()
        slots: dict[int, int] = {}
        waiting: dict[int, int] = {}
        for number, row in enumerate(rows):
            if row.action in ("segment_free", "segment_unmap"):
                if _was_emptied(row.context) and trace.kind[-1:] != [CLEAR]:
                    trace.clear(number)
            elif row.action == "alloc":
                slots[row.addr] = trace.ask(row.size, row.stream, row.pool, number)
            elif row.action == "oom":
                trace.ask(row.size, row.stream, row.pool, number, TRY)
            elif row.action == "free_requested" and row.addr in slots:
                slot = waiting[row.addr] = slots.pop(row.addr)
                trace.give(slot, number, GIVE_LATER)
            elif row.action == "free_completed" and row.addr in waiting:
                slot = waiting.pop(row.addr)
                if trace.kind[-1] == GIVE_LATER and trace.slot[-1] == slot:
                    trace.kind[-1] = GIVE
                else:
                    trace.give(slot, number, DONE)
        return trace


def _was_emptied(context: object) -> bool:
    """Whether the innermost frames of a row's stack are those of empty_cache()."""
    frames = context if isinstance(context, list) else []
    return any(isinstance(each, dict) and each.get("name") == "empty_cache" for each in frames[:4])


def requests_of(replay: Replay, history: History, *, start: int = 0, stop: int | None = None) -> RequestTrace:
    """The requests of a replayed history.

    Args:
        replay: an exact replay of `history`, stopped before row `start`; or run to the end with `start` 0.
        history: its rows.
        start: first row whose request counts; what is live then comes first.
        stop: row to stop before; default the end.
    """
    trace = RequestTrace()
    slots = _initial_requests(trace, replay, start)
    last = len(history) if stop is None else stop
    pools = PoolFinder(history)
    operations = replay.operations
    for kind, number in zip(operations.kinds, operations.rows, strict=True):
        row = _row_of(operations, kind, number)
        if row < start:
            continue
        if row >= last:
            break
        if kind == MALLOC:
            slots[history.address[row]] = trace.ask(
                history.size[row], history.stream[row], pools.of_row(row), row
            )
        elif kind == FREE:
            trace.give(slots.pop(history.address[row]), row)
        elif kind in (FREE_LATER, COMPLETED):
            _add_half_free(trace, slots, history.address[row], row, kind)
        elif kind == GROW:
            growth = operations.growths[number]
            reading = replay.readings.get(row, growth.readings[0])
            for each in (*growth.lead, *growth.rows):
                if history.action[each] == FREE_COMPLETED:
                    _add_half_free(trace, slots, history.address[each], each, COMPLETED)
            if reading.emptied:
                trace.clear(row)
            slot = trace.ask(
                history.size[row], history.stream[row], pools.of_row(row), row, TRY if growth.failed else ASK
            )
            if not growth.failed:
                slots[history.address[row]] = slot
        else:
            trace.clear(row)
    return trace


def _row_of(operations: Operations, kind: int, number: int) -> int:
    if kind < GROW:
        return number
    return operations.growths[number].row if kind == GROW else operations.bursts[number][0]


def _add_half_free(trace: RequestTrace, slots: dict[int, int], address: int, row: int, kind: int) -> None:
    """A free that was requested now and completes later, or completes now."""
    if kind == FREE_LATER:
        trace.give(slots[address], row, GIVE_LATER)
    elif address in slots:  # else it was over before the first row that counts
        trace.give(slots.pop(address), row, DONE)


def _initial_requests(trace: RequestTrace, replay: Replay, start: int) -> dict[int, int]:
    """What was live before row `start`, in order of address; returns address -> slot."""
    slots: dict[int, int] = {}
    pending: list[int] = []
    if start:
        for address, block in sorted(replay.allocator.live.items()):
            slots[address] = trace.ask(block.requested, block.owner.stream, block.owner.pool.id)
            if block.pending:
                pending.append(slots[address])
    else:
        for address, initial in sorted(replay.initial.live.items()):
            stream, pool = replay.initial_owners[address]
            slots[address] = trace.ask(initial.requested, stream, pool)
            if initial.pending:
                pending.append(slots[address])
    for slot in pending:
        trace.give(slot, -1, GIVE_LATER)
    trace.n_initial = len(trace)
    return slots
