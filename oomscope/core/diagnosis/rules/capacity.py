"""The job simply needs more than the card has.

Activations, static state, the first optimizer step, the longest batch.
"""

from __future__ import annotations

from oomscope.core.diagnosis.evidence import Evidence, Fact, LiveGroup, StepRow
from oomscope.core.diagnosis.message import Frame
from oomscope.core.diagnosis.model import Answer, Excluded, Finding, Rule, Undecided
from oomscope.core.diagnosis.rules import tools as t
from oomscope.core.series.trend import correlation

_FULL_CARD = 0.5
"""What a bare message with a full card is worth: of six public reports that say nothing else, three were activations,
the others the optimizer's state, a save and a resume."""
_LATE_STEP = 5
"""A job that has passed this many steps with the same shapes fits; something has changed."""


def _enough_packing(e: Evidence) -> Excluded | None:
    """Excludes a shortage where the bytes were there and only lay badly."""
    short = e.shortfall
    if short is None or short > 0 or e.tag("defragmentation_minor") or t.need_fact(e) is not None:
        return None
    if e.allocator is None and t.share(e.unallocated, (e.allocated or 0) + (e.unallocated or 0)) < 0.1:
        return None
    return Excluded(t.facts(t.shortfall_fact(e)))


def _activations(e: Evidence) -> Answer:
    if not e.failed:
        return Excluded((Fact("nothing ran out of memory", "run"),))
    excluded = t.not_this_memory(e) or _enough_packing(e)
    if excluded is not None:
        return excluded
    if e.trend is not None and e.trend.kind in ("leak", "sawtooth"):
        return Excluded(t.facts(t.trend_fact(e)))
    if t.piles_up(e) and e.growth is not None:
        return Excluded((t.growth_fact(e.growth),))
    if e.tag("foreign_memory"):
        return Excluded((Fact("much of the device is used outside this process", "message"),))
    if e.phase is not None and e.phase not in t.IN_STEP:
        return Excluded((Fact(f"it failed in phase {e.phase}, not in forward or backward", "phase"),))
    live = t.activations(e)
    if live is None:
        return _activations_by_text(e)
    part = t.share(live, e.allocated)
    evidence = t.facts(
        t.request_fact(e),
        t.shortfall_fact(e),
        t.need_fact(e),
        Fact(
            f"{t.size(live)} of {t.size(e.allocated)} alive are activations ({part:.0%})",
            "model" if e.model is not None else "snapshot",
            live,
        ),
        _static_fact(e),
        t.trend_fact(e),
        *(t.group_fact(group) for group in _top_activations(e)),
    )
    if part < 0.3:
        return Excluded(evidence)
    confidence = 0.92 if part >= 0.5 else 0.75
    if e.model is None:
        confidence -= 0.1  # by the stacks alone
    if e.requested is not None and e.capacity and e.requested >= 0.25 * e.capacity:
        confidence = min(confidence, 0.6)
    top = next((group.where for group in _top_activations(e) if group.where), None)
    return Finding(
        confidence,
        "Parameters, gradients and optimizer state fit; the activations kept for backward do not. They grow with "
        "batch size and sequence length, "
        f"and hold {part:.0%} of what was alive.",
        evidence,
        where=top,
    )


def _top_activations(e: Evidence) -> list[LiveGroup]:
    static = ("parameter", "gradient", "optimizer", "before")
    chosen = [group for group in e.live if group.category in ("activation", "forward")]
    chosen = chosen or [group for group in e.live if group.category not in static]
    return sorted(chosen, key=lambda group: -group.bytes)[:3]


def _static_fact(e: Evidence) -> Fact | None:
    if e.model is None or e.model.static_bytes is None:
        return None
    m = e.model
    return Fact(
        f"parameters {t.size(m.parameters_bytes)}, gradients {t.size(m.gradients_bytes or 0)}, "
        f"optimizer state {t.size(m.optimizer_bytes or 0)}",
        "model",
        m.static_bytes,
    )


def _activations_by_text(e: Evidence) -> Answer:
    """From the message alone: live tensors fill the card.

    What they are cannot be seen, so this stays a likelihood.
    """
    if e.arithmetic is None or not e.arithmetic.tags:
        return Undecided((t.NUMBERS, t.MODEL))
    short = e.tag("short_without_fragmentation") or e.tag("defragmentation_minor")
    if not short or not e.tag("nearly_all_live"):
        return Undecided((t.MODEL, t.SNAPSHOT))
    late = e.signal("says:late")
    if late is not None and t.share(e.allocated, e.capacity) >= 0.9:
        return Finding(
            0.55,
            "The card is almost full of live tensors all the time; a small request more is enough to fail at any "
            "moment.",
            t.facts(t.request_fact(e), t.heard(late), t.shortfall_fact(e)),
            (t.SERIES,),
        )
    if e.signal("says:growing", "says:late", "says:retry", "says:not_first"):
        return Undecided((t.SERIES, t.SNAPSHOT))
    confidence = _FULL_CARD if e.phase is None else 0.68
    if e.tag("giant_request"):
        confidence -= 0.2
    if e.signal("says:batch_one") is not None:
        confidence -= 0.2  # activations follow the batch
    packing = (
        "no packing would have served the request"
        if e.shortfall is None or e.shortfall > 0
        else "perfect packing would have left next to nothing"
    )
    return Finding(
        confidence,
        f"torch's own live tensors fill the card, and {packing}. In forward or backward that is usually the "
        "activations.",
        t.facts(
            t.request_fact(e),
            Fact(
                f"{t.size(e.allocated)} of {t.size(e.capacity)} are live tensors of this process",
                "message",
                e.allocated,
            ),
            t.shortfall_fact(e),
        ),
        (t.MODEL, t.SERIES),
    )


