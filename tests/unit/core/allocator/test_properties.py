"""Random requests under every configuration: what must always hold."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from oomscope.core.allocator.model import (
    ADDRESS_MODELS,
    AllocatorConfig,
    AllocatorOutOfMemory,
    CachingAllocator,
    VirtualDriver,
)
from oomscope.core.allocator.replay import replay
from oomscope.core.allocator.requests import RequestTrace, requests_of
from oomscope.core.allocator.simulate import Outcome, run
from oomscope.core.allocator.synth import SyntheticProcess
from oomscope.core.allocator.synth_workloads import random_stream
from oomscope.core.allocator.verify import verify
from oomscope.units import GIB, MIB

from .helpers import CONFS, check_invariants, history_of, loaded, without_frames
from .reference import run_by_model

POOLS = ([(0, 0)], [(0, 0), (0, 0), (3, 0)])
SIZES = st.one_of(
    st.integers(1, 4096), st.integers(1, MIB), st.integers(MIB, 12 * MIB), st.integers(10 * MIB, 90 * MIB)
)
STEPS = st.lists(
    st.one_of(
        st.tuples(
            st.just("malloc"), SIZES, st.sampled_from([0, 0, 7]), st.sampled_from([(0, 0), (0, 0), (3, 0)])
        ),
        st.tuples(st.just("free"), st.integers(0, 50)),
        st.tuples(st.just("free_elsewhere"), st.integers(0, 50)),
        st.tuples(st.just("events")),
        st.tuples(st.just("empty")),
        st.tuples(st.just("capture")),
    ),
    max_size=60,
)


@settings(max_examples=150, deadline=None)
@given(
    STEPS,
    st.sampled_from(CONFS),
    st.sampled_from(["address", "segment", "block"]),
    st.sampled_from([None, 200 * MIB]),
    st.sampled_from(ADDRESS_MODELS),
)
def test_books_always_balance(
    steps: list[tuple[object, ...]], conf: str, tiebreak: str, capacity: int | None, addresses: str
) -> None:
    config = replace(AllocatorConfig.parse(conf), tiebreak=tiebreak)
    driver = VirtualDriver(capacity, total_bytes=capacity or 4 * GIB, addresses=addresses)
    allocator = CachingAllocator(config, driver)
    live: list[int] = []
    for name, *arguments in steps:
        if name == "malloc":
            size, stream, pool = arguments
            try:
                live.append(allocator.malloc(size, stream, None, pool))  # type: ignore[arg-type]
            except AllocatorOutOfMemory:
                continue
        elif name in ("free", "free_elsewhere") and live:
            address = live.pop(int(arguments[0]) % len(live))  # type: ignore[call-overload]
            if name == "free_elsewhere":
                allocator.record_stream(address, 99)
            allocator.free(address)
        elif name == "events":
            allocator.process_events()
        elif name == "empty":
            allocator.empty_cache()
        elif name == "capture":
            if allocator.captures:
                allocator.end_capture((3, 0))
            else:
                allocator.begin_capture((3, 0))
        check_invariants(allocator, config)
    if allocator.captures:
        allocator.end_capture((3, 0))
    for address in live:
        allocator.free(address)
    allocator.process_events()
    allocator.release_pool((3, 0))
    allocator.empty_cache()
    check_invariants(allocator, config)
    assert (allocator.reserved_bytes, allocator.active_bytes) == (0, 0)


def _noise(
    seed: int,
    conf: str,
    *,
    tiebreak: str = "address",
    capacity: int | None = None,
    ring: int | None = None,
    version: tuple[int, int] = (2, 13),
    pools: int = 0,
    requests: int = 500,
) -> SyntheticProcess:
    config = replace(AllocatorConfig.parse(conf), tiebreak=tiebreak)
    process = SyntheticProcess(
        config, capacity=capacity, total_bytes=4 * GIB if "fraction" not in conf else capacity or GIB,
        max_entries=ring, torch_version=version,
    )  # fmt: skip
    random_stream(process, seed, requests=requests, pools=POOLS[pools])
    return process


@settings(max_examples=120, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(CONFS),
    st.sampled_from(["address", "segment", "block"]),
    st.sampled_from([None, 700 * MIB]),
    st.sampled_from([None, None, 400]),
    st.sampled_from([(2, 4), (2, 8), (2, 13)]),
    st.sampled_from([0, 1]),
)
def test_the_replay_of_ones_own_export_is_exact_or_says_what_is_open(
    seed: int,
    conf: str,
    tiebreak: str,
    capacity: int | None,
    ring: int | None,
    version: tuple[int, int],
    pools: int,
) -> None:
    process = _noise(
        seed, conf, tiebreak=tiebreak, capacity=capacity, ring=ring, version=version, pools=pools
    )
    result = replay(history_of(process), process.config)
    assert not result.problems
    assert result.exact or result.ambiguities, result.divergence
    if ring is None and not (pools and version < (2, 12)):
        assert result.exact, result.divergence
        assert not result.ambiguities
        assert result.capacity_low == process.device.allocator.peak_reserved_bytes


@settings(max_examples=40, deadline=None)
@given(st.integers(0, 10_000), st.sampled_from(CONFS), st.sampled_from([None, 700 * MIB]))
def test_without_stacks_the_right_reading_is_found(seed: int, conf: str, capacity: int | None) -> None:
    process = _noise(seed, conf, capacity=capacity, requests=300)
    snapshot = loaded(process, edit=without_frames)
    result = verify(snapshot, snapshot.devices[0], config=process.config)
    assert result.replay is not None
    assert result.exact, result.replay.divergence


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 10_000),
    st.sampled_from(CONFS),
    st.sampled_from(["address", "segment", "block"]),
    st.sampled_from([None, 0.97, 0.8]),
    st.sampled_from(ADDRESS_MODELS),
)
def test_the_fast_loop_equals_the_model(
    seed: int, conf: str, tiebreak: str, share: float | None, addresses: str
) -> None:
    process = _noise(seed, "", requests=400)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    config = replace(AllocatorConfig.parse(conf), tiebreak=tiebreak)
    total = 8 * GIB
    free = run(trace, config, addresses=addresses, total_bytes=total)
    capacity = None if share is None else int(free.peak_reserved_bytes * share)
    fast = run(trace, config, capacity=capacity, addresses=addresses, total_bytes=total)
    assert fast == run_by_model(trace, config, capacity, addresses, total)


def test_early_refusals_equal_the_model() -> None:
    process = _noise(3, "", requests=400)
    history = history_of(process)
    trace = requests_of(replay(history, process.config), history)
    config = AllocatorConfig.parse("throw_on_cudamalloc_oom:True")
    fast = run(trace, config, capacity=300 * MIB)
    assert fast.ooms > 0
    assert fast == run_by_model(trace, config, 300 * MIB, "holes", None)


def test_requests_from_rows_equal_those_from_the_snapshot() -> None:
    process = _noise(5, "", requests=400, capacity=500 * MIB)
    history = history_of(process)
    from_snapshot = requests_of(replay(history, process.config), history)
    from_rows = RequestTrace.from_rows(process.device.rows)
    for conf in CONFS[:4]:
        config = AllocatorConfig.parse(conf)
        first, second = run(from_snapshot, config), run(from_rows, config)
        assert first.peak_reserved_bytes == pytest.approx(second.peak_reserved_bytes, rel=0.02)
    assert from_snapshot.live_peak()[0] == from_rows.live_peak()[0]


def test_outcomes_compare_by_value() -> None:
    assert Outcome(1, 2, 0, None, 3, 4) == Outcome(1, 2, 0, None, 3, 4)
    assert Outcome(1, 2, 0, None, 3, 4).fits
