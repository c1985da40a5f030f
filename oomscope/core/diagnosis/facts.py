"""The kinds of facts that evidence is made of. Sizes in bytes; None where nobody knows.

What is known about one run stands in `evidence.Evidence`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from oomscope.core.diagnosis.message import Frame
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
    records_gradients: bool | None = None
    """Whether the thread that asked for memory had gradient recording on; None: not recorded."""
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
class Recovery:
    """The job went on after it had run out of memory, and what that cost."""

    events: int
    """Out-of-memory events of this rank; all were caught."""
    steps_after: int
    """Optimizer steps completed after the last of them."""
    retried_steps: int
    """Steps that ran out of memory and were completed later, with the same batch or with another."""
    cost_ns: int | None
    """Time that those steps took beyond a usual one; None without durations."""
    kept_bytes: int | None
    """What stayed allocated between steps since then, beyond before."""

    def to_json(self) -> dict[str, Any]:
        return {
            "events": self.events,
            "steps_after": self.steps_after,
            "retried_steps": self.retried_steps,
            "cost_ns": self.cost_ns,
            "kept_bytes": self.kept_bytes,
        }


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
class HolderFact:
    """A variable that holds more at every look: the container, or the tensor whose graph gets longer."""

    path: str
    """As the script would write it: "losses", "self.cache"."""
    scope: str
    """"local of train", "global of train.py"."""
    owner: str
    """Type of the container, or "Tensor"."""
    item: str
    """What is added: "64x10 float32 tensor on cuda"."""
    count: int
    per_step: float
    """Items, or nodes of the graph, that are added per step."""
    bytes_per_step: int
    has_graph: bool
    where: Where | None = None
    """The line that adds to it, or of the function that holds it."""


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
    kill: Fact | None = None
    """What shows that the system ended a process of the job because host memory ran out."""
    kill_scope: str = ""
    """"cgroup" when a limit was hit, "machine" when the whole machine was full."""
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
