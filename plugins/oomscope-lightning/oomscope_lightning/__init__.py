"""Memory fixes for Lightning, by arguments of its Trainer."""

from __future__ import annotations

from collections.abc import Callable

from oomscope.core.fixes import Applicable, Fix, How, JobFacts, Plan, Risk
from oomscope.core.fixes.model import no, yes

_NAMES = frozenset({"lightning", "pytorch_lightning"})


def _trainer(facts: JobFacts) -> Applicable:
    return (
        yes("the script uses Lightning")
        if facts.frameworks & _NAMES
        else no("the script does not use Lightning")
    )


def _bf16(facts: JobFacts) -> Applicable:
    if facts.autocast or facts.low_precision_parameters:
        return no("already active: the model runs in 16 bit")
    if facts.compute_capability is not None and facts.compute_capability < (8, 0):
        return no("the GPU has no bfloat16 arithmetic")
    return _trainer(facts)


def _fsdp(facts: JobFacts) -> Applicable:
    if facts.world_size < 2:
        return no("the job has one rank: there is nobody to share with")
    if facts.fsdp:
        return no("already active: the model is sharded by FSDP")
    return _trainer(facts)


def _argument(name: str, value: str) -> Callable[[JobFacts], Plan]:
    plan = Plan(runtime={"lightning-arguments": {name: value}}, steps=(f'Trainer({name}="{value}")',))
    return lambda facts: plan


FIXES = (
    Fix(
        id="lightning-bf16",
        title="Lightning's own bfloat16",
        effort_s=10,
        risk=Risk.ROUNDING,
        how=(How.RUNTIME,),
        time_factor=0.6,
        conflicts=frozenset({"amp-bf16", "amp-fp16"}),
        test=_bf16,
        make=_argument("precision", "bf16-mixed"),
        verify="losses within 1 %",
    ),
    Fix(
        id="lightning-fsdp",
        title="Lightning's own FSDP strategy",
        effort_s=600,
        risk=Risk.TOPOLOGY,
        how=(How.RUNTIME,),
        time_factor=1.2,
        conflicts=frozenset({"fsdp2", "zero1", "bucket-view", "microbatch-exact"}),
        test=_fsdp,
        make=_argument("strategy", "fsdp"),
        verify="losses are equal; checkpoints are sharded",
    ),
)
