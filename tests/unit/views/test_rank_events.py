"""Events of the ranks, found between two polls."""

from __future__ import annotations

from typing import Any

from oomscope.live.state import RankState
from oomscope.views.rank_events import RankEvents
from oomscope.views.ranks import rank_row
from oomscope.views.series import EMPTY


def notice(events: RankEvents, attempt: int = 1, **fields: Any) -> list[str]:
    """The new lines after a poll that finds rank 0 with `fields`."""
    state = RankState(rank=0, **{"state": "running", **fields})
    before = len(events.lines)
    events.notice(attempt, [state], [rank_row(state, EMPTY)])
    return [line.text for line in events.lines[before:]]


def test_flushes_are_counted_from_the_first_look() -> None:
    events = RankEvents()
    assert notice(events, retries=3) == ["3 cudaMalloc retries so far"]
    assert notice(events, retries=3) == []
    assert notice(events, retries=4) == ["cudaMalloc retry #4: the cache was flushed"]


def test_end_is_said_once_and_again_in_the_next_attempt() -> None:
    events = RankEvents()
    assert notice(events, state="oom") == ["ran out of memory"]
    assert notice(events, state="oom") == []
    assert notice(events, 2, state="running") == []
    assert notice(events, 2, state="failed") == ["failed"]


def test_fixes_snapshots_and_agent_errors() -> None:
    events = RankEvents()
    fixes = [
        {"id": "ckpt", "state": "applied", "detail": "24 blocks"},
        {"id": "amp-bf16", "state": "refused", "detail": "is on"},
    ]
    assert notice(events, fixes=fixes) == ["ckpt applied: 24 blocks", "amp-bf16 refused: is on"]
    assert [line.severity for line in events.lines] == ["info", "warn"]
    snapshots = [{"path": "snapshots/r00000-step000001-oom.pickle", "bytes": 2 << 20}]
    errors = [{"probe": "loss", "error": "ValueError"}]
    assert notice(events, fixes=fixes, snapshots=snapshots, agent_errors=errors) == [
        "snapshot r00000-step000001-oom.pickle, 2.00 MiB",
        "the agent switched loss off: ValueError",
    ]


def test_operators_that_were_not_simulated_are_named() -> None:
    events = RankEvents()
    names = [f"aten::op{n}" for n in range(6)]
    assert notice(events, simulation={"unsupported": names}) == [
        "not simulated exactly: aten::op0, aten::op1, aten::op2, aten::op3 and 2 more"
    ]
    assert notice(RankEvents(), simulation={"unsupported": []}) == []
