"""The planner: cheap and harmless fixes first, combinations only when needed, and nothing that does not help."""

import pytest

from oomscope.core.fixes import CATALOGUE, get
from oomscope.core.fixes.prediction import Outcome
from oomscope.core.fixes.search import compatible, search

MB = 1_000_000

#: Peaks of the prototype's GPT in MB, as its dry run gave them; combinations as far as they were measured.
PEAKS = {
    (): 91.85,
    ("ckpt",): 38.51,
    ("ckpt-half",): 64.98,
    ("ckpt-selective",): 69.72,
    ("microbatch-exact",): 48.11,
    ("amp-bf16",): 69.03,
    ("fused-ce",): 86.0,
    ("optim-fused",): 91.85,
}


def peak(ids):
    if tuple(ids) in PEAKS:
        return PEAKS[tuple(ids)]
    left = PEAKS[()]
    for each in ids:
        left *= PEAKS[(each,)] / PEAKS[()]
    return max(left, 23.3)


def run(budget, ids=None, refuse=()):
    fixes = [get(each) for each in (ids or [key[0] for key in PEAKS if key])]
    baseline = Outcome((), round(PEAKS[()] * MB), fits=PEAKS[()] <= budget)
    asked = []
    steps = search(fixes, baseline)
    wanted = next(steps)
    while True:
        asked += wanted
        answer = {}
        for each in wanted:
            refused = {fix: "no" for fix in each if fix in refuse}
            size = peak(each)
            answer[each] = Outcome(each, round(size * MB), fits=size <= budget, refused=refused)
        try:
            wanted = steps.send(answer)
        except StopIteration as stop:
            return stop.value, asked


@pytest.mark.parametrize("budget", [80, 60, 40])
def test_one_exact_fix_is_enough_on_the_prototype_s_larger_budgets(budget):
    found, _ = run(budget)
    assert len(found.recommended.fixes) == 1
    assert get(found.recommended.fixes[0]).risk.value == "exact"
    assert peak(found.recommended.fixes) <= budget


def test_the_smallest_budget_is_reached_by_a_combination():
    found, _ = run(36.6)
    assert len(found.recommended.fixes) >= 2
    assert peak(found.recommended.fixes) <= 36.6


def test_below_the_floor_the_best_is_named_and_nothing_is_recommended():
    found, _ = run(10)
    assert found.recommended is None
    assert found.plans[0].fits is False
    assert found.plans[0].peak_reserved_bytes < 38 * MB


def test_every_plan_is_free_of_conflicts():
    found, asked = run(25)
    fixes = {fix.id: fix for fix in CATALOGUE}
    assert all(compatible(ids, fixes) is None for ids in asked)
    assert all(compatible(plan.fixes, fixes) is None for plan in found.plans)


def test_a_refused_fix_is_in_no_plan():
    found, asked = run(40, refuse=("ckpt",))
    assert all("ckpt" not in plan.fixes for plan in found.plans)
    assert all("ckpt" not in ids for ids in asked if len(ids) > 1)


def test_a_semantic_fix_is_never_recommended_and_only_looked_at_when_nothing_else_fits():
    PEAKS[("smaller-batch",)] = 20.0
    try:
        found, asked = run(22, ids=["amp-bf16", "smaller-batch"])
        assert ("smaller-batch",) in asked
        assert found.recommended is None
        assert found.plans[0].fixes == ("smaller-batch",)
        _, asked = run(70, ids=["amp-bf16", "smaller-batch"])
        assert ("smaller-batch",) not in asked
    finally:
        del PEAKS[("smaller-batch",)]


def test_a_setting_of_the_allocator_that_is_enough_ends_the_search():
    PEAKS[("expandable",)] = 70.0
    try:
        found, asked = run(80, ids=["expandable", "ckpt"])
    finally:
        del PEAKS[("expandable",)]
    assert found.recommended.fixes == ("expandable",)
    assert asked == [("expandable",)]


def test_without_candidates_there_is_no_plan():
    steps = search([], Outcome((), 100, fits=False))
    found = None
    try:
        wanted = next(steps)
        while True:
            wanted = steps.send({each: Outcome(each) for each in wanted})
    except StopIteration as stop:
        found = stop.value
    assert found.plans == ()
    assert found.recommended is None


def test_a_plan_with_room_to_spare_is_preferred_to_one_that_only_just_fits():
    fixes = [get("bucket-view"), get("optim-fused")]
    steps = search(fixes, Outcome((), 100, fits=False))
    wanted = next(steps)
    try:
        while True:
            answer = {}
            for ids in wanted:
                size = {1: 79, 2: 60}[len(ids)]
                answer[ids] = Outcome(ids, size, fits=size < 80, tight=78 < size < 80)
            wanted = steps.send(answer)
    except StopIteration as stop:
        found = stop.value
    assert found.recommended.fixes == ("bucket-view", "optim-fused")
    assert ("bucket-view",) in [plan.fixes for plan in found.plans], "what just fits is listed all the same"