_STATE_LAZY = (
    "The optimizer makes its state in the first step(); until then the job looked smaller than it is. For Adam that "
    "is twice the parameters in their own type."
)


def _state_lazy(e: Evidence) -> Answer:
    if not e.failed:
        if e.oom is None and e.signal("says:second") is not None and e.phase is None:
            return _by_second_iteration(e)
        made = e.signal("op:init_state")
        first = e.signal("says:first") if e.phase == "optimizer" and e.oom is None else None
        told = made if made is not None and e.phase in (None, "optimizer") else first
        if told is not None and told.source == "words" and e.signal("says:foreach") is None:
            return Finding(0.6, _STATE_LAZY, (t.heard(told),), (t.PHASE, t.NUMBERS))
        return Excluded((Fact("nothing ran out of memory", "run"),))
    excluded = t.not_this_memory(e) or _enough_packing(e)
    if excluded is not None:
        return excluded
    in_init = any(f.function in ("_init_group", "_init_state", "init_states") for f in _frames(e))
    if e.phase == "optimizer":
        return _in_first_step(e, in_init)
    if e.phase is None:
        return _by_second_iteration(e)
    if e.step == 1 and e.model is not None and e.model.optimizer_bytes and len(_steps(e)) >= 1:
        state = e.model.optimizer_bytes
        if t.share(e.model.static_bytes, e.allocated) >= 0.5:
            return Finding(
                0.8,
                "The first step passed because Adam's state did not exist yet: it is made in the first "
                "optimizer.step(), and the "
                "second forward meets a card that is fuller by it.",
                t.facts(
                    t.request_fact(e),
                    Fact(f"optimizer state appeared in step 0: {t.size(state)}", "model", state),
                    _static_fact(e),
                ),
            )
    return Excluded((Fact(f"it failed in phase {e.phase}", "phase"),))


def _by_second_iteration(e: Evidence) -> Answer:
    """The first iteration passes, the second fails, nothing is said of growth: what appears between them is state."""
    second = e.signal("says:second")
    if (
        second is None
        or e.signal("says:growing", "says:retry", "says:random", "says:varied_inputs") is not None
    ):
        return Undecided((t.PHASE,))
    return Finding(
        0.6,
        "Between the first and the second iteration the optimizer makes its state; the job needs more from then on.",
        (t.heard(second),),
        (t.PHASE, t.SERIES),
    )


def _in_first_step(e: Evidence, in_init: bool) -> Answer:
    first = e.step == 0 if e.step is not None else e.signal("says:first", "says:first_step") is not None
    late = e.step is not None and e.step >= 1
    if late and not in_init:
        return Excluded((Fact(f"optimizer state exists since step 0; it failed in step {e.step}", "steps"),))
    multi = any(f.function.startswith("_multi_tensor_") for f in _frames(e))
    if multi and not in_init:
        return Excluded(
            (Fact("it failed in the arithmetic of the step, not while making state", "traceback"),)
        )
    confidence = 0.92 if in_init else 0.85 if first else 0.62
    return Finding(
        confidence,
        _STATE_LAZY,
        t.facts(
            t.request_fact(e),
            t.shortfall_fact(e),
            _static_fact(e),
            Fact("it failed inside optimizer.step()", "phase"),
        ),
        () if first or in_init else (t.SERIES,),
    )


def _static(e: Evidence) -> Answer:
    if not e.failed:
        return Excluded((Fact("nothing ran out of memory", "run"),))
    excluded = t.not_this_memory(e) or _enough_packing(e)
    if excluded is not None:
        return excluded
    sharded = e.signal("uses:fsdp", "uses:zero", "uses:deepspeed", "uses:device_map")
    static = e.model.static_bytes if e.model is not None else None
    if static is not None and e.capacity and e.phase in t.IN_STEP:
        part = static / e.capacity
        evidence = t.facts(t.request_fact(e), _static_fact(e), t.shortfall_fact(e))
        if part >= 0.85:
            return Finding(
                0.88,
                f"Parameters, gradients and optimizer state alone take {part:.0%} of the card: nothing is left for "
                "activations. "
                "Only less state per card helps: sharding, a smaller or frozen model, 8-bit state, or a larger card.",
                evidence,
            )
        return Excluded(evidence)
    if e.phase in t.BEFORE_STEP and not sharded:
        if e.tag("foreign_memory"):
            return Excluded((Fact("much of the device is used outside this process", "message"),))
        confidence = 0.8 if e.oom is not None and (e.step or 0) == 0 else 0.4
        return Finding(
            confidence,
            "The model does not even fit while it is moved to the card, before gradients and optimizer state exist.",
            t.facts(t.request_fact(e), _static_fact(e), Fact(f"it failed in phase {e.phase}", "phase")),
        )
    if static is None:
        return Undecided((t.MODEL,))
    return Excluded(t.facts(_static_fact(e)))


