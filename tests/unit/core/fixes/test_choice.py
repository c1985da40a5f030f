"""Which plan is taken without asking."""

from __future__ import annotations

from typing import Any

from oomscope.core.fixes import JobFacts
from oomscope.core.fixes.choice import choose
from oomscope.core.fixes.model import Risk
from oomscope.core.fixes.prediction import Outcome, outlook

RISKS = {"ckpt": "exact", "amp-bf16": "rounding", "optim-8bit": "semantic", "zero1": "topology"}
GIB = 1 << 30


def predictions(*plans: tuple[str, ...], recommended: list[str] | None) -> dict[str, Any]:
    return {
        "fixes": [{"id": fix, "risk": risk} for fix, risk in RISKS.items()],
        "plans": [{"fixes": list(plan), "fits": True, "predicted": {"tight": False}} for plan in plans],
        "recommended": recommended,
    }


def test_the_recommended_plan_comes_first():
    made = predictions(("ckpt",), ("amp-bf16",), recommended=["amp-bf16"])
    assert choose(made, Risk.ROUNDING).fixes == ("amp-bf16",)


def test_a_stricter_risk_takes_the_next_plan_that_fits():
    made = predictions(("amp-bf16",), ("ckpt",), recommended=["amp-bf16"])
    assert choose(made, Risk.EXACT).fixes == ("ckpt",)


def test_a_risky_plan_is_taken_when_it_is_allowed_and_nothing_else_fits():
    made = predictions(("ckpt", "optim-8bit"), ("zero1",), recommended=None)
    refused = choose(made, Risk.ROUNDING)
    assert refused.fixes == ()
    assert (
        refused.why_none == "optim-8bit would help, but the risk is semantic: allow it with --risk semantic"
    )
    assert choose(made, Risk.SEMANTIC).fixes == ("ckpt", "optim-8bit")
    assert choose(made, Risk.TOPOLOGY).fixes == ("ckpt", "optim-8bit")


def test_tight_plans_come_last():
    made = predictions(("ckpt",), ("amp-bf16",), recommended=None)
    made["plans"][0]["predicted"]["tight"] = True
    assert choose(made, Risk.ROUNDING).fixes == ("amp-bf16",)


def test_what_is_active_is_not_repeated():
    made = predictions(("ckpt",), recommended=["ckpt"])
    assert "active already" in choose(made, Risk.ROUNDING, active=("ckpt",)).why_none


def test_when_nothing_fits_that_is_said():
    assert choose(predictions(recommended=None), Risk.ROUNDING).why_none.startswith("no fix is predicted")


def test_the_outlook_names_the_best_the_floor_and_what_would_do():
    baseline = Outcome((), peak_reserved_bytes=20 * GIB, fits=False)
    reached = [
        Outcome(("ckpt",), peak_reserved_bytes=12 * GIB, fits=False),
        Outcome(("optim-fused",), peak_reserved_bytes=19 * GIB, fits=False),
    ]
    facts = JobFacts(parameters_bytes=2 * GIB, gradients_bytes=2 * GIB, optimizer_bytes=4 * GIB)
    text = outlook(baseline, reached, facts, 10 * GIB) or ""
    assert "lowest: 12.00 GiB by ckpt" in text
    assert "optimizer state take 8.00 GiB" in text
    assert "a card with 12.00 GiB free" in text
    below = outlook(baseline, reached, facts, 6 * GIB) or ""
    assert "only sharding over more GPUs" in below
    fitting = [Outcome(("ckpt",), peak_reserved_bytes=5 * GIB, fits=True)]
    assert outlook(baseline, fitting, facts, 6 * GIB) is None
    assert outlook(baseline, [Outcome(("ckpt",), peak_reserved_bytes=5, fits=None)], facts, 6) is None
