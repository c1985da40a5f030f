"""What-if: two numbers, ranges over address models, and a recommendation only when it decides."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.replay import replay
from oomscope.core.allocator.requests import RequestTrace, requests_of
from oomscope.core.allocator.simulate import Outcome, run
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import (
    fragmented_oom,
    random_stream,
    shortage_oom,
    side_stream,
    training,
)
from oomscope.core.allocator.verify import verify
from oomscope.core.allocator.whatif import (
    USUAL_CONFIGS,
    Assessment,
    Budget,
    ConfigAssessment,
    assess,
    evaluate,
    recommend,
)
from oomscope.core.snapshot.model import DeviceSnapshot, Snapshot
from oomscope.units import GIB, MIB

from .helpers import history_of, loaded

EXPANDABLE = AllocatorConfig.parse("expandable_segments:True")
BOTH = AllocatorConfig.parse("expandable_segments:True,max_split_size_mb:128")


def made(workload: Callable[[SyntheticProcess], object], **options: Any) -> tuple[Snapshot, DeviceSnapshot]:
    process = SyntheticProcess(**options)
    workload(process)
    snapshot = loaded(process)
    return snapshot, snapshot.devices[0]


def test_fragmentation_is_decided_by_expandable_segments() -> None:
    found = assess(*made(fragmented_oom, capacity=500 * MIB))
    assert found.trusted
    assert (found.capacity_bytes, found.capacity_source) == (500 * MIB, "oom row")
    recorded, expandable = found.find(AllocatorConfig()), found.find(EXPANDABLE)
    assert recorded is not None
    assert expandable is not None
    assert recorded.fits is False
    assert recorded.first_oom_row is not None
    assert recorded.retries == 1
    assert expandable.fits is True
    assert expandable.min_capacity_bytes == (480 * MIB, 480 * MIB)
    assert found.recommended == EXPANDABLE
    assert found.shortfall_bytes is not None
    assert found.shortfall_bytes < 0


def test_a_shortage_is_decided_by_no_setting() -> None:
    found = assess(*made(shortage_oom, capacity=500 * MIB))
    assert found.recommended is None
    assert all(each.fits is False for each in found.configs)
    assert found.shortfall_bytes == found.live_peak_bytes - 500 * MIB > 0


def test_a_larger_device_needs_no_advice() -> None:
    found = assess(*made(fragmented_oom, capacity=500 * MIB), capacity=2 * GIB)
    assert found.capacity_source == "given"
    assert all(each.fits for each in found.configs)
    assert found.recommended is None


def test_without_a_capacity_nothing_is_claimed() -> None:
    found = assess(*made(training))
    assert found.capacity_bytes is None
    assert found.shortfall_bytes is None
    assert {each.fits for each in found.configs} == {None}
    assert {each.retries for each in found.configs} == {0}
    assert found.recommended is None
    assert [each.config.to_text() for each in found.configs] == list(USUAL_CONFIGS)


def test_the_harmful_pair_is_never_recommended() -> None:
    snapshot, device = made(fragmented_oom, capacity=500 * MIB)
    found = assess(snapshot, device, configs=[BOTH])
    pair = found.find(BOTH)
    assert pair is not None
    assert pair.fits is True  # here it would even help
    assert found.recommended is None


def test_nothing_is_predicted_without_an_exact_replay() -> None:
    process = SyntheticProcess()
    training(process, layers=3, steps=1)

    def cut(raw: Any) -> None:
        del raw["device_traces"][0][20:30]

    snapshot = loaded(process, edit=cut)
    found = assess(snapshot, snapshot.devices[0])
    assert not found.trusted
    assert found.configs == []
    assert "does not reproduce" in (found.reason or "")
    empty = loaded(SyntheticProcess())
    assert assess(empty, empty.devices[0]).reason == "the device has no history"


def test_minimum_capacity_is_the_smallest_that_fits() -> None:
    process = SyntheticProcess()
    random_stream(process, 8, requests=800)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    for conf in USUAL_CONFIGS:
        config = AllocatorConfig.parse(conf)
        found = evaluate(trace, config, models=["holes"])
        assert found.min_capacity_bytes is not None
        need = found.min_capacity_bytes[0]
        assert trace.live_peak()[0] <= need <= found.peak_reserved_bytes[0]
        assert run(trace, config, capacity=need).fits
        assert not run(trace, config, capacity=need - 4 * MIB).fits


def test_capacity_counts_whatever_the_fraction_allows() -> None:
    trace = RequestTrace()
    trace.ask(100 * MIB)
    config = AllocatorConfig.parse("per_process_memory_fraction:0.5")
    found = evaluate(trace, config, models=["up"], total_bytes=400 * MIB, capacity=150 * MIB)
    assert found.fits
    assert found.min_capacity_bytes == (100 * MIB, 100 * MIB)


def test_cold_runs_reproduce_the_recorded_peak() -> None:
    for conf in ("", "expandable_segments:True", "max_split_size_mb:64"):
        process = SyntheticProcess(conf)
        random_stream(process, 21, requests=600)
        history = history_of(process)
        trace = requests_of(replay(history, process.config), history)
        assert run(trace, process.config).peak_reserved_bytes == process.device.allocator.peak_reserved_bytes


def test_pending_frees_hold_memory_until_they_complete() -> None:
    process = SyntheticProcess()
    side_stream(process, steps=6)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    # Three batches of 12 MiB wait at a time, beside one of 30 MiB.
    assert trace.live_peak()[0] == (3 * 12 + 30) * MIB
    assert run(trace, process.config).peak_reserved_bytes >= (3 * 12 + 30) * MIB


def test_pending_frees_older_than_the_history() -> None:
    process = SyntheticProcess()
    side_stream(process, steps=2)
    start = len(process.device.rows)
    process.device.process_events()
    process.device.malloc(512)
    snapshot = loaded(process)
    checked = verify(snapshot, snapshot.devices[0], start=start)
    assert checked.exact
    assert checked.replay is not None
    trace = requests_of(checked.replay, checked.history)
    assert trace.n_initial == 4  # two blocks, both given back and waiting
    assert run(trace, process.config).fits


class _Clock:
    def __init__(self, step: float) -> None:
        self.now, self.step = 0.0, step

    def __call__(self) -> float:
        self.now += self.step
        return self.now


def test_a_budget_learns_how_fast_runs_are() -> None:
    clock = _Clock(1.0)
    budget = Budget(10.0, clock)
    outcome = Outcome(1, 0, 0, None, 0, 0)
    assert budget.timed(5000, lambda: outcome) is outcome
    assert budget.speed == 5000.0
    assert budget.timed(10, lambda: outcome) is outcome  # too few to learn from
    assert budget.speed == 5000.0
    assert not budget.allows(1_000_000)
    assert budget.left is not None
    assert Budget(None).left is None
    assert Budget(None).allows(1 << 60)


def test_when_time_is_short_models_and_search_are_dropped() -> None:
    trace = RequestTrace()
    for _ in range(2000):
        trace.give(trace.ask(3 * MIB))
    budget = Budget(0.5, _Clock(0.1))
    found = evaluate(trace, AllocatorConfig(), budget=budget)
    assert found.models < 4
    assert found.peak_reserved_bytes == (20 * MIB, 20 * MIB)


def test_when_time_is_shorter_still_a_window_is_run() -> None:
    process = SyntheticProcess(capacity=3 * GIB)
    training(process, layers=40, steps=8, activation_bytes=20 * MIB)
    shortage_oom(process)
    snapshot = loaded(process)
    device = snapshot.devices[0]
    checked = verify(snapshot, device)
    found = assess(snapshot, device, time_budget_s=0.0, verification=checked)
    assert found.trusted
    assert found.window is not None
    assert 0 < found.window[0] < found.window[1] == len(checked.history)
    assert any("only rows" in note for note in found.notes)
    assert any("not enough" in note for note in found.notes)
    assert found.live_peak_bytes > 2 * GIB
    assert found.to_json()["window"] == list(found.window)


def _entry(
    conf: str, fits: bool | None, need: int = 0, retries: int = 0, models: int = 4
) -> ConfigAssessment:
    needs = (need, need) if need else None
    return ConfigAssessment(AllocatorConfig.parse(conf), (1, 2), needs, retries, fits, models=models)


def _entries() -> Iterator[tuple[list[ConfigAssessment], str | None]]:
    recorded = _entry("", False)
    yield (
        [recorded, _entry("max_split_size_mb:128", True, 5), _entry("expandable_segments:True", True, 9)],
        "expandable_segments:True",
    )
    yield (
        [recorded, _entry("max_split_size_mb:128", True, 5, 9), _entry("max_split_size_mb:512", True, 7, 1)],
        "max_split_size_mb:512",
    )
    yield (
        [recorded, _entry("max_split_size_mb:128", True, 5), _entry("max_split_size_mb:512", True)],
        "max_split_size_mb:128",
    )
    yield [recorded, _entry("expandable_segments:True", None)], None
    yield [recorded, _entry("expandable_segments:True", True, models=2)], None
    yield [_entry("", None), _entry("expandable_segments:True", True)], None
    yield [], None


@pytest.mark.parametrize(("configs", "expected"), list(_entries()))
def test_what_is_recommended(configs: list[ConfigAssessment], expected: str | None) -> None:
    assessment = Assessment(0, True, None, recorded=AllocatorConfig(), configs=configs)
    found = recommend(assessment)
    assert (None if found is None else found.to_text()) == expected


def test_garbage_collection_without_a_recorded_fraction_is_left_out() -> None:
    process = SyntheticProcess("garbage_collection_threshold:0.8")
    training(process, layers=2, steps=1)
    snapshot = loaded(process)
    found = assess(snapshot, snapshot.devices[0], time_budget_s=5)
    assert any("garbage collection is left out" in note for note in found.notes)


def test_no_recorded_setting_no_advice() -> None:
    assert recommend(Assessment(0, True, None)) is None


def test_disagreeing_models_give_no_verdict() -> None:
    process = SyntheticProcess()
    random_stream(process, 8, requests=800)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    found = evaluate(trace, AllocatorConfig())
    assert found.min_capacity_bytes is not None
    low, high = found.min_capacity_bytes
    if low < high:
        assert evaluate(trace, AllocatorConfig(), capacity=low, search=False).fits is None
    assert (
        evaluate(trace, AllocatorConfig(), capacity=high + 40 * MIB, search=False).min_capacity_bytes is None
    )
