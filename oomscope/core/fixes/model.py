"""What a fix is: facts in; applicability, effect and plan out. Nothing here starts a process."""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any


class Risk(str, enum.Enum):
    """What may change in the user's results, from nothing to the layout of the whole run."""

    NONE = "none"
    """Nothing: only where bytes lie."""
    EXACT = "exact"
    """The same numbers, bit for bit (with dropout: the same distribution)."""
    ROUNDING = "rounding"
    """The same mathematics in another order or precision."""
    SEMANTIC = "semantic"
    """Another training: other states, another optimizer, another batch."""
    TOPOLOGY = "topology"
    """The same mathematics over other processes; checkpoints look different."""

    @property
    def rank(self) -> int:
        """Position in the order above."""
        return list(Risk).index(self)


class How(str, enum.Enum):
    """By what means a fix is applied."""

    ENV = "env"
    RUNTIME = "runtime"
    SOURCE = "source"
    ARGV = "argv"
    LAUNCHER = "launcher"


@dataclass(frozen=True, slots=True)
class BlockGroup:
    """Repeated blocks of the model, as the job reported them."""

    class_name: str
    count: int
    path: str
    saved_bytes_each: int = 0
    """What one block keeps for backward, its input included; 0: not measured."""
    input_bytes_each: int = 0


@dataclass(frozen=True, slots=True)
class Knob:
    """A command-line option of the user's script that changes memory."""

    kind: str
    """batch_size, accumulation, amp, checkpointing, sequence, image, optimizer, workers, sharding."""
    options: tuple[str, ...]
    value: Any
    is_flag: bool


@dataclass(frozen=True, slots=True)
class JobFacts:
    """Everything a fix may look at. A field that nobody measured is None (numbers) or its neutral value."""

    torch_version: tuple[int, int] = (0, 0)
    platform: str = "linux"
    world_size: int = 1
    compute_capability: tuple[int, int] | None = None
    capacity_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    peak_allocated_bytes: int | None = None
    peak_phase: str | None = None
    composition: Mapping[str, int] = field(default_factory=dict)
    """Category -> bytes at the peak."""
    requested_bytes: int | None = None
    device_free_bytes: int | None = None
    oom_allocated_bytes: int | None = None
    oom_reserved_bytes: int | None = None
    oom_step: int | None = None
    oom_phase: str | None = None
    env: Mapping[str, str] = field(default_factory=dict)
    """Allow-listed environment of the job."""
    alloc_conf: str | None = None
    """Allocator settings that the process really used; None: not known, `env` is all there is."""
    parameters_bytes: int | None = None
    gradients_bytes: int | None = None
    optimizer_bytes: int | None = None
    largest_parameter_bytes: int | None = None
    root_class: str | None = None
    block_groups: tuple[BlockGroup, ...] = ()
    has_batchnorm: bool = False
    has_convolution: bool = False
    autocast: bool = False
    low_precision_parameters: bool = False
    checkpointing: str | None = None
    """What shows that the script checkpoints already."""
    compiled: bool = False
    optimizer: str | None = None
    optimizer_fused: bool | None = None
    optimizer_foreach: bool | None = None
    zero_grad_keeps: bool = False
    clips: bool = False
    accumulation: int = 1
    scaler: bool = False
    closure: bool = False
    """The optimizer calls its closure several times a step (LBFGS)."""
    ddp: bool = False
    bucket_view: bool = False
    fsdp: bool = False
    logits_bytes: int = 0
    """Bytes of the largest input of a cross entropy."""
    vocabulary: int = 0
    fusable_head: bool = False
    """That input came straight from a Linear layer."""
    eight_bit_library: bool = False
    """torchao or bitsandbytes can be imported by the job."""
    batch_size: int | None = None
    batch_varies: bool = False
    eval_with_grad: int = 0
    empty_cache_calls: int = 0
    frameworks: frozenset[str] = frozenset()
    knobs: tuple[Knob, ...] = ()
    rules: tuple[str, ...] = ()
    """Rule ids of the diagnosis, the best first."""
    where: tuple[str, int] | None = None
    """File and line that the diagnosis points at."""
    observed: bool = False
    """Whether the script was watched (on the simulated device or with `--detail`): absence of a thing is then
    knowledge.
    """

    def older_than(self, release: tuple[int, int]) -> bool:
        """Whether the job's torch is known, and from before `release`."""
        return (0, 0) < self.torch_version < release

    @property
    def static_bytes(self) -> int | None:
        """Parameters, gradients and optimizer state: what no change of the activations can lower."""
        parts = (self.parameters_bytes, self.gradients_bytes, self.optimizer_bytes)
        known = [part for part in parts if part is not None]
        return sum(known) if len(known) == len(parts) else None

    @property
    def saved_bytes(self) -> int | None:
        """Bytes kept for backward at the peak."""
        return self.composition.get("activation")


