import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.launch.outcome import first_failing, is_victim
from oomscope.live.series import StepSeries
from oomscope.live.state import RankState


def state_of(*records):
    state = RankState()
    for number, record in enumerate(records):
        state.take({"t": 10**18 + number, "n": number, **record})
    return state


HELLO = {
    "k": "hello",
    "version": 1,
    "pid": 7,
    "host": "h",
    "identity": {"rank": 2, "local_rank": 0, "world_size": 4},
}
STEP = {
    "k": "step",
    "step": 0,
    "low_allocated_bytes": 10,
    "peak_allocated_bytes": 50,
    "peak_reserved_bytes": 60,
    "reserved_bytes": 60,
    "rss_bytes": 5,
    "peak_rss_bytes": 6,
    "loss": 2.5,
    "retries": 1,
}
OOM = {
    "k": "oom",
    "step": 1,
    "phase": "forward",
    "requested_bytes": 99,
    "allocated_bytes": 80,
    "capacity_bytes": 100,
}
RAISED = {"k": "exception", "type": "OutOfMemoryError", "message": "CUDA out of memory.", "is_oom": True}


def test_a_rank_is_what_its_records_say():
    state = state_of(
        HELLO, {"k": "rank", "rank": 2, "device": 0, "gpu_name": "A100", "capacity_bytes": 100}, STEP
    )
    assert (state.rank, state.local_rank, state.world_size) == (2, 0, 4)
    assert (state.gpu_name, state.capacity_bytes) == ("A100", 100)
    assert (state.step, state.loss, state.peak_reserved_bytes, state.retries) == (1, 2.5, 60, 1)
    assert list(state.series.peak) == [50]


def test_peaks_only_rise():
    state = state_of(STEP, {**STEP, "step": 1, "peak_reserved_bytes": 30, "peak_allocated_bytes": 20})
    assert (state.peak_allocated_bytes, state.peak_reserved_bytes) == (50, 60)


def test_an_out_of_memory_error_that_ends_the_script():
    state = state_of(HELLO, OOM, RAISED)
    state.refresh(alive=False)
    assert state.state == "oom"
    assert state.oom["caught"] is False
    assert state.oom["message"] == "CUDA out of memory."


def test_one_that_the_script_survived():
    state = state_of(HELLO, OOM, {**STEP, "step": 1}, {"k": "bye", "steps": 2})
    state.refresh(alive=False)
    assert state.state == "done"
    assert state.oom["caught"] is True


def test_whether_a_step_came_after_it():
    assert state_of(HELLO, OOM, {"k": "bye", "steps": 2}).oom_was_last
    assert not state_of(HELLO, OOM, {**STEP, "step": 1}).oom_was_last


def test_one_after_which_something_else_failed():
    state = state_of(HELLO, OOM, {"k": "exception", "type": "ValueError", "message": "x", "is_oom": False})
    assert state.oom["caught"] is True
    state.refresh()
    assert state.state == "failed"


@pytest.mark.parametrize(
    ("alive", "age_s", "expected"),
    [
        (True, 1, "running"),
        (True, 60, "silent"),
        (None, 60, "silent"),
        (False, 60, "lost"),
        (False, 1, "lost"),
    ],
)
def test_a_rank_that_says_nothing(alive, age_s, expected):
    state = state_of(HELLO)
    state.refresh(10**18 + int(age_s * 1e9), alive=alive)
    assert state.state == expected


def test_device_use_comes_from_the_driver():
    state = state_of({"k": "reading", "device_free_bytes": 30, "device_total_bytes": 100, "step": 0})
    assert (state.device_used_bytes, state.capacity_bytes) == (70, 100)


