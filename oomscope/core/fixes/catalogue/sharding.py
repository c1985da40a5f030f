"""Fixes that spread what a step holds at rest over the ranks."""

from __future__ import annotations

from oomscope.core.fixes.model import Applicable, Band, Fix, How, JobFacts, Plan, Risk, no, yes

#: Sharding is worth its communication when what it spreads is at least this share of the peak (DIAGNOSIS:
#: advice 3).
_STATIC_SHARE = 0.5
#: Before, `fully_shard` was a prototype in another module.
_FIRST_FULLY_SHARD = (2, 6)


def _ranks(facts: JobFacts) -> Applicable | None:
    if facts.world_size < 2:
        return no("the job has one rank: there is nobody to share with")
    if facts.fsdp:
        return no("already active: the model is sharded by FSDP")
    return None


def _zero1(facts: JobFacts) -> Applicable:
    if facts.optimizer not in ("Adam", "AdamW", "SGD", None):
        return no(f"{facts.optimizer} cannot be sharded by ZeroRedundancyOptimizer as it is")
    return _ranks(facts) or yes(f"the optimizer state over {facts.world_size} ranks")


def _zero1_band(facts: JobFacts) -> Band | None:
    if facts.optimizer_bytes is None:
        return None
    size = int(facts.optimizer_bytes * (1 - 1 / facts.world_size))
    return Band(int(0.8 * size), size, "the optimizer state of the other ranks")


ZERO1 = Fix(
    id="zero1",
    title="ZeRO-1: the optimizer state over the ranks",
    effort_s=600,
    risk=Risk.TOPOLOGY,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.1,
    conflicts=frozenset({"fsdp2", "optim-in-bwd", "optim-8bit"}),
    test=_zero1,
    band=_zero1_band,
    make=lambda facts: Plan(
        runtime={"zero1": {}}, patch="zero1", steps=("ZeroRedundancyOptimizer around the optimizer's class",)
    ),
    verify="losses are equal; a checkpoint needs optimizer.consolidate_state_dict()",
)


def _fsdp2(facts: JobFacts) -> Applicable:
    other = _ranks(facts)
    if other is not None:
        return other
    if facts.older_than(_FIRST_FULLY_SHARD):
        return no("torch.distributed.fsdp.fully_shard comes with torch 2.6")
    if not facts.ddp:
        return no("the model is not wrapped in DistributedDataParallel: there is no place to shard it at")
    static, peak = facts.static_bytes, facts.peak_allocated_bytes
    if static is not None and peak and static < _STATIC_SHARE * peak:
        return no(f"parameters, gradients and optimizer state are {static / peak:.0%} of the peak only")
    return yes(f"parameters, gradients and optimizer state over {facts.world_size} ranks")


def _fsdp2_band(facts: JobFacts) -> Band | None:
    if facts.static_bytes is None:
        return None
    size = int(facts.static_bytes * (1 - 1 / facts.world_size))
    gathered = 2 * (facts.largest_parameter_bytes or 0)
    return Band(size - gathered, size, "the share of the other ranks, less two gathered blocks")


FSDP2 = Fix(
    id="fsdp2",
    title="FSDP2 in place of DistributedDataParallel",
    effort_s=1800,
    risk=Risk.TOPOLOGY,
    how=(How.RUNTIME, How.SOURCE),
    time_factor=1.2,
    conflicts=frozenset({"microbatch-exact", "bucket-view", "zero1", "optim-in-bwd"}),
    test=_fsdp2,
    band=_fsdp2_band,
    make=lambda facts: Plan(
        runtime={"fsdp2": {}},
        patch="fsdp2",
        steps=(
            "DistributedDataParallel(model) shards the model; torch.save of it is skipped during the trial",
        ),
    ),
    verify="losses are equal; saving needs get_model_state_dict on every rank",
)


def _zero_config(facts: JobFacts) -> Applicable:
    if "deepspeed" in facts.frameworks:
        return yes("DeepSpeed is imported: a higher ZeRO stage spreads more of the state")
    return no("the script does not use DeepSpeed")


DEEPSPEED = Fix(
    id="deepspeed-zero",
    title="A higher ZeRO stage in the DeepSpeed configuration",
    effort_s=1800,
    risk=Risk.TOPOLOGY,
    how=(How.LAUNCHER,),
    time_factor=1.3,
    test=_zero_config,
    make=lambda facts: Plan(
        steps=(
            "install oomscope-deepspeed: it predicts and tries a higher ZeRO stage, and offload of the optimizer",
        )
    ),
    verify="losses are equal",
    runs=False,
    advice=True,
)

FIXES = (ZERO1, FSDP2, DEEPSPEED)
