"""The bytes were there and could not be used: fragmentation, blocks held by streams, and pools that do not share."""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, LiveGroup, Missing
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t
from oomscope.units import MIB

_WHOLE_STEP = Missing("what the rest of the first step needs", "oomscope fix SESSION, which simulates it")
_EVALUATION = (
    "Packed better, this request would have fitted; but the evaluation keeps activations that nobody needs."
)
_REPLAY = Missing("the allocator's blocks at the failure, and whether other settings would fit", t.RUN)


def _fragmentation(e: Evidence) -> Answer:
    short = e.shortfall
    if short is None and e.oom is None:
        return _by_words(e)
    if not e.failed:
        return Excluded((Fact("nothing ran out of memory", "run"),))
    excluded = t.not_this_memory(e)
    if excluded is not None:
        return excluded
    if short is None:
        return Undecided((t.NUMBERS, _REPLAY))
    if short > 0:
        return Excluded(t.facts(t.request_fact(e), t.shortfall_fact(e)))
    if e.allocator is not None and e.allocator.what_ifs:
        return _by_replay(e)
    return _by_numbers(e)


def _by_replay(e: Evidence) -> Answer:
    a = e.allocator
    assert a is not None  # the caller checked
    fitting = [w for w in a.what_ifs if w.fits]
    evidence = t.facts(
        t.request_fact(e),
        t.shortfall_fact(e),
        Fact(
            f"free bytes lie in pieces: the largest usable one is {t.size(a.largest_usable)}, "
            f"{t.size(a.stranded)} are stranded beside live blocks",
            "replay",
            a.stranded,
        )
        if a.largest_usable is not None
        else None,
        *(
            Fact(f"the same allocations fit with {w.conf}", "what-if", w.peak_reserved_bytes)
            for w in fitting[:2]
        ),
        Fact("the model reproduced the recorded history exactly", "replay") if a.exact else None,
        *(_pin_fact(pin) for pin in a.pins[:2]),
    )
    if not fitting:
        failed = ", ".join(w.conf for w in a.what_ifs)
        return Excluded((*evidence, Fact(f"the same allocations fail with {failed} as well", "what-if")))
    confidence = 0.95 if a.exact else 0.9
    idle = t.share((a.reserved or 0) - (a.active or 0), a.reserved)
    beyond = t.need_fact(e)
    if beyond is not None:
        return Finding(
            0.35,
            "Packed better, this one request would have fitted, but not what follows it: the whole step needs more "
            "than the card has.",
            t.facts(*evidence, beyond),
            fixes=(),
        )
    recorded = t.recorded_evaluation(e)
    if recorded is not None:
        return Finding(0.4, _EVALUATION, (*evidence, recorded), fixes=())
    missing: tuple[Missing, ...] = ()
    if e.step == 0 and e.phase in ("forward", "backward") and e.packed_need_bytes is None:
        confidence = min(confidence, 0.7)  # the rest of the first step is still to come
        missing = (_WHOLE_STEP,)
    if e.trend is not None and e.trend.is_leak:
        growth = t.trend_fact(e)
        return Finding(
            0.35,
            "Packed better, this one request would have fitted; memory grows all the same, and a step later nothing "
            "would.",
            t.facts(*evidence, growth),
            fixes=(),
        )
    if idle < 0.05:
        confidence = 0.45  # the last straw only
    pin = a.pins[0] if a.pins else None
    return Finding(
        confidence,
        "Enough memory was free, but in pieces that no single request could use. Blocks of changing sizes leave "
        "holes between "
        "live ones, and the cache cannot be given back while a live block sits in each segment.",
        evidence,
        missing,
        fixes=None,
        where=pin.where if pin else None,
    )


def _pin_fact(pin: LiveGroup) -> Fact:
    place = f" {pin.where.place}" if pin.where else " an unknown line"
    text = f"{t.size(pin.bytes)} of free memory are pinned in {pin.count} segments by blocks from{place}"
    return Fact(text, "replay", pin.bytes)


def _by_numbers(e: Evidence) -> Answer:
    """From sizes only: enough bytes lay idle. That is what fragmentation looks like; a replay proves it."""
    idle = e.unallocated or 0
    part = t.share(idle, (e.allocated or 0) + idle)
    evidence = t.facts(
        t.request_fact(e),
        t.shortfall_fact(e),
        Fact(
            f"{t.size(idle)} of torch's cache is idle ({part:.0%})",
            "message" if e.oom is None else "allocator",
            idle,
        ),
    )
    if (e.free or 0) >= (e.requested or 0) > 0:
        return Excluded((*evidence, Fact("the free memory alone was enough", "message")))
    if e.phase in ("save", "resume", "load", "init") and e.oom is None:
        return Finding(
            0.3,
            "Idle cache could have served the request, but the phase itself is the likelier cause.",
            evidence,
        )
    recorded = t.recorded_evaluation(e)
    if recorded is not None:
        return Finding(0.4, _EVALUATION, (*evidence, recorded), fixes=())
    if part < 0.1:
        return Finding(
            0.25,
            "The idle cache could just have served the request, but it is small: removing it only moves the failure "
            "to the next "
            "request.",
            evidence,
            (_REPLAY,),
            fixes=(),
        )
    ceiling = 0.75 if e.oom is not None else 0.65
    confidence = min(ceiling, 0.45 + 0.2 * min(1.0, (part - 0.1) / 0.2) + (0.1 if e.oom is not None else 0.0))
    return Finding(
        confidence,
        "Free memory and idle cache together are larger than the request: it failed because the free bytes lie in "
        "pieces. The "
        "message alone cannot prove it.",
        evidence,
        (_REPLAY,),
    )


