"""Exact replay: run the recorded program through the model and compare every address, row and final block.

A pass means that the model is this process's allocator, so that predictions made with it can be trusted;
this is the gate before `whatif`. A mismatch is evidence too: wrong settings, another release, or an edited
file.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from oomscope.core.allocator.history import History
from oomscope.core.allocator.initial import OVERLAP, UNKNOWN_POOL, InitialAllocator
from oomscope.core.allocator.model import DEFAULT_POOL, AllocatorConfig, AllocatorOutOfMemory, Block
from oomscope.core.allocator.model_copy import copy_allocator
from oomscope.core.allocator.operations import (
    COMPLETED,
    EMPTY,
    FREE,
    FREE_LATER,
    GROW,
    MALLOC,
    Growth,
    Operations,
    Reading,
    read_operations,
)
from oomscope.core.allocator.pools import PoolFinder
from oomscope.core.allocator.reconstruct import OVERLAPPING, InitialState, reconstruct
from oomscope.core.allocator.replay_driver import Diverged, RecordedDriver, ReplayedAllocator
from oomscope.core.allocator.reservations import Reservations

#: How often a different reading of ambiguous rows is tried before the replay gives up.
MAX_READINGS = 200
#: Rows that may be replayed again for that, beyond twice the history.
MAX_REPEATED_ROWS = 100_000
#: Points to come back to that are kept in memory.
_MAX_POINTS = 12


@dataclass(frozen=True, slots=True)
class Divergence:
    """The first row at which the model did something else."""

    row: int
    recorded: str
    predicted: str


@dataclass(slots=True)
class Replay:
    """Result of replaying one device's history."""

    config: AllocatorConfig
    rows: int
    exact: bool
    divergence: Divergence | None
    allocator: ReplayedAllocator
    """The model at the end, or at the divergence; the context of a block is the row that allocated it."""
    initial: InitialState
    initial_reserved_bytes: int
    operations: Operations
    readings: dict[int, Reading]
    """Row of an allocation -> how its ambiguous rows were understood, where that was not the first guess."""
    ambiguities: Counter[str] = field(default_factory=Counter)
    problems: Counter[str] = field(default_factory=Counter)
    initial_owners: dict[int, tuple[int, tuple[int, int]]] = field(default_factory=dict)
    """Address of each block that was live before the first row -> its stream and pool."""
    capacity_low: int = 0
    """The device had at least these bytes for this process: the peak of what was reserved."""
    capacity_high: int | None = None
    """It had fewer than these: a request beyond them was refused. None when nothing was refused."""
    capacity_by_row: dict[int, int] = field(default_factory=dict)
    """Out-of-memory row -> reserved plus free bytes at that moment: what this process could have had."""

    @property
    def capacity_at_oom(self) -> int | None:
        """What this process could have had at the last out-of-memory row; None without one."""
        return self.capacity_by_row[max(self.capacity_by_row)] if self.capacity_by_row else None

    @property
    def matched(self) -> int:
        """Rows before the divergence."""
        return self.rows if self.divergence is None else self.divergence.row


@dataclass(slots=True)
class _Point:
    """A state to come back to: before an operation with several readings."""

    index: int
    left: list[Reading]
    allocator: ReplayedAllocator


