"""The words and numbers of the rank table."""

from __future__ import annotations

from typing import Any

import pytest

from oomscope.live.state import RankState
from oomscope.views.ranks import ORDERS, by_node, ordered, rank_row
from oomscope.views.series import EMPTY, History

GIB = 1 << 30


def state(**fields: Any) -> RankState:
    base: dict[str, Any] = {
        "rank": 0, "state": "running", "step": 50, "phase": "forward",
        "allocated_bytes": 30 * GIB, "reserved_bytes": 40 * GIB,
        "peak_allocated_bytes": 38 * GIB, "peak_reserved_bytes": 40 * GIB, "capacity_bytes": 80 * GIB,
    }  # fmt: skip
    return RankState(**{**base, **fields})


def growing(per_step: float, *, start: int = 30 * GIB, steps: int = 50) -> History:
    low = tuple(start + int(per_step * step) for step in range(steps))
    peak = tuple(value + 5 * GIB for value in low)
    return History(0, 1, low, peak, tuple(p + GIB for p in peak))


def test_healthy_rank() -> None:
    row = rank_row(state(), growing(0))
    assert row.status == "ok"
    assert row.headroom_bytes == 42 * GIB
    assert row.change_per_step == 0
    assert row.steps_left is None


def test_growth_is_forecast_from_the_newest_peak() -> None:
    history = growing(0.1 * GIB)
    row = rank_row(state(), history)
    assert row.status == "▲ leak?"
    assert row.steps_left == pytest.approx((80 * GIB - history.peak[-1]) / (0.1 * GIB), abs=1)
    assert "out of memory in about" in row.sentence()


def test_memory_of_others_is_not_usable() -> None:
    row = rank_row(state(device_used_bytes=45 * GIB), growing(0))
    assert row.other_bytes == 5 * GIB
    assert row.usable_bytes == 75 * GIB


@pytest.mark.parametrize(
    ("fields", "status"),
    [
        ({"state": "oom"}, "▲ OOM"),
        ({"state": "failed"}, "▲ failed"),
        ({"state": "silent"}, "! silent"),
        ({"state": "lost"}, "! lost"),
        ({"state": "done"}, "done"),
        ({"retries": 2}, "! retries"),
        ({"peak_allocated_bytes": 79 * GIB, "peak_reserved_bytes": 79 * GIB}, "! tight"),
        ({"reserved_bytes": 70 * GIB}, "! frag"),
    ],
)
def test_status_words(fields: dict[str, Any], status: str) -> None:
    assert rank_row(state(**fields), growing(0)).status == status


def test_cpu_rank_shows_host_memory() -> None:
    cpu = state(
        allocated_bytes=None, reserved_bytes=None, peak_allocated_bytes=None, peak_reserved_bytes=None,
        capacity_bytes=None,
        rss_bytes=2 * GIB, peak_rss_bytes=3 * GIB,
    )  # fmt: skip
    row = rank_row(cpu, EMPTY, host_total_bytes=64 * GIB)
    assert not row.on_device
    assert (row.used_bytes, row.peak_bytes, row.capacity_bytes) == (2 * GIB, 3 * GIB, 64 * GIB)
    assert row.reserved_bytes is None
    assert "host memory" in row.sentence()


def test_rank_that_said_nothing_yet() -> None:
    row = rank_row(RankState(rank=3), EMPTY)
    assert row.status == "starting"
    assert row.sentence() == "rank 3: starting"


def test_orders() -> None:
    rows = [
        rank_row(state(rank=0, peak_allocated_bytes=10 * GIB), growing(0)),
        rank_row(state(rank=1, peak_allocated_bytes=70 * GIB), growing(0)),
        rank_row(state(rank=2, peak_allocated_bytes=20 * GIB), growing(0.1 * GIB)),
    ]
    found = {order: [row.rank for row in ordered(rows, order)] for order in ORDERS}
    assert found == {"rank": [0, 1, 2], "headroom": [1, 2, 0], "peak": [1, 2, 0], "growth": [2, 0, 1]}


def test_rank_of_an_ended_session_that_never_said_how_it_ended_is_lost() -> None:
    assert rank_row(state(), growing(0), is_over=True).status == "! lost"
    assert rank_row(state(state="done"), growing(0), is_over=True).status == "done"
    assert rank_row(state(), growing(0)).status == "ok"


def test_ranks_by_node() -> None:
    rows = [
        rank_row(state(rank=0, host="b", peak_allocated_bytes=70 * GIB), EMPTY),
        rank_row(state(rank=1, host="b", state="oom"), EMPTY),
        rank_row(state(rank=2, host="a", peak_allocated_bytes=75 * GIB), EMPTY),
        rank_row(state(rank=3, host="a"), EMPTY),
    ]
    nodes = by_node(rows, "rank")
    assert [(node.name, [row.rank for row in node.ranks]) for node in nodes] == [("b", [0, 1]), ("a", [2, 3])]
    assert [node.worst.rank for node in nodes] == [1, 2]
    assert nodes[1].headroom_bytes == 5 * GIB
    assert [node.name for node in by_node(rows, "headroom")] == ["a", "b"]
    assert [node.name for node in by_node(rows, "rank", reverse=True)] == ["a", "b"]
