"""Memory fixes for DeepSpeed: a configuration with the next ZeRO stage or with offload, made from the user's own."""

from __future__ import annotations

import copy
from typing import Any

from oomscope.core.fixes import Applicable, Fix, How, JobFacts, Plan, Risk
from oomscope.core.fixes.model import Band, no, yes

OFFLOADS = ("optimizer", "param")


def next_configuration(config: dict[str, Any], stage: int, offload: tuple[str, ...] = ()) -> dict[str, Any]:
    """`config` with another ZeRO stage; everything else stays, values "auto" as well.

    Args:
        config: a DeepSpeed configuration.
        stage: 0 to 3.
        offload: "optimizer" (stage 1 and up) and "param" (stage 3): kept in host memory.

    Raises:
        ValueError: no such stage, an offload that the stage does not have, or a stage below the present one.
    """
    zero = dict(config.get("zero_optimization") or {})
    present = zero.get("stage", 0)
    if stage not in range(4):
        raise ValueError(f"ZeRO has stages 0 to 3, not {stage}")
    if isinstance(present, int) and stage < present:
        raise ValueError(
            f"the configuration has stage {present} already: stage {stage} would need more memory"
        )
    if "param" in offload and stage != 3:
        raise ValueError("parameters can be offloaded in stage 3 only")
    if "optimizer" in offload and stage == 0:
        raise ValueError("the optimizer can be offloaded from stage 1 on")
    zero["stage"] = stage
    for each in offload:
        zero.setdefault(f"offload_{each}", {"device": "cpu", "pin_memory": True})
    made = copy.deepcopy(config)
    made["zero_optimization"] = zero
    return made


def bytes_at_rest(
    parameters: int, ranks: int, stage: int, offload: tuple[str, ...] = (), largest: int = 0
) -> int:
    """Bytes that one GPU holds at rest with mixed precision and Adam.

    18 bytes a parameter: 2 of the 16-bit weight, 2 of its gradient, 4 of the float32 copy, 8 of the moments, 2 of
    reduction buffers; the weight itself is spread in stage 3 only.
    Source: DeepSpeed's estimate_zero2_model_states_mem_needs and estimate_zero3_model_states_mem_needs (0.19).

    Args:
        parameters: of the whole model.
        ranks: GPUs.
        stage: ZeRO stage.
        offload: what is kept in host memory.
        largest: parameters of the largest layer, gathered whole in stage 3.
    """
    if stage == 0:
        return 20 * parameters
    if stage == 3:
        gathered = 4 * largest
        if "param" in offload:
            return gathered
        return gathered + (2 * parameters // ranks if "optimizer" in offload else 18 * parameters // ranks)
    if "optimizer" in offload:
        return 2 * parameters
    if stage == 1:
        return 4 * parameters + 16 * parameters // ranks
    return 2 * parameters + 18 * parameters // ranks


def _uses(facts: JobFacts) -> Applicable:
    if "deepspeed" not in facts.frameworks:
        return no("the script does not use DeepSpeed")
    return yes("the script trains through DeepSpeed")


def _several(facts: JobFacts) -> Applicable:
    return no("the job has one rank: there is nobody to share with") if facts.world_size < 2 else _uses(facts)


def _stage3_band(facts: JobFacts) -> Band | None:
    static = facts.static_bytes
    if static is None:
        return None
    saved = int(static * (1 - 1 / facts.world_size))
    return Band(int(0.7 * saved), saved, "states of the other ranks, if the script ran without ZeRO")


def _plan(words: str, **options: Any) -> Plan:
    return Plan(
        runtime={"deepspeed-config": options},
        steps=(
            f"deepspeed.initialize(config=…) as from python -m oomscope_deepspeed ds_config.json {words}",
        ),
    )


#: Fixes for plain scripts that spread or keep the same states in other ways.
_OTHERS = frozenset({"fsdp2", "zero1", "bucket-view", "optim-in-bwd", "optim-8bit"})

FIXES = (
    Fix(
        id="deepspeed-stage2",
        title="DeepSpeed ZeRO stage 2",
        effort_s=600,
        risk=Risk.TOPOLOGY,
        how=(How.RUNTIME, How.LAUNCHER),
        time_factor=1.1,
        conflicts=_OTHERS | {"deepspeed-stage3", "deepspeed-offload"},
        test=_several,
        make=lambda facts: _plan("--stage 2", stage=2),
        verify="losses are equal",
        undo="pass the old configuration",
    ),
    Fix(
        id="deepspeed-stage3",
        title="DeepSpeed ZeRO stage 3",
        effort_s=1800,
        risk=Risk.TOPOLOGY,
        how=(How.RUNTIME, How.LAUNCHER),
        time_factor=1.3,
        conflicts=_OTHERS | {"deepspeed-stage2", "deepspeed-offload"},
        test=_several,
        band=_stage3_band,
        make=lambda facts: _plan("--stage 3", stage=3),
        verify="losses are equal",
        undo="pass the old configuration",
    ),
    Fix(
        id="deepspeed-offload",
        title="DeepSpeed: optimizer state in host memory",
        effort_s=1800,
        risk=Risk.TOPOLOGY,
        how=(How.RUNTIME, How.LAUNCHER),
        time_factor=2.5,
        conflicts=_OTHERS | {"deepspeed-stage2", "deepspeed-stage3"},
        test=_uses,
        make=lambda facts: _plan("--stage 2 --offload optimizer", stage=2, offload=["optimizer"]),
        verify="losses are equal; host memory grows by 16 bytes a parameter",
        undo="pass the old configuration",
    ),
)
