# ruff: noqa: E501  # texts and tables
"""Each rule has a case that only it explains, and a near miss in which it must stay silent."""

import dataclasses
from typing import Any

import pytest

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.evidence import (
    AllocatorFact,
    ExceptionFact,
    FixOutcome,
    GrowthGroup,
    HostFact,
    LintFact,
    LiveGroup,
    ModelFact,
    OomFact,
    ProcessFact,
    RankFact,
    Signal,
    StepRow,
    WhatIf,
    Where,
)
from oomscope.core.diagnosis.message import Frame, OomMessage
from oomscope.core.diagnosis.model import LIKELY, Excluded, Finding, Undecided
from oomscope.core.diagnosis.rules import BUILT_IN, by_id
from oomscope.core.fixes import CATALOGUE
from oomscope.core.series.trend import Trend
from oomscope.units import GIB, MIB

HERE = Where("/home/u/train.py", 61, "main", "losses.append(loss)")


def leak() -> Trend:
    return Trend("leak", 0.1 * GIB, 0.09 * GIB, 0.11 * GIB, 0.999, 40, 10 * GIB, 14 * GIB)


def flat() -> Trend:
    return Trend("flat", 0.0, -1.0, 1.0, 0.0, 40, 10 * GIB, 10 * GIB)


def message(kind: str = "cuda_oom", **fields: Any) -> OomMessage:
    whole = {k: int(v) if isinstance(v, float) else v for k, v in fields.items()}
    backend = "cuda" if kind in ("cuda_oom", "cuda_oom_1eb") else None
    return OomMessage(kind, backend=backend, text=kind, **whole)


def numbers(
    tried: float, capacity: float, free: float, allocated: float, idle: float, **more: Any
) -> OomMessage:
    """A message with sizes in GiB."""
    return message(
        tried_bytes=tried * GIB,
        capacity_bytes=capacity * GIB,
        free_bytes=free * GIB,
        allocated_bytes=allocated * GIB,
        reserved_unallocated_bytes=idle * GIB,
        **more,
    )


def said(*names: str, source: str = "words", strength: float = 0.6) -> tuple[Signal, ...]:
    return tuple(Signal(name, name, source, strength) for name in names)


def lint(rule: str, function: str = "main") -> tuple[LintFact, ...]:
    return (LintFact(rule, dataclasses.replace(HERE, function=function), rule),)


def given(m: OomMessage | None = None, **fields: Any) -> Evidence:
    """Evidence of a message and whatever else."""
    known: dict[str, Any] = {}
    if m is not None:
        known = {"messages": (m,), "message": m, "arithmetic": analyse(m)}
    return Evidence(**{**known, **fields})


def oom(phase: str = "forward", step: int = 3, **fields: Any) -> OomFact:
    base: dict[str, Any] = {
        "step": step, "phase": phase, "device": 0, "requested_bytes": GIB, "device_free_bytes": GIB // 2,
        "allocated_bytes": 22 * GIB, "reserved_bytes": int(22.4 * GIB), "capacity_bytes": 24 * GIB,
    }  # fmt: skip
    return OomFact(**{**base, **fields})


def session(phase: str = "forward", step: int = 3, **fields: Any) -> Evidence:
    """Evidence of one watched rank that ran out of memory."""
    fact = fields.pop("oom", None) or oom(phase, step)
    rank = RankFact(rank=0, capacity_bytes=24 * GIB, oom=fact)
    return Evidence(**{"sources": ("session",), "oom": fact, "rank": rank, "ranks": (rank,), **fields})


def model(parameters: float = 2, gradients: float = 2, optimizer: float = 4, **more: Any) -> ModelFact:
    return ModelFact(int(parameters * GIB), int(gradients * GIB), int(optimizer * GIB), **more)


def group(size: float, category: str = "activation", largest: float = 0.1) -> LiveGroup:
    return LiveGroup(int(size * GIB), 8, category, HERE, HERE, int(largest * GIB))


def growth(stacks: int, *categories: str) -> GrowthGroup:
    return GrowthGroup(4 * GIB, 40, 0.1 * GIB, tuple(range(2, 40)), HERE, HERE, stacks, categories)


def rows(*pairs: tuple[int, float]) -> tuple[StepRow, ...]:
    """(input elements, peak GiB) of consecutive steps."""
    return tuple(StepRow(i, low=GIB, peak=int(p * GIB), input_numel=n) for i, (n, p) in enumerate(pairs))


