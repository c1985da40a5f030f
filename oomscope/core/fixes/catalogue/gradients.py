"""Fixes of what holds gradients and graphs longer than needed."""

from __future__ import annotations

from oomscope.core.fixes.model import Applicable, Band, Fix, How, JobFacts, Plan, Risk, no, yes

_BEFORE_STEP = ("forward", "backward", None)


def _zero(facts: JobFacts) -> Applicable:
    if facts.zero_grad_keeps:
        return yes("zero_grad(set_to_none=False) was called")
    return no("the script frees its gradients already (zero_grad sets them to None by default)")


def _gradients_band(facts: JobFacts) -> Band | None:
    size = facts.gradients_bytes
    if size is None:
        return None
    if facts.peak_phase not in _BEFORE_STEP:
        return Band(0, 0, "the gradients are needed at the peak")
    return Band(int(0.8 * size), size, "80–100 % of the gradients")


ZERO_NONE = Fix(
    id="zero-none",
    title="Free gradients between steps (set_to_none=True)",
    effort_s=60,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    test=_zero,
    band=_gradients_band,
    make=lambda facts: Plan(
        runtime={"zero-none": {}}, patch="zero-none", steps=("zero_grad() sets gradients to None",)
    ),
    verify="losses are equal",
)


def _bucket(facts: JobFacts) -> Applicable:
    if not facts.ddp:
        return no("the model is not wrapped in DistributedDataParallel")
    if facts.bucket_view:
        return no("already active: gradient_as_bucket_view=True")
    return yes("DistributedDataParallel keeps a second copy of the gradients in its buckets")


def _bucket_band(facts: JobFacts) -> Band | None:
    size = facts.gradients_bytes
    return None if size is None else Band(int(0.95 * size), size, "one copy of the gradients")


BUCKET_VIEW = Fix(
    id="bucket-view",
    title="DDP: gradients inside the communication buckets",
    effort_s=60,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    conflicts=frozenset({"fsdp2"}),
    test=_bucket,
    band=_bucket_band,
    make=lambda facts: Plan(
        runtime={"bucket-view": {}},
        patch="bucket-view",
        steps=("DistributedDataParallel(…, gradient_as_bucket_view=True)",),
    ),
    verify="losses are equal",
)


def _evaluation(facts: JobFacts) -> Applicable:
    if facts.eval_with_grad:
        return yes(f"{facts.eval_with_grad} calls of a model in evaluation mode kept a graph")
    if facts.observed:
        return no("no model ran in evaluation mode with gradients enabled")
    return no("whether evaluation keeps a graph is not known (run with --detail)")


EVAL_NO_GRAD = Fix(
    id="eval-no-grad",
    title="Evaluate without a graph (torch.no_grad)",
    effort_s=60,
    risk=Risk.EXACT,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=0.98,
    test=_evaluation,
    make=lambda facts: Plan(
        runtime={"eval-no-grad": {}},
        patch="eval-no-grad",
        steps=("calls of a model in evaluation mode run under torch.no_grad()",),
    ),
    verify="losses are equal",
)

FIXES = (ZERO_NONE, BUCKET_VIEW, EVAL_NO_GRAD)