class Replayer:
    """Replays one history under one configuration."""

    def __init__(
        self,
        history: History,
        config: AllocatorConfig,
        *,
        state: InitialState | None = None,
        operations: Operations | None = None,
        stop: int | None = None,
        max_readings: int = MAX_READINGS,
        readings: Mapping[int, Reading] | None = None,
    ) -> None:
        """Prepare.

        Args:
            history: the rows.
            config: settings to assume.
            state: result of `reconstruct(history)`, if at hand; it does not depend on the settings.
            operations: result of `read_operations(history)`, likewise.
            max_readings: how often to try another reading of ambiguous rows.
            readings: those of an exact replay, to follow it without trying.
            stop: replay only the operations before this row.
        """
        self.history = history
        self.config = config
        self.state = state or reconstruct(history)
        self.operations = operations or read_operations(
            history, free_requests_recorded=self.state.free_requests_recorded
        )
        self._max_readings = max_readings
        self._known_readings = readings
        self.stop = len(history) if stop is None else stop
        self._pools = PoolFinder(history)
        self.reservations = Reservations(history, self.state, config, self._pools)
        driver = RecordedDriver(history, self.reservations, self.state.memory())
        self.allocator = ReplayedAllocator(config, driver)
        builder = InitialAllocator(
            history,
            self.state,
            config,
            self.reservations,
            driver.reserved.add,
        )
        builder.fill(self.allocator)
        driver.reserved_bytes = self.allocator.reserved_bytes
        self.ambiguities = builder.ambiguities
        self.problems = self.state.problems + builder.problems
        returned = self._pools.unknown_rows
        if returned:
            self.ambiguities[UNKNOWN_POOL] = returned
        self._initial_reserved = self.allocator.reserved_bytes
        self._initial_owners = {
            address: (block.owner.stream, block.owner.pool.id)
            for address, block in self.allocator.live.items()
        }
        self._readings: dict[int, Reading] = {}
        self._capacity_by_row: dict[int, int] = {}

    def run(self) -> Replay:
        """Replay to the end, trying other readings of ambiguous rows where the model diverges."""
        if self.ambiguities[OVERLAP]:
            return self._result(Diverged(0, "blocks older than the history overlap under these settings"))
        if self.problems[OVERLAPPING]:
            return self._result(Diverged(0, "segments that do not overlap"))
        points: list[_Point] = []
        index, tries = 0, 0
        budget = MAX_REPEATED_ROWS + 2 * len(self.history)
        furthest: Diverged | None = None
        while True:
            try:
                self.advance(index, points=points)
                return self._result(None)
            except Diverged as diverged:
                if furthest is None or diverged.row > furthest.row:
                    furthest = diverged
                point = self._come_back(points)
                tries += 1
                if point is None or tries > self._max_readings or budget < 0:
                    return self._result(furthest)
                index = point.index
                budget -= max(0, diverged.row - index)

    def advance(self, index: int, end: int | None = None, *, points: list[_Point] | None = None) -> None:
        """Execute operations from number `index` to before number `end`, and none from row `stop` on.

        Raises:
            Diverged: the model did something else.
        """
        operations = self.operations
        kinds, rows = operations.kinds, operations.rows
        history = self.history
        size, stream, address = history.size, history.stream, history.address
        pool_of = self._pools.of_row if self._pools.any else None
        stop = self.stop
        points = [] if points is None else points
        resumed = index if points and points[-1].index == index else -1
        count = len(kinds) if end is None else end
        while index < count:
            kind, row = kinds[index], rows[index]
            allocator = self.allocator
            if kind == MALLOC:
                if row >= stop:
                    return
                allocator.driver.row = row
                pool = pool_of(row) if pool_of else DEFAULT_POOL
                block = allocator.allocate(size[row], stream[row], row, pool)
                if block.address != address[row]:
                    raise Diverged(row, f"alloc at {block.address:#x}")
            elif kind == FREE:
                if row >= stop:
                    return
                found = allocator.live.get(address[row])
                if found is None or not found.allocated:
                    raise Diverged(row, "no allocated block there")
                allocator.free_at_once(found)
            elif kind == FREE_LATER:
                if row >= stop:
                    return
                block = self._live_block(row)
                allocator.request_free(block)
                block.pending = True
            elif kind == COMPLETED:
                if row >= stop:
                    return
                allocator.complete(self._pending_block(row))
            else:
                if self._rows_of(kind, row) >= stop:
                    self._complete_lead(kind, row)
                    return
                if kind == EMPTY:
                    self._empty(operations.bursts[row])
                else:
                    growth = operations.growths[row]
                    self._grow(growth, self._reading(growth, index, points, resumed == index))
            index += 1

    def _rows_of(self, kind: int, number: int) -> int:
        """First row of a GROW or EMPTY operation."""
        if kind == EMPTY:
            return self.operations.bursts[number][0]
        return self.operations.growths[number].row

    # ---- the operations

    def _reading(self, growth: Growth, index: int, points: list[_Point], resumed: bool) -> Reading:
        """How to understand the rows of `growth`, remembering the state when there is a choice."""
        if self._known_readings is not None:
            return self._known_readings.get(growth.row, growth.readings[0])
        if resumed:
            point = points[-1]
            reading = point.left.pop(0)
            if not point.left:
                points.pop()
            self._readings[growth.row] = reading
            return reading
        if len(growth.readings) > 1:
            points.append(_Point(index, growth.readings[1:], self.copy()))
            del points[:-_MAX_POINTS]
        return growth.readings[0]

    def copy(self) -> ReplayedAllocator:
        """The allocator as it is now, free to go another way."""
        twin = copy_allocator(self.allocator)
        twin.driver.reserved = self.allocator.driver.reserved.copy()
        twin.driver.memory = self.allocator.driver.memory.copy()
        return twin

    def _come_back(self, points: list[_Point]) -> _Point | None:
        if not points:
            return None
        point = points[-1]
        self.allocator = point.allocator
        if len(point.left) > 1:  # it will be needed again
            point.allocator = self.copy()
        return point

    def _grow(self, growth: Growth, reading: Reading) -> None:
        allocator, history = self.allocator, self.history
        for row in growth.lead[: reading.completed_before]:
            allocator.complete(self._pending_block(row))
        rows = growth.rows
        if reading.emptied:
            self._empty(rows[: reading.emptied])
            rows = rows[reading.emptied :]
        row = growth.row
        allocator.driver.begin(row, growth.lead[reading.completed_before :] + rows, failed=growth.failed)
        size, stream, pool = history.size[row], history.stream[row], self._pools.of_row(row)
        try:
            block = allocator.allocate(size, stream, row, pool)
        except AllocatorOutOfMemory as error:
            if not growth.failed:
                raise Diverged(row, "out of memory") from None
            if error.rounded != size:
                raise Diverged(row, f"oom for {error.rounded} bytes") from None
            allocator.driver.end()
            free = history.address[row]
            if free >= 0:
                self._capacity_by_row[row] = allocator.reserved_bytes + free
            return
        if growth.failed:
            raise Diverged(row, f"alloc at {block.address:#x}")
        allocator.driver.end()
        if block.address != history.address[row]:
            raise Diverged(row, f"alloc at {block.address:#x}")

    def _complete_lead(self, kind: int, number: int) -> None:
        """The replay stops before an allocation: frees that are recorded just before it are over."""
        if kind == GROW:
            growth = self.operations.growths[number]
            known = (self._known_readings or {}).get(growth.row, growth.readings[0])
            for row in growth.lead[: known.completed_before]:
                if row < self.stop:
                    self.allocator.complete(self._pending_block(row))

    def _empty(self, rows: list[int]) -> None:
        allocator = self.allocator
        allocator.driver.begin(rows[0], rows)
        allocator.empty_cache()
        allocator.driver.end()

    def _live_block(self, row: int) -> Block:
        block = self.allocator.live.get(self.history.address[row])
        if block is None or not block.allocated:
            raise Diverged(row, "no allocated block there")
        return block

    def _pending_block(self, row: int) -> Block:
        block = self.allocator.live.get(self.history.address[row])
        if block is None or block.allocated:
            raise Diverged(row, "no pending free there")
        return block

    # ---- the result

    def _result(self, diverged: Diverged | None) -> Replay:
        divergence = None
        if diverged is not None:
            divergence = Divergence(diverged.row, self.history.describe(diverged.row), diverged.predicted)
        elif self.operations.stray:
            row = self.operations.stray[0]
            divergence = Divergence(row, self.history.describe(row), "no allocation that needs it")
        elif self.stop >= len(self.history):
            divergence = self._compare_final()
        driver = self.allocator.driver
        return Replay(
            config=self.config,
            rows=len(self.history),
            exact=divergence is None,
            divergence=divergence,
            allocator=self.allocator,
            initial=self.state,
            initial_reserved_bytes=self._initial_reserved,
            operations=self.operations,
            readings=dict(self._readings),
            ambiguities=self.ambiguities,
            problems=self.problems,
            initial_owners=self._initial_owners,
            capacity_low=self.allocator.peak_reserved_bytes,
            capacity_high=driver.refused_at,
            capacity_by_row=self._capacity_by_row,
        )

    def _compare_final(self) -> Divergence | None:
        """Block by block against the recorded final state."""
        allocator = self.allocator
        seen = 0
        for segment in self.history.segments:
            for final in segment.blocks:
                block = allocator.live.get(final.address) or allocator.free_blocks.get(final.address)
                state = _state(final.live, final.pending)
                words = f"final block at {final.address:#x}, {final.size} bytes, {state}"
                if block is None:
                    return Divergence(len(self.history), words, "no block there")
                seen += 1
                if (block.size, block.is_live, block.pending) != (final.size, final.live, final.pending):
                    predicted = f"{block.size} bytes, {_state(block.is_live, block.pending)}"
                    return Divergence(len(self.history), words, predicted)
        extra = len(allocator.live) + len(allocator.free_blocks) - seen
        if extra:
            return Divergence(len(self.history), f"{seen} final blocks", f"{extra} more blocks")
        return None


def _state(live: bool, pending: bool) -> str:
    return "pending free" if pending else "allocated" if live else "free"


def replay(history: History, config: AllocatorConfig) -> Replay:
    """Replay `history` under `config`; see `Replayer`. Damaged histories get a result, too."""
    row = history.first_impossible()
    if row is None:
        return Replayer(history, config).run()
    nothing = History(history.device, [], [], [], [], [], None, [], frozenset())
    result = Replayer(nothing, config).run()
    result.rows, result.exact = len(history), False
    result.divergence = Divergence(row, history.describe(row), "no such address or size")
    result.problems["an address or size that no device has"] += 1
    return result