@dataclass(frozen=True, slots=True)
class Applicable:
    """Whether a fix applies; `why` is the reason of a refusal, or what speaks for it."""

    ok: bool
    why: str = ""


def yes(why: str = "") -> Applicable:
    return Applicable(True, why)


def no(why: str) -> Applicable:
    return Applicable(False, why)


@dataclass(frozen=True, slots=True)
class Band:
    """Bytes saved at the peak, by formula from recorded facts: at least, at most. Negative means dearer."""

    low: int
    high: int
    basis: str


@dataclass(frozen=True, slots=True)
class Plan:
    """What a rerun changes. Plain data: it travels to the launcher and into the job."""

    env: Mapping[str, str] = field(default_factory=dict)
    """Allocator settings are merged with the user's own by `environment.merge_allocator_settings`."""
    runtime: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """Fix id inside the job -> options."""
    argv: tuple[str, ...] = ()
    """Options appended to the script's command line (argparse takes the last one)."""
    patch: str | None = None
    """Name of the source patch, see `patches`."""
    steps: tuple[str, ...] = ()
    """Sentences that say what is done, for the preview."""


def no_band(facts: JobFacts) -> Band | None:
    """For fixes whose effect no formula gives."""
    return None


@dataclass(frozen=True, slots=True, kw_only=True)
class Fix:
    """One entry of the catalogue."""

    id: str
    title: str
    effort_s: int
    """Seconds a person needs to adopt it."""
    risk: Risk
    how: tuple[How, ...]
    time_factor: float = 1.0
    """Step time with the fix over step time without it (FIXES: measured on small models, CPU)."""
    conflicts: frozenset[str] = frozenset()
    test: Callable[[JobFacts], Applicable]
    make: Callable[[JobFacts], Plan]
    verify: str
    """How a rerun proves that nothing else changed."""
    band: Callable[[JobFacts], Band | None] = no_band
    undo: str = "the next run without the plan"
    runs: bool = True
    """Whether a prediction needs a run of its own; an allocator setting is predicted by replay of the
    baseline.
    """
    advice: bool = False
    """Only advice: nothing is applied for the user."""

    def applicable(self, facts: JobFacts) -> Applicable:
        """Whether the fix applies, with the reason."""
        return self.test(facts)

    def plan(self, facts: JobFacts) -> Plan:
        """What a rerun changes."""
        return self.make(facts)

    @property
    def tolerance(self) -> float | None:
        """Largest relative difference of a loss that the risk class allows; None: not comparable."""
        return {Risk.NONE: 0.0, Risk.EXACT: 1e-5, Risk.ROUNDING: 1e-2, Risk.TOPOLOGY: 1e-4}.get(self.risk)


def merge_runtime(plans: Iterable[Plan]) -> dict[str, Mapping[str, Any]]:
    """The run-time fixes of several plans; options of the same fix are joined, later ones win."""
    merged: dict[str, Mapping[str, Any]] = {}
    for plan in plans:
        for fix, options in plan.runtime.items():
            merged[fix] = {**merged.get(fix, {}), **options}
    return merged


def no_activations(facts: JobFacts) -> Band | None:
    """A band of nothing when the peak lies where no activation is alive, else None."""
    if facts.peak_phase == "optimizer":
        return Band(0, 0, "the peak is in the optimizer step, where no activation is alive")
    return None
