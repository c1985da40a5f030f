"""Fixes of the optimizer's step and state."""

from __future__ import annotations

from oomscope.core.fixes.model import Applicable, Band, Fix, How, JobFacts, Plan, Risk, no, yes

_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
_ADAM = ("Adam", "AdamW")


def _fused(facts: JobFacts) -> Applicable:
    if facts.optimizer not in _FUSED:
        return no(f"{facts.optimizer or 'the optimizer'} has no fused implementation")
    if facts.optimizer_fused:
        return no("already active: fused=True")
    if facts.optimizer_foreach is False:
        return no("the script asked for the single-tensor implementation, which has no large temporaries")
    return yes("the foreach implementation makes temporaries of the size of all parameters")


def _fused_band(facts: JobFacts) -> Band | None:
    size = facts.parameters_bytes
    if size is None:
        return None
    if facts.peak_phase != "optimizer":
        return Band(0, 0, "the peak is not in the optimizer step")
    return Band(int(0.9 * size), size, "temporaries of the size of the parameters")


FUSED = Fix(
    id="optim-fused",
    title="Fused optimizer step, without temporaries",
    effort_s=60,
    risk=Risk.ROUNDING,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=0.98,
    conflicts=frozenset({"optim-in-bwd", "optim-8bit"}),
    test=_fused,
    band=_fused_band,
    make=lambda facts: Plan(
        runtime={"optim-fused": {}},
        patch="optim-fused",
        steps=(f"{facts.optimizer or 'the optimizer'}(fused=True)",),
    ),
    verify="losses within 1e-5",
)


def _in_backward(facts: JobFacts) -> Applicable:
    blockers = {
        "the gradients are clipped, which needs all of them at once": facts.clips,
        "gradients are accumulated over several backward passes": facts.accumulation > 1,
        "a GradScaler decides about the step after backward": facts.scaler,
        "the optimizer calls its closure several times a step": facts.closure,
        "DistributedDataParallel or FSDP reduces the gradients after they are made": facts.ddp or facts.fsdp,
    }
    for reason, found in blockers.items():
        if found:
            return no(reason)
    if not facts.observed:
        return no("clipping and accumulation are not known (run with --detail)")
    return yes("no clipping, no accumulation, no scaler")


def _in_backward_band(facts: JobFacts) -> Band | None:
    if facts.gradients_bytes is None:
        return None
    size = facts.gradients_bytes - (facts.largest_parameter_bytes or 0)
    if facts.peak_phase == "forward":
        return Band(0, size, "gradients live from one backward to the next zero_grad")
    return Band(int(0.5 * size), size, "all gradients but the largest")


IN_BACKWARD = Fix(
    id="optim-in-bwd",
    title="Step each parameter inside backward and free its gradient",
    effort_s=300,
    risk=Risk.EXACT,
    how=(How.RUNTIME,),
    conflicts=frozenset({"optim-fused", "optim-8bit", "fsdp2", "zero1", "amp-fp16"}),
    test=_in_backward,
    band=_in_backward_band,
    make=lambda facts: Plan(
        runtime={"optim-in-bwd": {}},
        steps=("one optimizer for each parameter, stepped as its gradient is complete",),
    ),
    verify="losses are equal; the optimizer's state_dict is split over the parameters",
)


def _eight_bit(facts: JobFacts) -> Applicable:
    if facts.optimizer not in _ADAM:
        return no(
            f"only Adam and AdamW have 8-bit twins; the script uses {facts.optimizer or 'another optimizer'}"
        )
    if facts.observed and not facts.eight_bit_library:
        return no("neither torchao nor bitsandbytes is installed")
    return yes("two float32 states of each parameter become 8 bit")


def _eight_bit_band(facts: JobFacts) -> Band | None:
    size = facts.optimizer_bytes
    return None if not size else Band(int(0.70 * size), int(0.76 * size), "70–76 % of the optimizer state")


EIGHT_BIT = Fix(
    id="optim-8bit",
    title="8-bit Adam states",
    effort_s=300,
    risk=Risk.SEMANTIC,
    how=(How.RUNTIME,),
    conflicts=frozenset({"optim-fused", "optim-in-bwd", "zero1"}),
    test=_eight_bit,
    band=_eight_bit_band,
    make=lambda facts: Plan(
        runtime={"optim-8bit": {}}, steps=("torchao's or bitsandbytes' 8-bit optimizer",)
    ),
    verify="ask: compare the loss over a longer run",
)

FIXES = (FUSED, IN_BACKWARD, EIGHT_BIT)