def _longest(e: Evidence) -> Answer:
    if not e.failed:
        wide = e.signal("says:wide_range") if e.signal("says:fails") is not None else None
        longest = e.signal("says:longest") or wide
        if longest is not None and e.phase in (None, *t.IN_STEP) and e.signal("says:growing") is None:
            return Finding(
                0.56,
                "The longest batch decides what the job needs.",
                (t.heard(longest),),
                (t.SERIES, t.NUMBERS),
            )
        return Excluded((Fact("nothing ran out of memory", "run"),))
    excluded = t.not_this_memory(e) or _enough_packing(e)
    if excluded is not None:
        return excluded
    if e.trend is not None and e.trend.is_leak:
        return Excluded(t.facts(t.trend_fact(e)))
    # The first step is left out: the optimizer's state appears in it, so that it needs less than its batch tells.
    rows = [row for row in _steps(e) if row.step and row.input_numel and row.peak is not None]
    if len(rows) >= 4:
        return _by_correlation(
            e, [float(r.input_numel or 0) for r in rows], [float(r.peak or 0) for r in rows]
        )
    said = e.signal("says:varied_inputs", "says:longest")
    full = _says_full(e)
    if said is not None and full and e.phase not in ("save", "resume", "load", "init"):
        return Finding(
            0.6,
            "Inputs differ in size and the card is full: the largest batch so far is what fails.",
            t.facts(t.heard(said), t.request_fact(e)),
            (t.SERIES,),
        )
    late = e.signal("says:late")
    if late is not None and full and e.signal("says:growing") is None and e.phase is None:
        return Finding(
            0.52,
            "Thousands of steps passed on a nearly full card, and a small request fails without growth: the longest "
            "sample so "
            "far is the usual reason.",
            t.facts(t.heard(late), t.request_fact(e)),
            (t.SERIES,),
        )
    return Undecided((t.SERIES,))


def _says_full(e: Evidence) -> bool:
    """The card is full of this process's live tensors, or torch says that nearly all of it is in use."""
    if e.tag("nearly_all_live"):
        return True
    used = e.message.this_process_bytes if e.message is not None else None
    return used is not None and t.share(used, e.capacity) >= 0.95 and e.unallocated is None


def _by_correlation(e: Evidence, sizes: list[float], peaks: list[float]) -> Answer:
    spread = max(sizes) / max(1.0, min(sizes))
    rho = correlation(sizes, peaks)
    text = f"peak and input size of {len(sizes)} steps correlate with {rho or 0:.2f}; inputs differ {spread:.1f}-fold"
    evidence = t.facts(Fact(text, "steps", rho), t.request_fact(e), t.shortfall_fact(e), t.trend_fact(e))
    if rho is None or rho < 0.8 or spread < 1.15:
        return Excluded(evidence)
    return Finding(
        0.93 if rho >= 0.9 else 0.85,
        "The memory of a step follows the size of its batch, and the batch that failed is larger than those before: "
        "cap the "
        "length, bucket by it, or set the batch by tokens.",
        evidence,
    )


def _frames(e: Evidence) -> tuple[Frame, ...]:
    if e.oom is not None and e.oom.frames:
        return e.oom.frames
    return e.message.frames if e.message is not None else ()


def _steps(e: Evidence) -> tuple[StepRow, ...]:
    return e.rank.steps if e.rank is not None else ()


RULES = (
    Rule(
        "oom.capacity_activations", "capacity_activations", "activations exceed the card", "Q1.4",
        "model and allocator state, or the complete message", _activations,
        ("microbatch-exact", "ckpt", "sdpa", "amp-bf16", "ckpt-selective", "offload-activations", "fsdp2"),
    ),
    Rule(
        "oom.optimizer_state_lazy", "optimizer_state_lazy", "optimizer state appears in the first step", "Q1.5",
        "phase and step of the failure", _state_lazy, ("optim-8bit", "zero1", "fsdp2", "optim-in-bwd"),
    ),
    Rule(
        "oom.capacity_static", "capacity_static", "model and optimizer do not fit", "Q1.8",
        "bytes of parameters, gradients, optimizer state", _static, ("fsdp2", "zero1", "optim-8bit", "optim-in-bwd"),
    ),
    Rule(
        "oom.longest_batch", "longest_batch", "the longest batch does not fit", "Q2.1",
        "input size and peak of each step", _longest, ("microbatch-exact", "ckpt", "amp-bf16"),
    ),
)  # fmt: skip
