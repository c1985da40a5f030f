"""Fixes of the caching allocator: they change where bytes lie, never what is computed."""

from __future__ import annotations

from oomscope.core.fixes.environment import current_settings, why_not_expandable
from oomscope.core.fixes.model import Applicable, Band, Fix, How, JobFacts, Plan, Risk, no, yes
from oomscope.units import format_bytes

#: First release whose allocator settings take per_process_memory_fraction, without which no block is
#: collected.
_FRACTION_SETTING = (2, 10)

#: Below this share of the reserved bytes, unused cached memory is not what filled the card.
_UNUSED_SHARE = 0.05


def _expandable(facts: JobFacts) -> Applicable:
    reason = why_not_expandable(facts.env, facts.alloc_conf, facts.platform)
    if reason:
        return no(reason)
    unused = _unused_at_oom(facts)
    if unused is None:
        return yes()
    requested, free = facts.requested_bytes or 0, facts.device_free_bytes or 0
    if unused + free < requested and "oom.fragmentation" not in facts.rules:
        return no(
            f"only {format_bytes(unused + free)} were free or cached when {format_bytes(requested)} were "
            "asked for: no allocator setting can find more"
        )
    return yes(f"{format_bytes(unused)} were cached but not in use")


def _unused_at_oom(facts: JobFacts) -> int | None:
    if facts.oom_reserved_bytes is None or facts.oom_allocated_bytes is None:
        return None
    return facts.oom_reserved_bytes - facts.oom_allocated_bytes


def _expandable_band(facts: JobFacts) -> Band | None:
    unused = _unused_at_oom(facts)
    if unused is None:
        return None
    return Band(int(0.6 * unused), unused, "60–100 % of the bytes cached and unused at the failure")


def _settings(settings: str) -> Plan:
    return Plan(env={"PYTORCH_CUDA_ALLOC_CONF": settings}, steps=(f"allocator setting {settings}",))


EXPANDABLE = Fix(
    id="expandable",
    title="Expandable segments in the allocator",
    effort_s=10,
    risk=Risk.NONE,
    how=(How.ENV,),
    conflicts=frozenset({"gc-threshold"}),
    test=_expandable,
    band=_expandable_band,
    make=lambda facts: _settings("expandable_segments:True"),
    verify="the allocator reports expandable_segments; losses are equal",
    undo="unset the variable",
    runs=False,
)


def _gc_threshold(facts: JobFacts) -> Applicable:
    settings = current_settings(facts.env, facts.alloc_conf)
    if "garbage_collection_threshold" in settings:
        return no(f"already active: garbage_collection_threshold:{settings['garbage_collection_threshold']}")
    if settings.get("backend", "native").lower() == "cudamallocasync":
        return no("the job uses backend:cudaMallocAsync, which ignores garbage_collection_threshold")
    if "expandable_segments" in settings:
        return no("expandable segments give unused pages back already")
    if (0, 0) != facts.torch_version < _FRACTION_SETTING:
        return no("it works only with a memory fraction, whose allocator setting needs torch 2.10")
    unused, reserved = _unused_at_oom(facts), facts.oom_reserved_bytes
    if unused is not None and reserved and unused < _UNUSED_SHARE * reserved:
        return no(f"only {format_bytes(unused)} of the reserved bytes were unused")
    return yes()


GC_THRESHOLD = Fix(
    id="gc-threshold",
    title="Free old cached blocks early (garbage_collection_threshold:0.8)",
    effort_s=10,
    risk=Risk.NONE,
    how=(How.ENV,),
    time_factor=1.02,
    conflicts=frozenset({"expandable"}),
    test=_gc_threshold,
    make=lambda facts: _settings("garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"),
    verify="losses are equal",
    undo="unset the variable",
    runs=False,
)


def _empty_cache(facts: JobFacts) -> Applicable:
    if facts.empty_cache_calls:
        return yes(
            f"the script calls torch.cuda.empty_cache() {facts.empty_cache_calls} times: it never lowers the peak of "
            "live tensors, and in a loop it costs time (65 s against 45 s an epoch were measured); keep it between "
            "phases only"
        )
    return no("the allocator gives cached memory back by itself before it fails; a call would not help here")


EMPTY_CACHE = Fix(
    id="empty-cache",
    title="torch.cuda.empty_cache(): where it helps, and where it only costs",
    effort_s=60,
    risk=Risk.NONE,
    how=(),
    test=_empty_cache,
    make=lambda facts: Plan(
        steps=(
            "call it between phases (before an evaluation, before another process needs the card), never in a loop",
        )
    ),
    verify="reserved bytes between phases",
    runs=False,
    advice=True,
)

FIXES = (EXPANDABLE, GC_THRESHOLD, EMPTY_CACHE)
