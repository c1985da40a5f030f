"""What rules share: sentences with sizes, the captures that would decide a case, and common tests."""

from __future__ import annotations

from oomscope.core.diagnosis.arithmetic import FREE_FACTOR, FREE_SLACK_BYTES
from oomscope.core.diagnosis.evidence import (
    Evidence,
    Fact,
    GrowthGroup,
    HolderFact,
    LiveGroup,
    Missing,
    Signal,
)
from oomscope.core.diagnosis.message import HOST_KINDS, LIBRARY_KINDS
from oomscope.core.diagnosis.model import Excluded
from oomscope.units import format_bytes

RUN = "oomscope run SCRIPT"
DETAIL = "oomscope run --detail SCRIPT"

SNAPSHOT = Missing("what was alive at the failure, with the lines that allocated it", RUN)
SERIES = Missing("allocated memory at the end of each step", RUN)
PHASE = Missing("the phase in which it failed", f"{DETAIL}, or the full traceback")
MODEL = Missing("bytes of parameters, gradients and optimizer state", RUN)
PROCESSES = Missing("which processes hold memory of this GPU", "oomscope top, while it is occupied")
HOST = Missing("memory of the machine and of its cgroup at that time", RUN)
HOLDER = Missing("which variable holds what grows", DETAIL)
NATIVE = Missing("what code outside Python allocates", "memray run --native SCRIPT")
SOURCE = Missing("the source of the script", "oomscope run SCRIPT, or explain a session")
NUMBERS = Missing("the numbers of the error message", "the complete line of the error")

BEFORE_STEP = ("init", "load")
IN_STEP = ("forward", "backward")


def share(part: float | None, whole: float | None) -> float:
    """Part / whole, 0 where either is missing."""
    return part / whole if part is not None and whole else 0.0


def size(count: float | None) -> str:
    return "?" if count is None else format_bytes(count)


def heard(signal: Signal) -> Fact:
    """A signal as a line of evidence."""
    return Fact(signal.text, signal.source)


def is_host_only(e: Evidence) -> bool:
    """The failure is one of host memory."""
    if e.message is None:
        return e.host_kill is not None
    return e.oom is None and e.message.kind in HOST_KINDS


def is_library(e: Evidence) -> bool:
    return e.oom is None and e.message is not None and e.message.kind in LIBRARY_KINDS


def not_this_memory(e: Evidence) -> Excluded | None:
    """Excludes causes inside torch's allocator where the failure lies elsewhere."""
    if is_host_only(e):
        return Excluded((Fact("host memory ran out, not the device", "message"),))
    for holds, text in (
        (e.tag("absurd_size"), "the size of the request is absurd"),
        (e.tag("impossible_request"), "the request alone is larger than the device"),
        (refused(e), "the device had enough free memory and refused"),
    ):
        if holds:
            return Excluded((Fact(text, "message", e.requested),))
    return None


def refused(e: Evidence) -> bool:
    """The device had enough free memory and refused; an incomplete message without a reserved size says that much."""
    a = e.arithmetic
    if e.oom is None and a is not None and not a.tags and a.tried and a.free is not None:
        return a.free >= FREE_FACTOR * a.tried + FREE_SLACK_BYTES
    return e.tag("free_but_refused")


def request_fact(e: Evidence) -> Fact:
    """The request against what was there."""
    source = "allocator" if e.oom is not None else "message"
    text = f"the request of {size(e.requested)} met {size(e.free)} free"
    if e.unallocated is not None:
        text += f" and {size(e.unallocated)} of idle cache"
    return Fact(text, source, e.requested)


def shortfall_fact(e: Evidence) -> Fact | None:
    """What is missing with perfect packing, or that nothing is."""
    short = e.shortfall
    if short is None:
        return None
    source = "replay" if e.allocator is not None else "allocator" if e.oom is not None else "message"
    if short > 0:
        return Fact(f"even with perfect packing {size(short)} are missing", source, short)
    return Fact(f"with perfect packing it would have fitted, with {size(-short)} to spare", source, short)


def need_fact(e: Evidence) -> Fact | None:
    """That the job as a whole needs more than the card has, however well it is packed; None: not known to."""
    need = e.packed_need_bytes
    limit = e.rank.capacity_bytes if e.rank is not None and e.rank.capacity_bytes else e.capacity
    if need is None or limit is None or need <= limit:
        return None
    text = f"the job needs {size(need)} even with expandable segments, and torch could use {size(limit)}"
    return Fact(text, "prediction", need)


def parameter_bytes(e: Evidence) -> int | None:
    """Bytes of the model's parameters: its own count, else what was alive of them."""
    if e.model is not None and e.model.parameters_bytes:
        return e.model.parameters_bytes
    return sum(group.bytes for group in e.live if group.category == "parameter") or None


def activations(e: Evidence) -> int | None:
    """Bytes alive at the failure that are neither parameters, gradients nor optimizer state."""
    if e.composition:
        parts = dict(e.composition)
        return parts.get("activations", 0) + parts.get("temporaries", 0)
    if e.model is None and e.live and e.oom is not None:
        return sum(
            group.bytes for group in e.live if group.category in ("activation", "forward", "temporary")
        )
    if e.model is None or e.model.static_bytes is None or e.allocated is None:
        return None
    return max(0, e.allocated - e.model.static_bytes)


