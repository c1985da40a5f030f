"""Fixes of the loss over a large vocabulary."""

from __future__ import annotations

from oomscope.core.fixes.model import (
    Applicable,
    Band,
    Fix,
    How,
    JobFacts,
    Plan,
    Risk,
    no,
    no_activations,
    yes,
)

#: Narrower output layers are left alone. Also the default of the run-time side.
_MIN_VOCABULARY = 4096
#: Logits below this share of the peak are not worth a change.
_SHARE = 0.02


def _fused(facts: JobFacts) -> Applicable:
    if not facts.logits_bytes:
        return no(
            "no cross entropy was seen" if facts.observed else "the loss is not known (run with --detail)"
        )
    if facts.vocabulary < _MIN_VOCABULARY:
        return no(f"the cross entropy has {facts.vocabulary} classes only")
    peak = facts.peak_allocated_bytes or 0
    if facts.logits_bytes < _SHARE * peak:
        return no("the logits are a small part of the peak")
    if facts.compiled:
        return no("the model is compiled: torch.compile fuses the loss in its own way")
    return yes(f"logits over {facts.vocabulary} classes, kept several times for the loss and its gradient")


def _band(facts: JobFacts) -> Band | None:
    nothing = no_activations(facts)
    if nothing or not facts.logits_bytes:
        return nothing
    return Band(int(1.7 * facts.logits_bytes), 4 * facts.logits_bytes, "1.7 to 4 times the logits")


FUSED_CE = Fix(
    id="fused-ce",
    title="Cross entropy in chunks, fused with the output layer",
    effort_s=60,
    risk=Risk.ROUNDING,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.05,
    conflicts=frozenset({"microbatch-exact"}),
    test=_fused,
    band=_band,
    make=lambda facts: Plan(
        patch="fused-ce",
        runtime={"fused-ce": {"min_vocabulary": min(_MIN_VOCABULARY, facts.vocabulary or _MIN_VOCABULARY)}},
        steps=("the logits are made in chunks of rows, in the loss and again in its backward",),
    ),
    verify="losses within 1e-5",
)

FIXES = (FUSED_CE,)