def _by_words(e: Evidence) -> Answer:
    cured = e.signal("says:packing_helps")
    if cured is not None and e.phase not in ("save", "resume", "load", "init"):
        return Finding(
            0.65,
            "An allocator setting cures it: the memory was there, in pieces.",
            (t.heard(cured),),
            (_REPLAY,),
        )
    low = e.signal("says:low_share_allocated")
    if low is not None and e.phase not in ("save", "resume", "load", "init"):
        shapes = e.signal("says:varied_inputs", "uses:dynamic_shapes")
        if shapes is not None:
            return Finding(
                0.6,
                "Reserved memory climbs far above what is allocated while shapes change: the cache fills with blocks "
                "of sizes "
                "that do not come again.",
                (t.heard(low), t.heard(shapes)),
                (_REPLAY,),
            )
    return Undecided((t.NUMBERS, _REPLAY))


def _stream_held(e: Evidence) -> Answer:
    a = e.allocator
    if a is not None and a.pending_free is not None:
        evidence = (
            Fact(
                f"{t.size(a.pending_free)} were freed but wait for another stream", "replay", a.pending_free
            ),
        )
        enough = a.pending_free >= (e.requested or 0) > 0
        if a.pending_free > 64 * MIB and enough:
            return Finding(
                0.9,
                "The program has freed enough memory, but the blocks were marked with record_stream() and stay "
                "blocked until that "
                "stream has caught up.",
                evidence,
            )
        return Excluded(evidence)
    said = e.signal("says:record_stream")
    if said is not None:
        return Finding(
            0.8,
            "Blocks recorded on a communication stream are not reusable until it catches up.",
            (t.heard(said),),
        )
    cached = e.signal("says:reserved_stays")
    sharded = e.signal("uses:fsdp", "uses:zero", "uses:deepspeed")
    if cached is not None and sharded is not None and e.phase is None:
        return Finding(
            0.55,
            "Under sharding, prefetched all-gather buffers freed on another stream keep reserved memory high while "
            "allocated "
            "memory falls.",
            (t.heard(cached), t.heard(sharded)),
            (_REPLAY,),
        )
    return Undecided((_REPLAY,))


def _spurious(e: Evidence) -> Answer:
    pool = e.signal("uses:mem_pool")
    default = e.signal("says:default_pool")
    if default is not None and not e.tag("short_without_fragmentation"):
        return Finding(
            0.62,
            "The default pool serves what another pool refuses: a pool of its own does not use what others keep.",
            (t.heard(default),),
            (_REPLAY,),
        )
    a = e.allocator
    again = e.signal("says:spurious")
    if again is not None:
        return Finding(
            0.66,
            "The same request succeeds when it is made again: nothing was missing.",
            (t.heard(again),),
            (_REPLAY,),
        )
    if pool is not None and (e.failed or e.signal("says:fails")):
        return Finding(
            0.85,
            "Inside use_mem_pool() the allocator does not give cached segments back before it gives up, so a request "
            "fails that "
            "the default pool would serve.",
            t.facts(t.heard(pool), t.request_fact(e) if e.requested else None),
        )
    if a is not None and e.requested:
        free = a.other_pools_free or 0
        much = free >= e.requested and free >= 0.1 * (a.reserved or 0)
        if much and (a.shortfall or 0) <= 0 and (a.usable_free or 0) < e.requested:
            return Finding(
                0.75,
                "Enough memory is free, but in pools or on streams that this request may not use.",
                (Fact(f"{t.size(free)} are free in other pools or streams", "replay", free),),
            )
        return Excluded((Fact(f"{t.size(free)} are free in other pools or streams", "replay", free),))
    return Undecided((_REPLAY,))


RULES = (
    Rule(
        "oom.fragmentation", "fragmentation", "free memory lies in unusable pieces", "Q2.2",
        "allocator state at the failure and a what-if replay, or the complete message", _fragmentation,
        ("expandable", "gc-threshold"),
    ),
    Rule(
        "oom.stream_held", "stream_held", "freed blocks wait for another stream", "G0.6",
        "pending-free bytes of the allocator", _stream_held, (),
    ),
    Rule(
        "oom.allocator_spurious", "allocator_spurious", "a pool keeps memory that the request could use", "G0.6",
        "free bytes per pool and stream", _spurious, (),
    ),
)  # fmt: skip