def recorded_evaluation(e: Evidence) -> Fact | None:
    """What shows that an evaluation records gradients; None: nothing does, or it failed elsewhere.

    Under `no_grad` a layer's input is freed once the next layer has run, so activations are a small part of what is
    alive. Recording that is on counts from a smaller share, because a frozen model keeps none in spite of it.
    """
    if e.oom is None or e.phase != "eval":
        return None
    lint = e.lint_of("eval-no-grad")
    if lint is not None:
        return Fact(f"{lint.where.place}: {lint.text}", "source code")
    live = activations(e)
    part = share(live, e.allocated)
    if e.oom.records_gradients and part >= 0.3:
        text = f"gradient recording was on, and {size(live)} of activations ({part:.0%}) were alive in evaluation"
        return Fact(text, "autograd", live)
    return (
        Fact(f"{size(live)} of activations are alive in evaluation", "snapshot", live)
        if part >= 0.5
        else None
    )


def group_fact(group: LiveGroup) -> Fact:
    """Where the bytes of a group come from."""
    place = f" from {group.where.place}" if group.where else ""
    source = f"  {group.where.source.strip()}" if group.where and group.where.source else ""
    return Fact(
        f"{size(group.bytes)} alive in {group.count} allocations{place}{source}", "snapshot", group.bytes
    )


def growth_fact(growth: GrowthGroup) -> Fact:
    place = f" made at {growth.caller.place}" if growth.caller else ""
    steps = f"{growth.unit}s {growth.births[0]} to {growth.births[-1]}" if growth.births else "?"
    return Fact(
        f"{size(growth.bytes)} in {growth.count} allocations{place} outlived their {growth.unit} ({steps})",
        "snapshot",
        growth.bytes,
    )


def piles_up(e: Evidence) -> bool:
    """Survivors of earlier iterations make up much of what was alive, where the steps themselves decide nothing.

    Either the loop has no optimizer steps, or it failed after so few that their series has no trend yet.
    """
    g = e.growth
    if g is None or share(g.bytes, e.allocated) < 0.3:
        return False
    return g.unit == "iteration" or (len(g.births) >= 3 and (e.trend is None or e.trend.kind == "unclear"))


def trend_fact(e: Evidence) -> Fact | None:
    """The series of allocated bytes in one sentence."""
    trend = e.trend
    if trend is None or trend.kind == "unclear":
        return None
    if trend.is_leak:
        text = (
            f"allocated memory at the end of a step grows by {size(trend.slope)} per step "
            f"({size(trend.low)} to {size(trend.high)}, R² {trend.r2:.3f}, {trend.steps} steps)"
        )
    elif trend.kind == "sawtooth":
        text = f"allocated memory rises and falls with a period of about {trend.period or 0:.0f} steps"
    elif trend.kind == "plateau":
        text = f"allocated memory rose from {size(trend.first)} to {size(trend.last)} and stayed there"
    else:
        text = f"allocated memory at the end of a step is steady at {size(trend.last)}"
    return Fact(text, "steps", round(trend.slope))


HOST_STEPS, HOST_RISE, HOST_SHARE = 12, 16 << 20, 0.02
"""Resident memory of a healthy process creeps as well, in its first steps and by a few MiB: it grows when at least so
many steps show it, and by so much in all."""
_HOLDS = 0.2
"""A variable explains a growth when it adds this share of it, or keeps graphs, whose bytes nobody can count."""


def host_growth(e: Evidence) -> Fact | None:
    """That the process's own memory grows from step to step; None: it does not, or nobody can say."""
    trend = e.rss_trend
    if trend is None or not trend.is_leak or trend.steps < HOST_STEPS:
        return None
    if trend.last - trend.first < max(HOST_RISE, HOST_SHARE * trend.first):
        return None
    text = (
        f"the process's own memory grows by {size(trend.slope)} per step "
        f"({size(trend.low)} to {size(trend.high)}, {trend.steps} steps)"
    )
    return Fact(text, "steps", round(trend.slope))


def holder(e: Evidence, *, graph: bool) -> HolderFact | None:
    """The variable that explains the growth, of graphs or of plain results."""
    trend = e.trend if e.trend is not None and e.trend.is_leak else e.rss_trend
    slope = trend.slope if trend is not None and trend.is_leak else 0.0
    for each in e.holders:
        if each.has_graph == graph and (graph or each.bytes_per_step >= max(1.0, _HOLDS * slope)):
            return each
    return None


def holder_fact(found: HolderFact) -> Fact:
    """What it is called, where it lives, and how it grows."""
    if found.owner == "Tensor":
        text = (
            f"`{found.path}` ({found.scope}): its autograd graph grows by {found.per_step:.0f} nodes per step"
        )
    else:
        each = f", {size(found.bytes_per_step)}" if found.bytes_per_step else ""
        text = (
            f"`{found.path}` ({found.owner}, {found.scope}) holds {found.count:,} and grows by {found.per_step:g} per "
            f"step{each}: {found.item}"
        )
    return Fact(text, "holder", found.bytes_per_step or round(found.per_step))


def facts(*items: Fact | None) -> tuple[Fact, ...]:
    """The items that exist."""
    return tuple(item for item in items if item is not None)
