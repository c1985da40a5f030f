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
from oomscope.core.diagnosis.message import Frame, OomMessage
from oomscope.core.series.trend import Trend


@dataclass(frozen=True)
class Fact:
    """One line of evidence: what it says, who says it, and its number."""

    text: str
    source: str
    """"message", "allocator", "snapshot", "steps", "model", "source code", "traceback", "words" …"""
    value: Any = None

    def to_json(self) -> dict[str, Any]:
        return {"text": self.text, "source": self.source, "value": self.value}


@dataclass(frozen=True)
class Missing:
    """A fact that nobody recorded, and the cheapest way to get it."""

    what: str
    capture: str

    def to_json(self) -> dict[str, str]:
        return {"what": self.what, "capture": self.capture}


@dataclass(frozen=True)
class Where:
    """A line of the user's own code."""

    file: str
    line: int
    function: str
    source: str = ""

    @property
    def place(self) -> str:
        return f"{self.file.replace(chr(92), '/').rsplit('/', 1)[-1]}:{self.line}"

    def to_json(self) -> dict[str, Any]:
        return {"file": self.file, "line": self.line, "function": self.function, "source": self.source}


@dataclass(frozen=True)
class OomFact:
    """The moment of failure, as the allocator's observer saw it. Bytes."""

    step: int | None = None
    micro_step: int | None = None
    phase: str | None = None
    device: int | None = None
    requested_bytes: int | None = None
    device_free_bytes: int | None = None
    allocated_bytes: int | None = None
    reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    capacity_bytes: int | None = None
    retries: int | None = None
    frames: tuple[Frame, ...] = ()
    """Innermost first."""
    in_backward: bool = False
    simulated: bool = False
    count: int = 1
    """Out-of-memory events of this rank, caught ones included."""
    source: str = "allocator"

    @property
    def usable_bytes(self) -> int | None:
        """What torch can have on this device now: its reserved bytes and the free ones."""
        if self.reserved_bytes is None or self.device_free_bytes is None:
            return None
        return self.reserved_bytes + self.device_free_bytes


@dataclass(frozen=True)
class ExceptionFact:
    """The exception that ended the process."""

    type: str
    message: str
    is_oom: bool
    frames: tuple[Frame, ...] = ()
    """Innermost first."""


@dataclass(frozen=True)
class StepRow:
    """One optimizer step of one rank. Bytes; None where there is no device."""

    step: int
    low: int | None = None
    peak: int | None = None
    reserved: int | None = None
    peak_reserved: int | None = None
    rss: int | None = None
    input_numel: int | None = None
    retries: int | None = None
    end_ns: int | None = None
    micro_steps: int | None = None


@dataclass(frozen=True)
class RankFact:
    """One rank of the job."""

    rank: int | None
    local_rank: int | None = None
    device: int | None = None
    gpu_name: str | None = None
    capacity_bytes: int | None = None
    simulated: bool = False
    steps: tuple[StepRow, ...] = ()
    oom: OomFact | None = None
    exception: ExceptionFact | None = None
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    device_used_bytes: int | None = None
    peak_rss_bytes: int | None = None
    failed_ns: int | None = None
    exit_code: int | None = None

    @property
    def failed(self) -> bool:
        return self.oom is not None or self.exception is not None or self.exit_code not in (None, 0)


@dataclass(frozen=True)
class ModelFact:
    """Static state of the model on the device. Bytes; "no" is 0, "not known" is None."""

    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    optimizer: str | None = None
    autocast: bool | None = None
    has_batchnorm: bool | None = None
    ddp: bool | None = None
    block_groups: tuple[tuple[str, int, str], ...] = ()
    """(class, count, path) of repeated blocks that checkpointing could wrap."""
    root_class: str | None = None

    @property
    def static_bytes(self) -> int | None:
        """Parameters, gradients and optimizer state that exist now."""
        if self.parameters_bytes is None:
            return None
        return self.parameters_bytes + (self.gradients_bytes or 0) + (self.optimizer_bytes or 0)


