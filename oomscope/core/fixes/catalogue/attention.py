"""Attention without the matrix of weights."""

from __future__ import annotations

from oomscope.core.fixes.model import Applicable, Fix, How, JobFacts, Plan, Risk, no, yes

#: The release whose `scaled_dot_product_attention` takes a scale.
_FIRST_TORCH = (2, 1)


def _written_out(facts: JobFacts) -> Applicable:
    if facts.older_than(_FIRST_TORCH):
        return no("scaled_dot_product_attention takes a scale from torch 2.1 on")
    return yes("attention is written out: each layer keeps sequence × sequence weights for backward")


SDPA = Fix(
    id="sdpa",
    title="Fused attention: no matrix of sequence × sequence is kept",
    effort_s=180,
    risk=Risk.ROUNDING,
    how=(How.SOURCE,),
    time_factor=0.8,
    test=_written_out,
    make=lambda facts: Plan(
        patch="sdpa",
        steps=(
            "scaled_dot_product_attention(q, k, v, …) in place of softmax(q @ kᵀ) @ v; "
            "need_weights=False where a layer's weights are not read",
        ),
    ),
    verify="losses within rounding",
    undo="git apply -R, or oomscope fix --undo",
)

FIXES = (SDPA,)
