"""Memory fixes for Hugging Face's Trainer and Accelerate, by the frameworks' own switches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from oomscope.core.fixes import Applicable, Fix, How, JobFacts, Plan, Risk
from oomscope.core.fixes.model import no, yes

#: Built-in fixes that do the same by other means.
_CHECKPOINTING = frozenset({"ckpt", "ckpt-selective", "ckpt-half", "offload-activations", "knob-ckpt"})


def _trainer(facts: JobFacts) -> Applicable:
    return (
        yes("the script uses transformers")
        if "transformers" in facts.frameworks
        else no("no transformers here")
    )


def _checkpointing(facts: JobFacts) -> Applicable:
    if facts.checkpointing:
        return no(f"already active: {facts.checkpointing}")
    return _trainer(facts)


def _half_precision(facts: JobFacts) -> Applicable:
    if facts.autocast or facts.low_precision_parameters:
        return no("already active: the model runs in 16 bit")
    if facts.compute_capability is not None and facts.compute_capability < (8, 0):
        return no("the GPU has no bfloat16 arithmetic")
    return _trainer(facts)


def _accelerate(facts: JobFacts) -> Applicable:
    if "accelerate" not in facts.frameworks:
        return no("the script does not use accelerate")
    if "ACCELERATE_MIXED_PRECISION" in facts.env:
        return no("already active: ACCELERATE_MIXED_PRECISION is set")
    if facts.autocast or facts.low_precision_parameters:
        return no("already active: the model runs in 16 bit")
    return yes("the script uses accelerate")


def _arguments(text: str, **options: Any) -> Callable[[JobFacts], Plan]:
    plan = Plan(runtime={"hf-arguments": options}, steps=(f"TrainingArguments({text})",))
    return lambda facts: plan


FIXES = (
    Fix(
        id="hf-checkpointing",
        title="Transformers' own gradient checkpointing",
        effort_s=10,
        risk=Risk.EXACT,
        how=(How.RUNTIME,),
        time_factor=1.33,
        conflicts=_CHECKPOINTING,
        test=_checkpointing,
        make=_arguments("gradient_checkpointing=True", gradient_checkpointing=True),
        verify="losses are equal",
    ),
    Fix(
        id="hf-accumulate",
        title="Half the batch of a device, twice the accumulation (TrainingArguments)",
        effort_s=10,
        risk=Risk.ROUNDING,
        how=(How.RUNTIME,),
        time_factor=1.05,
        conflicts=frozenset({"knob-accumulate", "smaller-batch"}),
        test=_trainer,
        make=_arguments("per_device_train_batch_size / 2, gradient_accumulation_steps × 2", divide_batch=2),
        verify="losses within 1e-5",
    ),
    Fix(
        id="hf-bf16",
        title="Transformers' own bfloat16",
        effort_s=10,
        risk=Risk.ROUNDING,
        how=(How.RUNTIME,),
        time_factor=0.6,
        conflicts=frozenset({"amp-bf16", "amp-fp16", "accelerate-bf16"}),
        test=_half_precision,
        make=_arguments("bf16=True", bf16=True),
        verify="losses within 1 %",
    ),
    Fix(
        id="hf-adafactor",
        title="Adafactor: second moments by rows and columns",
        effort_s=10,
        risk=Risk.SEMANTIC,
        how=(How.RUNTIME,),
        conflicts=frozenset({"optim-8bit", "optim-fused", "optim-in-bwd"}),
        test=_trainer,
        make=_arguments('optim="adafactor"', optim="adafactor"),
        verify="ask: compare the loss over a longer run",
    ),
    Fix(
        id="accelerate-bf16",
        title="Accelerate's own bfloat16",
        effort_s=10,
        risk=Risk.ROUNDING,
        how=(How.ENV,),
        time_factor=0.6,
        conflicts=frozenset({"amp-bf16", "amp-fp16", "hf-bf16"}),
        test=_accelerate,
        make=lambda facts: Plan(
            env={"ACCELERATE_MIXED_PRECISION": "bf16"}, steps=("ACCELERATE_MIXED_PRECISION=bf16",)
        ),
        verify="losses within 1 %",
        undo="unset the variable",
    ),
)
