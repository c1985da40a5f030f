"""What is known about one failed (or healthy) run: every fact typed, with where it came from.

Sources differ in reach: a pasted line gives a message; a log adds tracebacks and ranks; a snapshot adds what
was alive; a session adds the series of every step. A field that no source could fill is None, and a rule that
needs it says which capture would fill it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from oomscope.core.diagnosis.arithmetic import Arithmetic
from oomscope.core.diagnosis.facts import (
    AllocatorFact,
    ExceptionFact,
    Fact,
    FixOutcome,
    GrowthGroup,
    HolderFact,
    HostFact,
    LintFact,
    LiveGroup,
    Missing,
    ModelFact,
    OomFact,
    ProcessFact,
    RankFact,
    Recovery,
    Settings,
    Signal,
    StepRow,
    WhatIf,
    Where,
)
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.series.trend import Trend

__all__ = [
    "AllocatorFact",
    "Evidence",
    "ExceptionFact",
    "Fact",
    "FixOutcome",
    "GrowthGroup",
    "HolderFact",
    "HostFact",
    "LintFact",
    "LiveGroup",
    "Missing",
    "ModelFact",
    "OomFact",
    "ProcessFact",
    "RankFact",
    "Recovery",
    "Settings",
    "Signal",
    "StepRow",
    "WhatIf",
    "Where",
]


#: SIGKILL as `subprocess`, as a shell and as torchrun tell it.
KILLED_CODES = (-9, 137, 247)


@dataclass(frozen=True)
class Evidence:
    """Everything that is known. `sources` names what was read."""

    sources: tuple[str, ...] = ()
    script: str | None = None
    attempt: int | None = None
    messages: tuple[OomMessage, ...] = ()
    first_rank: int | None = None
    first_rank_reason: str = ""
    message: OomMessage | None = None
    """The message that is judged: that of the first failing rank."""
    arithmetic: Arithmetic | None = None
    rank: RankFact | None = None
    """The rank that is judged."""
    ranks: tuple[RankFact, ...] = ()
    oom: OomFact | None = None
    exception: ExceptionFact | None = None
    trend: Trend | None = None
    """Of the allocated bytes at the end of each step."""
    peak_trend: Trend | None = None
    reserved_trend: Trend | None = None
    rss_trend: Trend | None = None
    model: ModelFact | None = None
    allocator: AllocatorFact | None = None
    live: tuple[LiveGroup, ...] = ()
    growth: GrowthGroup | None = None
    holders: tuple[HolderFact, ...] = ()
    """Variables that hold more at every look, those with most bytes per step first."""
    composition: tuple[tuple[str, int], ...] = ()
    """(category, bytes) at the peak."""
    lint: tuple[LintFact, ...] = ()
    signals: tuple[Signal, ...] = ()
    host: HostFact | None = None
    processes: tuple[ProcessFact, ...] = ()
    settings: Settings | None = None
    torch_version: str | None = None
    versions: tuple[tuple[str, str], ...] = ()
    """(package, version)."""
    outcomes: tuple[FixOutcome, ...] = ()
    packed_need_bytes: int | None = None
    """Reserved bytes that the whole job needs when packed well (expandable segments), simulated without a limit; None:
    not predicted. A failure in the first step shows only the part of the need that came before it."""
    recovered: Recovery | None = None
    """The job went on after the failure; None: it did not, or nothing failed."""
    finished: bool | None = None
    """The run ended well; None when nobody knows."""
    notes: tuple[str, ...] = field(default=())
    """What could not be read, for the report."""

    def signal(self, *names: str) -> Signal | None:
        """The strongest signal of one of `names`."""
        found = [signal for signal in self.signals if signal.name in names]
        return max(found, key=lambda signal: signal.strength) if found else None

    def lint_of(self, *rules: str) -> LintFact | None:
        """The first finding of the earliest of `rules` that has one."""
        found = [fact for fact in self.lint if fact.rule in rules]
        return min(found, key=lambda fact: rules.index(fact.rule), default=None)

    @property
    def failed(self) -> bool:
        """Whether anything says that memory ran out."""
        return (
            self.oom is not None
            or self.host_kill is not None
            or any(m.is_oom for m in self.messages)
            or bool(self.exception and self.exception.is_oom)
        )

    @property
    def host_kill(self) -> Fact | None:
        """What shows that the job was ended for host memory; None where a device's allocator reported the failure."""
        return self.host.kill if self.host is not None and self.oom is None else None

    @property
    def phase(self) -> str | None:
        """Phase of the failure: measured, or read from the traceback or the words."""
        if self.oom is not None and self.oom.phase not in (None, "other"):
            return self.oom.phase
        found = [signal for signal in self.signals if signal.name.startswith("phase:")]
        return max(found, key=lambda s: s.strength).name[6:] if found else None

    @property
    def step(self) -> int | None:
        return self.oom.step if self.oom is not None else None

    # The five numbers, from the observer or else from the text.

    @property
    def capacity(self) -> int | None:
        known = (self.oom and self.oom.capacity_bytes, self.message and self.message.capacity_bytes)
        return _first((*known, self.rank and self.rank.capacity_bytes))

    @property
    def requested(self) -> int | None:
        return _first((self.oom and self.oom.requested_bytes, self.message and self.message.tried_bytes))

    @property
    def free(self) -> int | None:
        return _first((self.oom and self.oom.device_free_bytes, self.message and self.message.free_bytes))

    @property
    def allocated(self) -> int | None:
        return _first((self.oom and self.oom.allocated_bytes, self.message and self.message.allocated_bytes))

    @property
    def unallocated(self) -> int | None:
        if (
            self.oom is not None
            and self.oom.reserved_bytes is not None
            and self.oom.allocated_bytes is not None
        ):
            return max(0, self.oom.reserved_bytes - self.oom.allocated_bytes)
        return self.arithmetic.unallocated if self.arithmetic is not None else None

    @property
    def shortfall(self) -> int | None:
        """Bytes missing even with perfect packing; ≤ 0 when a perfect allocator could serve the request."""
        if self.allocator is not None and self.allocator.shortfall is not None:
            return self.allocator.shortfall
        if self.requested is None or self.free is None or self.unallocated is None:
            return None
        return self.requested - self.free - self.unallocated

    def tag(self, name: str) -> bool:
        return self.arithmetic is not None and name in self.arithmetic.tags


def _first(values: Iterable[Any]) -> int | None:
    for value in values:
        if value is not None:
            return int(value)
    return None
