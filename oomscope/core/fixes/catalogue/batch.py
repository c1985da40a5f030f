"""Fixes of how much goes through the model at a time."""

from __future__ import annotations

from oomscope.core.fixes.model import (
    Applicable,
    Band,
    Fix,
    How,
    JobFacts,
    Knob,
    Plan,
    Risk,
    no,
    no_activations,
    yes,
)

_CHUNKS = 4


def _chunks(facts: JobFacts) -> Applicable:
    if facts.has_batchnorm:
        return no("BatchNorm needs the statistics of the whole batch")
    if facts.fsdp:
        return no(
            "FSDP frees gathered parameters between calls only: chunks inside a call would not free them"
        )
    if facts.batch_size is not None and facts.batch_size < 2:
        return no("the batch has one sample")
    if facts.compiled:
        return no("the model is compiled for the whole batch")
    if not facts.observed:
        return no("the batch is not known (run with --detail)")
    return yes(f"a batch of {facts.batch_size} samples in {min(_CHUNKS, facts.batch_size or _CHUNKS)} parts")


def _chunks_band(facts: JobFacts) -> Band | None:
    nothing, saved = no_activations(facts), facts.saved_bytes
    if nothing or saved is None:
        return nothing
    body = max(0, saved - facts.logits_bytes)
    if not body:
        return Band(0, 0, "no activations of the model are alive at the peak")
    share = 1 - 1 / _CHUNKS
    return Band(
        int(0.6 * body * share),
        int(body * share),
        "60–100 % of three quarters of the activations but the logits",
    )


MICROBATCH = Fix(
    id="microbatch-exact",
    title=f"Run the model in {_CHUNKS} exact micro-batches",
    effort_s=60,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.45,
    conflicts=frozenset({"fused-ce", "fsdp2"}),
    test=_chunks,
    band=_chunks_band,
    make=lambda facts: Plan(
        runtime={"microbatch-exact": {"chunks": _CHUNKS}},
        patch="microbatch-exact",
        steps=(
            f"each forward in {_CHUNKS} parts, computed again part by part in backward; the loss sees the batch",
        ),
    ),
    verify="losses within 1e-5; with dropout other masks of the same distribution",
)


def _knob(facts: JobFacts, kind: str) -> Knob | None:
    return next((knob for knob in facts.knobs if knob.kind == kind), None)


def _longest(knob: Knob) -> str:
    return max(knob.options, key=len)


def _batch_knob(facts: JobFacts) -> Knob | None:
    knob = _knob(facts, "batch_size")
    return knob if knob and isinstance(knob.value, int) and knob.value >= 2 and not knob.is_flag else None


def _accumulate(facts: JobFacts) -> Applicable:
    batch, steps = _batch_knob(facts), _knob(facts, "accumulation")
    if batch is None:
        return no("the script has no option for its batch size")
    if steps is None or not isinstance(steps.value, int):
        return no("the script has no option for gradient accumulation")
    return yes(f"{_longest(batch)} {batch.value} and {_longest(steps)} {steps.value}")


def _accumulate_plan(facts: JobFacts) -> Plan:
    batch, steps = _batch_knob(facts), _knob(facts, "accumulation")
    if batch is None or steps is None:
        return Plan()
    factor = 2 if batch.value % 2 == 0 else 1
    words = (
        _longest(batch),
        str(batch.value // factor),
        _longest(steps),
        str(max(1, int(steps.value or 1)) * factor),
    )
    return Plan(argv=words, steps=(f"{' '.join(words)}: the same samples in each optimizer step",))


ACCUMULATE = Fix(
    id="knob-accumulate",
    title="Half the batch, twice the accumulation, by the script's own options",
    effort_s=10,
    risk=Risk.ROUNDING,
    how=(How.ARGV,),
    time_factor=1.05,
    conflicts=frozenset({"smaller-batch"}),
    test=_accumulate,
    make=_accumulate_plan,
    verify="losses within 1 %: a mean over tokens is weighted otherwise when samples are padded",
    undo="leave the options out",
)


def _smaller(facts: JobFacts) -> Applicable:
    knob = _batch_knob(facts)
    if knob is None:
        return no("the script has no option for its batch size")
    return yes(f"{_longest(knob)} is {knob.value}")


def _smaller_plan(facts: JobFacts) -> Plan:
    knob = _batch_knob(facts)
    if knob is None:
        return Plan()
    words = (_longest(knob), str(knob.value // 2))
    return Plan(
        argv=words, steps=(f"{' '.join(words)}: fewer samples in each optimizer step, another training",)
    )


SMALLER_BATCH = Fix(
    id="smaller-batch",
    title="Half the batch, by the script's own option",
    effort_s=10,
    risk=Risk.SEMANTIC,
    how=(How.ARGV,),
    conflicts=frozenset({"knob-accumulate"}),
    test=_smaller,
    make=_smaller_plan,
    verify="ask: the learning rate may have to follow",
    undo="leave the option out",
)


def _own_checkpointing(facts: JobFacts) -> Applicable:
    knob = _knob(facts, "checkpointing")
    if knob is None or not knob.is_flag:
        return no("the script has no switch for checkpointing")
    if knob.value or facts.checkpointing:
        return no(f"already active: {facts.checkpointing or _longest(knob)}")
    return yes(f"the script has {_longest(knob)}")


def _own_checkpointing_plan(facts: JobFacts) -> Plan:
    knob = _knob(facts, "checkpointing")
    return Plan(argv=(_longest(knob),), steps=(_longest(knob),)) if knob else Plan()


OWN_CHECKPOINTING = Fix(
    id="knob-ckpt",
    title="Activation checkpointing by the script's own switch",
    effort_s=10,
    risk=Risk.EXACT,
    how=(How.ARGV,),
    time_factor=1.33,
    conflicts=frozenset({"ckpt", "ckpt-selective", "ckpt-half", "offload-activations"}),
    test=_own_checkpointing,
    make=_own_checkpointing_plan,
    verify="losses are equal",
    undo="leave the option out",
)

FIXES = (MICROBATCH, OWN_CHECKPOINTING, ACCUMULATE, SMALLER_BATCH)
