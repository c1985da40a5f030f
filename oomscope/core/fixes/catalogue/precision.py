"""Fixes that compute in 16 bit."""

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

#: First compute capability with bfloat16 arithmetic (Ampere).
_BF16_CAPABILITY = (8, 0)


def _already(facts: JobFacts) -> Applicable | None:
    if facts.autocast:
        return no("already active: the script runs the model under autocast")
    if facts.low_precision_parameters:
        return no("already active: the parameters are 16 bit")
    return None


def _bf16(facts: JobFacts) -> Applicable:
    if facts.compute_capability is not None and facts.compute_capability < _BF16_CAPABILITY:
        return no("the GPU has no bfloat16 arithmetic: use amp-fp16")
    return _already(facts) or yes("no autocast in the script")


def _band(facts: JobFacts) -> Band | None:
    """A quarter to a half of the activations but the logits; 16-bit copies of the weights cost."""
    nothing, saved = no_activations(facts), facts.saved_bytes
    if nothing or saved is None:
        return nothing
    body = max(0, saved - facts.logits_bytes)
    copy = (facts.parameters_bytes or 0) // 2
    return Band(
        body // 4 - copy, body // 2, "25–50 % of the activations but the logits, less 16-bit weight copies"
    )


AMP_BF16 = Fix(
    id="amp-bf16",
    title="Mixed precision: bfloat16 autocast around the model",
    effort_s=300,
    risk=Risk.ROUNDING,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=0.6,
    conflicts=frozenset({"amp-fp16"}),
    test=_bf16,
    band=_band,
    make=lambda facts: Plan(
        runtime={"amp-bf16": {}},
        patch="amp-bf16",
        steps=("bfloat16 autocast around the outermost module, fp32 results",),
    ),
    verify="losses within 1 % of the unfixed run",
)


def _fp16(facts: JobFacts) -> Applicable:
    if facts.scaler:
        return no("already active: the script uses a GradScaler")
    if facts.closure:
        return no(
            "the optimizer calls its closure several times a step, which a gradient scaler cannot split"
        )
    if facts.compute_capability is not None and facts.compute_capability >= _BF16_CAPABILITY:
        return no("the GPU has bfloat16, which needs no gradient scaler: use amp-bf16")
    return _already(facts) or yes("no autocast in the script, and no bfloat16 on the GPU")


AMP_FP16 = Fix(
    id="amp-fp16",
    title="Mixed precision: float16 autocast with a gradient scaler",
    effort_s=600,
    risk=Risk.ROUNDING,
    how=(How.RUNTIME,),
    time_factor=0.6,
    conflicts=frozenset({"amp-bf16", "optim-in-bwd"}),
    test=_fp16,
    band=_band,
    make=lambda facts: Plan(
        runtime={"amp-fp16": {}},
        steps=("float16 autocast, loss scaled in backward, steps with infinite gradients skipped",),
    ),
    verify="losses within 1 % of the unfixed run; few skipped steps",
)

FIXES = (AMP_BF16, AMP_FP16)