VARIED = rows((100, 5), (400, 14), (200, 8), (300, 11), (500, 17), (150, 6.5))
FULL = numbers(0.5, 24, 0.1, 22.5, 0.2)
FREE = numbers(1, 24, 12, 10.8, 0.1)
FRAGMENTED = AllocatorFact(
    request=GIB, active=18 * GIB, reserved=22 * GIB, shortfall=-3 * GIB, pending_free=0, stranded=4 * GIB,
    largest_usable=GIB // 2, usable_free=4 * GIB, other_pools_free=0, exact=True,
    what_ifs=(WhatIf("expandable_segments:True", True, 20 * GIB),),
)  # fmt: skip
DP = Frame("/x/torch/nn/parallel/scatter_gather.py", 1, "gather")

#: cause -> (evidence in which it is the first verdict, evidence in which it must not be named)
CASES: dict[str, tuple[Evidence, Evidence]] = {
    "other_process": (
        given(numbers(0.02, 47, 0.015, 2.5, 0.0, this_process_bytes=int(2.8 * GIB), other_processes=((9, 44 * GIB),))),
        given(FULL),
    ),
    "lib_starved": (given(message("nccl_oom", nccl_bytes=608)), given(message("cuda_error_oom"))),
    "masked_oom": (given(message("nvml_assert")), given(FULL)),
    "user_limit": (given(numbers(1, 24, 12, 10.8, 0.1, allowed_bytes=8 * GIB)), given(FREE)),
    "host_commit": (given(message("host_commit")), given(FREE)),
    "limit_or_driver": (given(FREE), given(FULL)),
    "giant_transient": (
        given(numbers(9, 24, 1, 13, 0.5), signals=said("op:loss", source="traceback")),
        given(numbers(2, 24, 1, 21, 0.5)),
    ),
    "optimizer_transient": (
        session("optimizer", 4, signals=said("op:foreach", source="traceback")),
        session("optimizer", 0, signals=said("op:init_state", source="traceback")),
    ),
    "cudnn_workspace": (
        session(signals=said("op:conv", source="traceback"), lint=lint("cudnn-benchmark")),
        session(oom=oom(frames=(Frame("m.py", 3, "forward"),))),
    ),
    "nosync_grads": (session("backward", lint=lint("no-sync")), session("backward", lint=lint("ddp-buckets"))),
    "ddp_buckets": (
        session("backward", lint=lint("ddp-buckets"), model=model(8, 8, 4, ddp=True), signals=said("uses:ddp")),
        session("backward", lint=lint("ddp-buckets"), model=model(0.1, 0.1, 0.2, ddp=True), signals=said("uses:ddp")),
    ),
    "absurd_size": (given(message("cuda_oom_1eb")), given(FULL)),
    "ckpt_full_gather": (
        given(FULL, signals=said("phase:save", "uses:fsdp", source="traceback")),
        given(FULL, signals=said("phase:forward", "uses:fsdp", source="traceback")),
    ),
    "load_duplicate": (
        given(FULL, signals=said("phase:resume", source="traceback"), lint=lint("load-device")),
        given(FULL, signals=said("phase:forward", source="traceback")),
    ),
    "load_on_cuda0": (
        given(
            FULL,
            signals=said("phase:resume", "uses:ranks", source="traceback"),
            processes=(ProcessFact(0, 7, 2 * GIB, rank=1),),
        ),
        given(FULL, signals=said("phase:resume", source="traceback"), processes=(ProcessFact(0, 7, GIB, rank=0),)),
    ),
    "init_before_shard": (
        given(FULL, signals=said("phase:init", "uses:fsdp", source="traceback")),
        given(FULL, signals=said("phase:forward", "uses:fsdp", source="traceback")),
    ),
    "ctx_on_cuda0": (
        given(FULL, processes=tuple(ProcessFact(0, n, GIB // 2, rank=n) for n in (1, 2, 3))),
        given(FULL, processes=(ProcessFact(1, 7, GIB // 2, rank=1),)),
    ),
    "dataparallel_gather": (
        session(lint=lint("data-parallel")),
        session(),
    ),
    "fragmentation": (
        session(allocator=FRAGMENTED),
        session(allocator=dataclasses.replace(FRAGMENTED, shortfall=GIB)),
    ),
    "stream_held": (
        session(allocator=dataclasses.replace(FRAGMENTED, pending_free=3 * GIB, what_ifs=())),
        session(allocator=FRAGMENTED),
    ),
    "allocator_spurious": (
        session(
            allocator=dataclasses.replace(FRAGMENTED, what_ifs=(), usable_free=0, other_pools_free=4 * GIB, stranded=0),
            oom=oom(reserved_bytes=22 * GIB + 400 * MIB, device_free_bytes=0),
        ),
        session(allocator=FRAGMENTED),
    ),
    "capacity_activations": (
        session(model=model(), live=(group(12), group(2, "parameter"))),
        session(model=model(10, 10, 1), live=(group(1),)),
    ),
    "optimizer_state_lazy": (
        session("optimizer", 0, signals=said("op:init_state", source="traceback"), model=model(8, 8, 0)),
        session("optimizer", 5, signals=said("op:foreach", source="traceback")),
    ),
    "capacity_static": (
        session("backward", 1, model=model(8, 8, 5)),
        session("backward", 1, model=model(1, 1, 2)),
    ),
    "longest_batch": (
        Evidence(
            oom=oom(step=6), trend=flat(), model=model(),
            rank=RankFact(rank=0, steps=VARIED), ranks=(RankFact(rank=0, steps=VARIED),),
        ),
        Evidence(oom=oom(step=6), trend=leak(), rank=RankFact(rank=0, steps=VARIED)),
    ),
    "graph_accumulation": (
        session(step=40, trend=leak(), growth=growth(12, "activation"), lint=lint("graph-append")),
        session(step=40, trend=flat()),
    ),
    "container_accumulation": (
        session(step=40, trend=leak(), growth=growth(1, "other"), lint=lint("container-append")),
        session(step=40, trend=leak(), growth=growth(12, "activation")),
    ),
    "benign_plateau": (
        Evidence(signals=said("says:growing", "says:plateau")),
        Evidence(trend=leak(), signals=said("says:growing")),
    ),
    "eval_accumulation": (
        session("eval", lint=lint("container-append", "evaluate")),
        session("forward", lint=lint("container-append", "evaluate")),
    ),
    "eval_no_nograd": (
        session("eval", lint=lint("eval-no-grad", "evaluate")),
        session("forward", lint=lint("eval-no-grad", "evaluate")),
    ),
    "autocast_cache": (
        Evidence(signals=said("phase:eval", "uses:autocast")),
        session("eval", model=model(autocast=False), signals=said("phase:eval")),
    ),
    "ref_cycle": (
        session(trend=Trend("sawtooth", 1, 0, 2, 0.1, 40, GIB, GIB, 8)),
        session(trend=flat()),
    ),
    "exception_holds": (
        session(oom=oom(count=2), lint=lint("caught-oom")),
        session(oom=oom(count=1), lint=lint("caught-oom")),
    ),
    "third_party_hook": (
        session(step=40, trend=leak(), growth=dataclasses.replace(growth(1, "other"), where=None, caller=None)),
        session(step=40, trend=flat()),
    ),
    "framework_leak": (
        Evidence(torch_version="2.10.0+cu128", signals=said("says:growing", "uses:fsdp")),
        Evidence(torch_version="2.8.0", signals=said("says:growing", "uses:fsdp")),
    ),
    "compile_graphs": (
        given(numbers(0.5, 24, 0.1, 22, 0.2, private_pools_bytes=12 * GIB), signals=said("says:not_first")),
        given(numbers(0.5, 24, 0.1, 22, 0.2, private_pools_bytes=GIB // 8)),
    ),
    "fix_ineffective": (
        Evidence(outcomes=(FixOutcome("ckpt", 4 * GIB, GIB // 4, reason="the region is the whole model"),)),
        Evidence(outcomes=(FixOutcome("ckpt", 4 * GIB, 4 * GIB),)),
    ),
    "shard_ineffective": (
        Evidence(signals=said("says:no_effect", "uses:fsdp")),
        Evidence(signals=said("uses:fsdp")),
    ),
    "host_per_rank_load": (
        Evidence(
            ranks=tuple(RankFact(rank=n, peak_rss_bytes=30 * GIB) for n in range(4)),
            messages=(message("elastic_sigkill"),), message=message("elastic_sigkill"),
            host=HostFact(memory_total=128 * GIB),
        ),
        Evidence(
            ranks=tuple(RankFact(rank=n, peak_rss_bytes=3 * GIB) for n in range(4)),
            messages=(message("elastic_sigkill"),), message=message("elastic_sigkill"),
            host=HostFact(memory_total=128 * GIB),
        ),
    ),
    "host_dataloader_cow": (
        Evidence(host=HostFact(worker_bytes=leak()), rss_trend=flat(), message=message("host_kill"), messages=(message("host_kill"),)),
        Evidence(host=HostFact(worker_bytes=flat()), message=message("host_kill"), messages=(message("host_kill"),)),
    ),
    "host_shm": (given(message("shm")), given(message("host_kill"), host=HostFact(shm_total=GIB, shm_free=GIB))),
    "host_cgroup": (given(message("slurm_oom")), given(message("host_kill"))),
    "host_offload": (
        given(message("host_kill"), signals=said("uses:offload", source="source code")),
        given(message("host_kill")),
    ),
}  # fmt: skip


def test_every_rule_has_a_case():
    assert {rule.cause for rule in BUILT_IN} == set(CASES)


@pytest.mark.parametrize("cause", CASES)
def test_the_rule_names_its_case(cause):
    evidence, _ = CASES[cause]
    best = diagnose(evidence).verdict
    assert best is not None
    assert best.rule.cause == cause, [
        (v.rule.cause, v.finding.confidence) for v in diagnose(evidence).verdicts
    ]
    assert best.finding.confidence >= LIKELY
    assert best.finding.explanation
    assert best.finding.evidence


@pytest.mark.parametrize("cause", CASES)
def test_without_the_rule_the_case_is_not_explained(cause, monkeypatch):
    evidence, _ = CASES[cause]
    monkeypatch.setattr(
        "oomscope.core.diagnosis.engine.BUILT_IN", tuple(r for r in BUILT_IN if r.cause != cause)
    )
    best = diagnose(evidence).verdict
    assert best is None or best.rule.cause != cause


@pytest.mark.parametrize("cause", CASES)
def test_the_rule_is_silent_in_a_near_miss(cause):
    _, evidence = CASES[cause]
    rule = by_id(cause)
    assert rule is not None
    answer = rule.test(evidence)
    assert not (isinstance(answer, Finding) and answer.confidence >= LIKELY), answer


@pytest.mark.parametrize("rule", BUILT_IN, ids=lambda rule: rule.cause)
def test_no_rule_stumbles_over_any_evidence(rule):
    everything = [pair for case in CASES.values() for pair in case]
    everything += [
        Evidence(),
        given(message("nccl_other")),
        Evidence(exception=ExceptionFact("X", "y", True)),
    ]
    for evidence in everything:
        answer = rule.test(evidence)
        assert isinstance(answer, (Finding, Excluded, Undecided))
        if isinstance(answer, Finding):
            assert 0 <= answer.confidence <= 1
        if isinstance(answer, Undecided):
            assert answer.missing


def test_ids_are_the_class_with_its_family():
    for rule in BUILT_IN:
        assert (
            rule.id
            == f"{'host' if rule.cause.startswith('host_') and rule.node.startswith('H') else 'oom'}.{rule.cause}"
        )


def test_fixes_are_those_of_the_catalogue():
    known = set(CATALOGUE) if isinstance(CATALOGUE, dict) else {fix.id for fix in CATALOGUE}
    assert {fix for rule in BUILT_IN for fix in rule.fixes} <= known


def test_classes_of_the_collection_have_rules(cases):
    classes = {row["root_cause_class"] for row in cases("reports.jsonl")}
    assert classes <= {rule.cause for rule in BUILT_IN}


def test_an_evaluation_that_records_gradients_is_no_case_of_fragmentation():
    """Enough bytes were free in pieces, but the activations that fill the card are the cause."""
    fact = oom("eval", records_gradients=True)
    found = diagnose(session("eval", oom=fact, allocator=FRAGMENTED, model=model()))
    assert found.verdicts[0].rule.cause == "eval_no_nograd"
    assert found.verdicts[0].finding.confidence > 0.8


def test_a_leak_that_fills_the_card_within_a_few_steps_is_no_lack_of_capacity():
    """Too few steps for a trend; but what outlived three of them is much of what was alive."""
    unclear = Trend("unclear", 0.0, 0.0, 0.0, 0.0, 3, 1.1 * GIB, 2.0 * GIB)
    kept = dataclasses.replace(growth(12, "activation"), bytes=9 * GIB, births=(2, 3, 4))
    found = diagnose(session(step=5, trend=unclear, growth=kept, lint=lint("graph-append"), model=model()))
    assert found.verdicts[0].rule.cause == "graph_accumulation"
    assert all(verdict.rule.cause != "capacity_activations" for verdict in found.verdicts)
    brief = dataclasses.replace(kept, births=(3, 4))
    found = diagnose(session(step=5, trend=unclear, growth=brief, lint=lint("graph-append"), model=model()))
    assert found.verdicts[0].rule.cause == "capacity_activations"


def test_a_leak_explains_why_a_fix_saved_less_than_predicted():
    outcome = FixOutcome("fused-ce", 4 * GIB, GIB)
    rank = RankFact(rank=0, capacity_bytes=24 * GIB)
    found = diagnose(
        Evidence(
            rank=rank,
            ranks=(rank,),
            trend=leak(),
            lint=lint("graph-append"),
            outcomes=(outcome,),
            finished=True,
        )
    )
    assert [verdict.rule.cause for verdict in found.verdicts[:2]] == ["graph_accumulation", "fix_ineffective"]
