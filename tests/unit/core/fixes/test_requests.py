"""Replaying recorded requests: other settings, other capacities, address models."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.fixes.requests import EMPTY_CACHE, predict_range, read_requests, replay

MIB = 1 << 20


def events(*rows):
    return array("q", [value for row in rows for value in row])


def varying(rounds=12):
    """Each round frees its blocks and asks for slightly larger ones: the old ones never fit."""
    rows, address = [], 1
    for number in range(rounds):
        held = []
        for _ in range(4):
            rows.append((address, (20 + 3 * number) * MIB, 0))
            held.append(address)
            address += 1
        rows += [(each, 0, 0) for each in held]
    return events(*rows)


def test_expandable_segments_reuse_what_the_default_cannot():
    plain = replay(varying(), AllocatorConfig())
    expandable = replay(varying(), AllocatorConfig.parse("expandable_segments:True"))
    # Blocks that are not worth splitting count whole, so the allocated peaks are close, not equal.
    assert (
        abs(plain.peak_allocated_bytes - expandable.peak_allocated_bytes) < 0.03 * plain.peak_allocated_bytes
    )
    assert expandable.peak_reserved_bytes < 0.5 * plain.peak_reserved_bytes


def test_a_limit_makes_the_allocator_give_back_before_it_fails():
    need = replay(varying(), AllocatorConfig())
    limited = predict_range(varying(), AllocatorConfig(), capacity_bytes=need.peak_reserved_bytes // 2)
    assert limited.fits is True
    assert limited.high_bytes <= need.peak_reserved_bytes // 2


def test_collecting_old_blocks_early_keeps_below_the_card():
    """`gc-threshold` as it is predicted; what a real driver does, only a GPU can show."""
    capacity = int(0.7 * replay(varying(), AllocatorConfig()).peak_reserved_bytes)
    settings = "garbage_collection_threshold:0.8,per_process_memory_fraction:0.99"
    plain = predict_range(varying(), AllocatorConfig(), capacity_bytes=capacity)
    collected = predict_range(varying(), AllocatorConfig.parse(settings), capacity_bytes=capacity)
    assert collected.fits is True
    assert collected.high_bytes < plain.high_bytes


def test_an_emptied_cache_is_empty():
    rows = [(1, 50 * MIB, 0), (1, 0, 0), (0, EMPTY_CACHE, 0), (2, 60 * MIB, 0)]
    assert replay(events(*rows), AllocatorConfig()).peak_reserved_bytes == 60 * MIB
    rows.remove((0, EMPTY_CACHE, 0))
    assert replay(events(*rows), AllocatorConfig()).peak_reserved_bytes == 110 * MIB


def test_what_does_not_fit_is_shown_with_what_it_needs():
    span = predict_range(varying(), AllocatorConfig(), capacity_bytes=100 * MIB)
    assert span.fits is False
    assert span.low_bytes > 100 * MIB
    assert replay(varying(), AllocatorConfig(), capacity_bytes=100 * MIB).oom_event is not None


def test_without_a_capacity_nothing_is_said_about_fitting():
    assert predict_range(varying(), AllocatorConfig(), capacity_bytes=None).fits is None


def test_a_torn_event_at_the_end_is_dropped():
    whole = events((1, MIB, 0), (1, 0, 0))
    assert read_requests(whole.tobytes()[:-5]) == events((1, MIB, 0))
    assert read_requests(b"") == array("q")


@given(st.binary(max_size=200))
def test_any_bytes_can_be_read_and_replayed(data):
    found = read_requests(data)
    assert len(found) % 3 == 0


@given(st.lists(st.tuples(st.integers(0, 9), st.integers(1, 40 * MIB)), max_size=60))
def test_peaks_are_at_least_what_was_alive(rows):
    alive: dict[int, int] = {}
    flat, highest = [], 0
    for key, size in rows:
        if key in alive:
            flat.append((key, 0, 0))
            del alive[key]
        else:
            flat.append((key, size, 0))
            alive[key] = size
        highest = max(highest, sum(alive.values()))
    result = replay(events(*flat), AllocatorConfig())
    assert result.peak_reserved_bytes >= result.peak_allocated_bytes >= highest


@pytest.mark.parametrize("model", ["holes", "up", "down", "alternate"])
def test_every_address_model_can_be_asked_for(model):
    assert replay(varying(), AllocatorConfig(), addresses=model).fits
