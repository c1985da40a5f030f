"""Every entry of the catalogue: complete, consistent, and never offered when it is active already."""

import dataclasses

import pytest

from oomscope.core.fixes import CATALOGUE, get, known_ids
from oomscope.core.fixes.environment import OLD_NAME
from oomscope.core.fixes.model import BlockGroup, How, JobFacts, Knob, Risk
from oomscope.core.fixes.patches import PATCHES
from oomscope.core.fixes.prediction import Outcome, calibration, effect, floor_sentence, interval
from oomscope.errors import FixError

GIB = 1 << 30
JOB = JobFacts(
    torch_version=(2, 13),
    world_size=4,
    compute_capability=(8, 0),
    capacity_bytes=40 * GIB,
    peak_allocated_bytes=60 * GIB,
    peak_phase="backward",
    composition={"activation": 40 * GIB},
    parameters_bytes=8 * GIB,
    gradients_bytes=8 * GIB,
    optimizer_bytes=16 * GIB,
    largest_parameter_bytes=GIB,
    root_class="GPT",
    block_groups=(BlockGroup("Block", 24, "blocks", GIB, GIB // 20),),
    optimizer="AdamW",
    logits_bytes=5 * GIB,
    vocabulary=50304,
    batch_size=16,
    ddp=True,
    observed=True,
    eight_bit_library=True,
    zero_grad_keeps=True,
    eval_with_grad=3,
    batch_varies=True,
    rules=("oom.graph_accumulation",),
    where=("train.py", 20),
    knobs=(
        Knob("batch_size", ("--batch-size",), 16, False),
        Knob("accumulation", ("--grad-accum",), 1, False),
        Knob("checkpointing", ("--gradient-checkpointing",), False, True),
    ),
)

#: What makes a fix active already, and the fixes it refuses.
ACTIVE = [
    (
        {"checkpointing": "model.gradient_checkpointing is True"},
        ("ckpt", "ckpt-selective", "ckpt-half", "knob-ckpt"),
    ),
    ({"autocast": True}, ("amp-bf16",)),
    ({"low_precision_parameters": True}, ("amp-bf16",)),
    ({"bucket_view": True}, ("bucket-view",)),
    ({"optimizer_fused": True}, ("optim-fused",)),
    ({"fsdp": True}, ("fsdp2", "zero1", "microbatch-exact")),
    ({"zero_grad_keeps": False}, ("zero-none",)),
    ({"env": {OLD_NAME: "expandable_segments:True"}}, ("expandable", "gc-threshold")),
    ({"block_groups": ()}, ("ckpt", "ckpt-selective", "ckpt-half", "offload-activations")),
    ({"clips": True}, ("optim-in-bwd",)),
    ({"accumulation": 4}, ("optim-in-bwd",)),
    ({"has_batchnorm": True}, ("microbatch-exact",)),
    ({"compute_capability": (7, 5)}, ("amp-bf16",)),
    ({"world_size": 1}, ("fsdp2", "zero1")),
    ({"parameters_bytes": GIB, "gradients_bytes": GIB, "optimizer_bytes": GIB}, ("fsdp2",)),
    ({"logits_bytes": GIB // 10}, ("fused-ce",)),
    ({"eval_with_grad": 0}, ("eval-no-grad",)),
    ({"rules": ("oom.graph_accumulation",)}, ("load-cpu",)),
    ({"torch_version": (2, 0)}, ("sdpa", "fsdp2")),
    ({"torch_version": (2, 5)}, ("fsdp2",)),
    ({"torch_version": (2, 4)}, ("ckpt-selective",)),
]


@pytest.mark.parametrize("fix", CATALOGUE, ids=lambda fix: fix.id)
def test_an_entry_is_complete(fix):
    assert fix.title
    assert fix.verify
    assert fix.undo
    assert fix.effort_s > 0
    assert fix.conflicts <= set(known_ids())
    assert all(fix.id in get(other).conflicts for other in fix.conflicts), "conflicts must be mutual"
    answer = fix.applicable(JOB)
    assert answer.ok or answer.why
    plan = fix.plan(JOB)
    assert plan.steps, "a preview needs a sentence"
    if plan.patch:
        assert plan.patch in PATCHES
    if fix.advice:
        assert not plan.env
        assert not plan.runtime
    band = fix.band(JOB)
    assert band is None or band.low <= band.high


@pytest.mark.parametrize(("change", "refused"), ACTIVE, ids=lambda value: str(value)[:40])
def test_what_is_active_or_cannot_apply_is_refused_with_a_reason(change, refused):
    facts = dataclasses.replace(JOB, **change)
    for each in refused:
        answer = get(each).applicable(facts)
        assert not answer.ok, each
        assert answer.why


def test_ids_are_unique_and_the_nearest_is_named():
    assert len(set(known_ids())) == len(CATALOGUE)
    with pytest.raises(FixError) as caught:
        get("ckp")
    assert caught.value.hint == "did you mean ckpt?"


def test_expandable_segments_are_not_offered_when_even_all_unused_bytes_would_not_do():
    facts = dataclasses.replace(
        JOB,
        requested_bytes=4 * GIB,
        device_free_bytes=GIB,
        oom_reserved_bytes=38 * GIB,
        oom_allocated_bytes=37 * GIB,
    )
    assert "no allocator setting can find more" in get("expandable").applicable(facts).why
    enough = dataclasses.replace(facts, oom_allocated_bytes=30 * GIB)
    assert get("expandable").applicable(enough).ok


def test_a_batch_knob_halves_the_batch_and_doubles_the_accumulation():
    assert get("knob-accumulate").plan(JOB).argv == ("--batch-size", "8", "--grad-accum", "2")
    assert get("smaller-batch").risk is Risk.SEMANTIC


def test_fixes_that_change_the_training_are_marked():
    assert {fix.id for fix in CATALOGUE if fix.risk is Risk.SEMANTIC and not fix.advice} == {
        "optim-8bit",
        "smaller-batch",
    }
    assert all(get(each).risk is Risk.TOPOLOGY for each in ("fsdp2", "zero1"))


def test_source_only_fixes_have_a_patch():
    for fix in CATALOGUE:
        if fix.how == (How.SOURCE,):
            assert fix.id in PATCHES


def test_the_floor_is_said_at_once():
    assert floor_sentence(JOB, 40 * GIB) is None
    assert "32.00 GiB" in floor_sentence(JOB, 24 * GIB)


def test_an_ineffective_fix_says_why():
    baseline = Outcome((), 60 * GIB, peak_phase="backward", peak_allocated_bytes=59 * GIB, fits=False)
    moved = Outcome(("ckpt",), 59 * GIB, peak_phase="optimizer", composition={"optimizer state": 30 * GIB})
    found = effect(baseline, moved, JOB, (get("ckpt"),))
    assert found.effective is False
    assert "the peak moves to the optimizer step" in found.why_ineffective
    assert "30.00 GiB" in found.why_ineffective
    same = Outcome(("expandable",), 60 * GIB)
    assert (
        "1.00 GiB of the reserved bytes" in effect(baseline, same, JOB, (get("expandable"),)).why_ineffective
    )
    dearer = Outcome(("amp-bf16",), 61 * GIB, peak_phase="backward")
    assert effect(baseline, dearer, JOB, (get("amp-bf16"),)).why_ineffective.startswith("needs 1.00 GiB more")


def test_the_interval_is_wider_where_the_simulation_knows_less():
    plain = interval(100 * GIB, 100 * GIB, JOB)
    assert plain == (99 * GIB, 101 * GIB)
    low, high = interval(100 * GIB, 100 * GIB, dataclasses.replace(JOB, has_convolution=True))
    assert low < plain[0]
    assert high > plain[1]
    assert interval(90 * GIB, 100 * GIB, JOB, assumed=True)[0] < 90 * GIB
    assert interval(100 * GIB, 100 * GIB, JOB, unseen=True) == (99 * GIB, 110 * GIB)


def test_the_bound_of_convolution_workspaces_counts_where_it_is_more_than_the_known_error():
    facts = dataclasses.replace(JOB, has_convolution=True)
    without = interval(100 * GIB, 100 * GIB, facts)
    assert interval(100 * GIB, 100 * GIB, facts, workspace_bytes=GIB) == without
    small = interval(2 * GIB, 2 * GIB, facts, workspace_bytes=GIB)
    assert small == (interval(2 * GIB, 2 * GIB, facts)[0], int(2.02 * GIB) + GIB)


def test_measured_peaks_calibrate_the_simulated_ones():
    assert calibration({0: 90, 1: 105, 2: 105}, {1: 100, 2: 100, 3: 100}) == 1.05
    assert calibration({}, {1: 100}) == 1.0
    assert calibration({1: 300}, {1: 100}) == 1.0, "so far off that something else must differ"