values = (
    st.none() | st.booleans() | st.integers() | st.text() | st.floats() | st.lists(st.integers(), max_size=2)
)
KINDS = ["hello", "rank", "reading", "step", "oom", "exception", "bye", "peak", "gap", "model", "x"]
FIELDS = [
    *(
        "t",
        "step",
        "identity",
        "rank",
        "peak_allocated_bytes",
        "low_allocated_bytes",
        "rss_bytes",
        "loss",
        "phase",
    ),
    *(
        "peak_rss_bytes",
        "steps",
        "is_oom",
        "message",
        "lost",
        "device_free_bytes",
        "device_total_bytes",
        "pid",
    ),
]
records = st.fixed_dictionaries({"k": st.sampled_from(KINDS)}, optional=dict.fromkeys(FIELDS, values))


@given(st.lists(records, max_size=12))
def test_no_record_can_break_a_viewer(given_records):
    state = RankState()
    for record in given_records:
        state.take(record)
    state.refresh()


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(0, 1000)), min_size=1, max_size=300))
def test_a_series_is_bounded_and_loses_no_peak(steps):
    series = StepSeries(max_buckets=16)
    step, highest, lowest = 0, 0, 10**9
    for skip, peak in steps:
        series.add(
            step, {"peak_allocated_bytes": peak, "low_allocated_bytes": peak // 2, "reserved_bytes": peak + 1}
        )
        highest, lowest = max(highest, peak), min(lowest, peak // 2)
        last = step
        step += skip
    assert len(series) <= 16
    assert max(series.peak) == highest
    assert min(series.low) == lowest
    assert len(series.low) == len(series.peak) == len(series.reserved)
    assert series.first_step == 0
    assert series.last_step >= last


def test_a_job_without_a_device_is_drawn_by_its_host_memory():
    series = StepSeries()
    series.add(0, {"peak_allocated_bytes": None, "rss_bytes": 5, "peak_rss_bytes": 9})
    assert series.on_host
    assert (list(series.low), list(series.peak)) == ([5], [9])


def failed(rank, t, message, *, is_oom=False):
    state = state_of({**HELLO, "identity": {"rank": rank}})
    state.take({"t": t, "k": "exception", "type": "RuntimeError", "message": message, "is_oom": is_oom})
    state.refresh(alive=False)
    return state


def test_the_cause_comes_before_its_victims():
    victim = failed(0, 5, "[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:20915")
    cause = failed(1, 9, "CUDA out of memory.", is_oom=True)
    assert is_victim(victim)
    assert first_failing([victim, cause]).rank == 1


def test_a_rank_that_vanished_is_the_cause_of_lost_connections():
    victims = [failed(rank, 5, "Connection reset by peer") for rank in (0, 2)]
    gone, told_to_go = (
        state_of({**HELLO, "identity": {"rank": 1}}),
        state_of({**HELLO, "identity": {"rank": 3}}),
    )
    for each in (gone, told_to_go):
        each.refresh(alive=False)
    told_to_go.last_t -= 5
    assert first_failing([*victims, gone, told_to_go], {1: -9, 3: -15}).rank == 1


def ended(rank, t):
    state = state_of({**HELLO, "identity": {"rank": rank}}, {"t": t, "k": "term", "signal": "SIGTERM"})
    state.refresh(alive=False)
    assert state.state == "stopped"
    return state


def test_a_rank_that_somebody_ended_is_the_cause_of_what_followed():
    """A person or a scheduler ended rank 1; rank 0 lost it; the launcher then ended rank 2."""
    victim = failed(0, 50, "Connection reset by peer")
    assert first_failing([victim, ended(1, 40), ended(2, 60)]).rank == 1
    assert first_failing([victim, ended(2, 60)]).rank == 0


def test_times_of_other_nodes_are_set_right_before_they_are_compared():
    here, there = (
        failed(0, 50, "CUDA out of memory.", is_oom=True),
        failed(4, 20, "out of memory", is_oom=True),
    )
    assert first_failing([here, there]).rank == 4
    there.clock_offset_ns = 40
    assert first_failing([here, there]).rank == 0


def test_nobody_failed():
    state = state_of(HELLO, {"k": "bye", "steps": 1})
    state.refresh(time.time_ns(), alive=False)
    assert first_failing([state]) is None
