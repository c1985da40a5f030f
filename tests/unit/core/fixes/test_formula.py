"""The lowest rung: single fixes judged by bands, and nothing said about what was not recorded."""

from __future__ import annotations

from oomscope.core.fixes import CATALOGUE, JobFacts
from oomscope.core.fixes.formula import by_formula
from oomscope.core.fixes.prediction import effect

FIXES = {fix.id: fix for fix in CATALOGUE}
GIB = 1 << 30


def failed(**changes: object) -> JobFacts:
    values: dict[str, object] = {
        "torch_version": (2, 8),
        "oom_step": 3,
        "oom_reserved_bytes": 20 * GIB,
        "oom_allocated_bytes": 14 * GIB,
        "requested_bytes": GIB,
        "device_free_bytes": GIB // 2,
        "rules": ("oom.fragmentation",),
        "gradients_bytes": 4 * GIB,
        "parameters_bytes": 4 * GIB,
        "optimizer_bytes": 4 * GIB,
        "ddp": True,
        "world_size": 2,
        "optimizer": "AdamW",
        "peak_phase": "backward",
    }
    return JobFacts(**{**values, **changes})  # type: ignore[arg-type]


def test_the_job_needs_at_least_what_it_had_and_what_it_asked_for():
    baseline, _, _ = by_formula(failed(), FIXES, 20 * GIB)
    assert baseline.peak_reserved_bytes == 21 * GIB
    assert baseline.fits is False


def test_a_single_fix_that_fits_is_recommended_the_harmless_one_first():
    _, outcomes, found = by_formula(failed(), FIXES, int(20.5 * GIB))
    assert outcomes[("expandable",)].fits is True
    assert found.recommended is not None
    assert found.recommended.fixes == ("expandable",)
    assert ("zero1",) in [plan.fixes for plan in found.plans]


def test_after_a_failure_in_the_first_step_nothing_is_said_to_fit():
    _, outcomes, found = by_formula(failed(oom_step=0), FIXES, int(20.5 * GIB))
    assert True not in {each.fits for each in outcomes.values()}
    assert found.recommended is None


def test_risky_fixes_are_plans_but_not_recommended():
    _, _, found = by_formula(
        failed(rules=(), oom_allocated_bytes=20 * GIB, bucket_view=True), FIXES, 20 * GIB
    )
    assert found.recommended is None
    assert {plan.fixes for plan in found.plans} <= {("zero1",), ("fsdp2",), ("optim-8bit",)}
    assert found.plans


def test_the_reason_of_a_useless_fix_is_its_formula():
    facts = failed(peak_phase="optimizer")
    baseline, outcomes, _ = by_formula(facts, FIXES, 20 * GIB)
    found = effect(baseline, outcomes[("ckpt",)], facts, (FIXES["ckpt"],))
    assert found.effective is False
    assert found.why_ineffective == "the peak is in the optimizer step, where no activation is alive"


def test_without_a_figure_of_the_failure_there_is_none_for_the_fixes():
    baseline, outcomes, found = by_formula(JobFacts(), FIXES, 20 * GIB)
    assert (baseline.peak_reserved_bytes, outcomes, found.plans) == (None, {}, ())
