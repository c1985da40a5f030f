# ruff: noqa: E501  # texts and tables
"""The rules of advice: what must never be offered."""

import pytest

from oomscope.core.diagnosis import Evidence, diagnose
from oomscope.core.diagnosis.advice import choose_fixes, reason_against
from oomscope.core.diagnosis.arithmetic import analyse
from oomscope.core.diagnosis.evidence import (
    ExceptionFact,
    FixOutcome,
    ModelFact,
    OomFact,
    RankFact,
    Settings,
    Signal,
)
from oomscope.core.diagnosis.message import OomMessage
from oomscope.core.diagnosis.model import Finding
from oomscope.core.diagnosis.rules import by_id
from oomscope.units import GIB


def evidence(short: bool, **fields: object) -> Evidence:
    oom = OomFact(
        step=3, phase="forward", requested_bytes=4 * GIB, device_free_bytes=GIB,
        allocated_bytes=(20 if short else 14) * GIB, reserved_bytes=22 * GIB, capacity_bytes=24 * GIB,
    )  # fmt: skip
    ranks = tuple(RankFact(rank=n) for n in range(2))
    return Evidence(**{"oom": oom, "ranks": ranks, **fields})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("fix", "known"),
    [
        ("expandable", {"settings": Settings(expandable=True)}),
        ("expandable", {"signals": (Signal("on:expandable", "on", "source code"),)}),
        ("max-split", {"settings": Settings(max_split=True)}),
        ("max-split", {"settings": Settings(expandable=True)}),
        ("gc-threshold", {"settings": Settings(gc_threshold=True)}),
        ("amp-bf16", {"model": ModelFact(autocast=True)}),
        ("ckpt", {"signals": (Signal("on:checkpointing", "on", "source code"),)}),
        ("ckpt", {"outcomes": (FixOutcome("ckpt", GIB, GIB),)}),
    ],
)
def test_never_what_is_already_on(fix, known):
    assert reason_against(evidence(short=False, **known), fix) is not None
    assert reason_against(evidence(short=False), fix) is None


@pytest.mark.parametrize("fix", ["expandable", "gc-threshold", "max-split"])
def test_never_allocator_settings_when_packing_cannot_help(fix):
    assert reason_against(evidence(short=True), fix) == "even perfect packing would not have been enough"
    assert reason_against(evidence(short=False), fix) is None


@pytest.mark.parametrize(
    ("known", "word"),
    [
        ({"model": ModelFact(2 * GIB, 2 * GIB, 4 * GIB)}, "at most half"),
        ({"signals": (Signal("uses:fsdp", "FSDP", "source code"),)}, "sharded already"),
        ({"ranks": (RankFact(rank=0),)}, "one rank"),
    ],
)
@pytest.mark.parametrize("fix", ["fsdp2", "zero1"])
def test_never_sharding_that_cannot_help(fix, known, word):
    assert word in (reason_against(evidence(short=True, **known), fix) or "")


@pytest.mark.parametrize("fix", ["fsdp2", "zero1"])
def test_sharding_where_static_state_dominates(fix):
    assert reason_against(evidence(short=True, model=ModelFact(6 * GIB, 6 * GIB, 6 * GIB)), fix) is None


def test_fixes_that_keep_results_come_before_those_that_round():
    rule = by_id("capacity_activations")
    assert rule is not None
    chosen = choose_fixes(evidence(short=True), rule, Finding(0.9, "x"))
    assert chosen.index("microbatch-exact") < chosen.index("amp-bf16")
    assert chosen.index("ckpt") < chosen.index("amp-bf16")


def test_a_finding_may_offer_nothing():
    rule = by_id("fragmentation")
    assert rule is not None
    assert choose_fixes(evidence(short=False), rule, Finding(0.3, "x", fixes=())) == ()


def hinted(allocated: float, idle: float, **fields: object) -> Evidence:
    m = OomMessage(
        "cuda_oom", backend="cuda", tried_bytes=2 * GIB, capacity_bytes=24 * GIB, free_bytes=GIB // 2,
        allocated_bytes=int(allocated * GIB), reserved_unallocated_bytes=int(idle * GIB), conf_var="PYTORCH_CUDA_ALLOC_CONF",
    )  # fmt: skip
    return Evidence(**{"messages": (m,), "message": m, "arithmetic": analyse(m), **fields})  # type: ignore[arg-type]


def test_the_hint_of_torch_is_corrected():
    assert "does not apply" in diagnose(hinted(22, 0.5)).advice[0]
    assert diagnose(hinted(18, 4)).advice == ()
    on = diagnose(hinted(18, 4, settings=Settings(expandable=True)))
    assert "already on" in on.advice[0]
    assert "expandable" not in on.verdicts[0].fixes


def test_the_hint_is_corrected_for_a_watched_job_too():
    e = evidence(short=True, exception=ExceptionFact("torch.OutOfMemoryError", "CUDA out of memory", True))
    assert "does not apply" in diagnose(e).advice[0]


def test_insufficient_evidence_is_said():
    d = diagnose(Evidence(messages=(OomMessage("cuda_error_oom"),), message=OomMessage("cuda_error_oom")))
    best = d.verdict
    assert best is not None
    assert best.rule.cause == "unknown"
    assert best.fixes == ()
    assert best.finding.missing
    assert all(gap.capture for gap in best.finding.missing)


def test_a_message_alone_reminds_of_growth():
    d = diagnose(hinted(22.5, 0.1))
    assert d.verdict is not None
    assert d.verdict.rule.cause == "capacity_activations"
    assert any("growth" in sentence for sentence in d.advice)