@dataclass(frozen=True)
class LiveGroup:
    """Allocations alive at the failure (or at the end) that one stack of the user's code made."""

    bytes: int
    count: int
    category: str
    """"activation", "forward" (made there, use unknown), "gradient", "optimizer", "parameter", "loaded", "other" …"""
    where: Where | None
    """Innermost line of the user's code; None when the stack has none."""
    caller: Where | None = None
    """Outermost line of the user's code: the line of the loop."""
    largest: int = 0
    """Bytes of the largest single allocation of the group."""


@dataclass(frozen=True)
class GrowthGroup:
    """Survivors of earlier steps: allocations that should have died with their step."""

    bytes: int
    count: int
    per_step_bytes: float
    births: tuple[int, ...]
    """Steps in which survivors were born, sorted."""
    where: Where | None
    """Innermost user line common to the survivors."""
    caller: Where | None
    """The line of the loop that made them."""
    stacks: int
    """Distinct stacks: one for a list of outputs, many for the saved tensors of a graph."""
    categories: tuple[str, ...] = ()
    unit: str = "step"
    """"step" of the optimizer, or "iteration" of a loop without one."""


@dataclass(frozen=True)
class WhatIf:
    """The recorded allocations again, under other settings, on the same card. Bytes."""

    conf: str
    fits: bool
    peak_reserved_bytes: int | None = None


@dataclass(frozen=True)
class AllocatorFact:
    """The allocator's state just before the failing request, from its replay. Bytes."""

    request: int | None = None
    """Rounded request."""
    active: int | None = None
    reserved: int | None = None
    shortfall: int | None = None
    """active + request − usable capacity: > 0 means no allocator setting can help."""
    pending_free: int | None = None
    internal: int | None = None
    stranded: int | None = None
    """Free pieces of segments that also hold live blocks: neither returnable nor usable for this request."""
    largest_usable: int | None = None
    usable_free: int | None = None
    other_pools_free: int | None = None
    private_pools: int | None = None
    exact: bool | None = None
    """The model reproduced the recorded history event by event; None when it was not tried."""
    what_ifs: tuple[WhatIf, ...] = ()
    pins: tuple[LiveGroup, ...] = ()
    """Live allocations that pin mostly empty segments."""
    note: str = ""


@dataclass(frozen=True)
class ProcessFact:
    """A process on a GPU of this machine."""

    gpu: int
    pid: int | None
    bytes: int
    name: str = ""
    rank: int | None = None
    """Rank of this job, when it is one."""


@dataclass(frozen=True)
class HostFact:
    """The machine's side. Bytes; None where it was not read."""

    memory_total: int | None = None
    memory_available: int | None = None
    cgroup_limit: int | None = None
    cgroup_peak: int | None = None
    cgroup_oom_kills: int | None = None
    shm_total: int | None = None
    shm_free: int | None = None
    swap_total: int | None = None
    worker_bytes: Trend | None = None
    """Trend of the summed private memory of loader workers."""
    exit_codes: tuple[tuple[int | None, int], ...] = ()
    """(rank, exit code)."""
    is_wsl: bool = False
    is_windows: bool = False


@dataclass(frozen=True)
class LintFact:
    """A pattern found in the user's source."""

    rule: str
    where: Where
    text: str


@dataclass(frozen=True)
class Signal:
    """A named observation that several sources can make: `uses:fsdp`, `phase:save`, `says:growing`."""

    name: str
    text: str
    source: str
    strength: float = 1.0
    """1 for measured facts, less for words of a description."""


@dataclass(frozen=True)
class Settings:
    """The allocator's settings in force."""

    raw: str = ""
    expandable: bool | None = None
    max_split: bool | None = None
    gc_threshold: bool | None = None
    memory_fraction: float | None = None


@dataclass(frozen=True)
class FixOutcome:
    """A fix that this attempt ran with, and what came of it. Bytes."""

    fix: str
    predicted_saving: int | None
    measured_saving: int | None
    state: str = "applied"
    reason: str = ""


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
            or any(m.is_oom for m in self.messages)
            or bool(self.exception and self.exception.is_oom)
        )

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
