# ruff: noqa: E501  # texts and tables
import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.core.diagnosis.arithmetic import MEANING, analyse
from oomscope.core.diagnosis.message import OomMessage
from oomscope.units import GIB

EVERY = dict(  # noqa: C408
    tried_bytes=GIB,
    capacity_bytes=24 * GIB,
    free_bytes=GIB // 2,
    allocated_bytes=20 * GIB,
    reserved_unallocated_bytes=GIB,
)


def message(**changes: float | None) -> OomMessage:
    values = {**EVERY, **changes}
    return OomMessage(
        "cuda_oom", backend="cuda", **{k: None if v is None else int(v) for k, v in values.items()}
    )


@pytest.mark.parametrize(
    ("changes", "tags"),
    [
        ({"tried_bytes": 2000 * GIB}, {"absurd_size"}),
        ({"tried_bytes": 25 * GIB}, {"impossible_request"}),
        ({"free_bytes": 2 * GIB}, {"free_but_refused", "defragmentation_minor"}),
        (
            {"free_bytes": 0, "reserved_unallocated_bytes": 0.5 * GIB},
            {"short_without_fragmentation", "foreign_memory"},
        ),
        ({"allocated_bytes": 10 * GIB, "reserved_unallocated_bytes": 11 * GIB}, {"defragmentation_major"}),
        ({"allocated_bytes": 21 * GIB}, {"defragmentation_minor", "nearly_all_live"}),
        (
            {"tried_bytes": 6 * GIB, "allocated_bytes": 21 * GIB},
            {"short_without_fragmentation", "giant_request", "nearly_all_live"},
        ),
        ({"free_bytes": None}, set()),
    ],
)
def test_tags(changes, tags):
    assert set(analyse(message(**changes)).tags) == tags


def test_every_tag_has_a_meaning():
    assert set(MEANING) == {
        "absurd_size", "impossible_request", "free_but_refused", "foreign_memory", "defragmentation_major", "defragmentation_minor",
        "short_without_fragmentation", "giant_request", "nearly_all_live",
    }  # fmt: skip


def test_what_lies_outside_torch_is_split_where_the_text_says_so():
    numbers = analyse(message(this_process_bytes=22 * GIB))
    assert numbers.other == 2.5 * GIB
    assert (numbers.own_other, numbers.foreign) == (GIB, 1.5 * GIB)


def test_in_a_container_the_process_list_names_oneself():
    only_me = OomMessage(**{**message().__dict__, "other_processes": ((7, int(21.4 * GIB)),)})
    numbers = analyse(only_me)
    assert numbers.foreign == 0
    assert numbers.own_other == pytest.approx(0.4 * GIB, abs=2)
    neighbour = OomMessage(**{**message().__dict__, "other_processes": ((7, 2 * GIB),)})
    assert analyse(neighbour).foreign == 2 * GIB
    assert analyse(neighbour).own_other is None


def test_wrapped_numbers_are_no_measurements():
    numbers = analyse(message(this_process_bytes=17179869184 * GIB))
    assert numbers.own_other is None


def test_shortfall():
    assert analyse(message(tried_bytes=3 * GIB)).shortfall == 1.5 * GIB
    assert analyse(message()).shortfall == -0.5 * GIB


sizes = st.integers(0, 200 * GIB)


@given(sizes, st.integers(1, 200 * GIB), sizes, sizes, sizes)
def test_never_both_short_and_servable(tried, capacity, free, allocated, unallocated):
    numbers = analyse(
        message(
            tried_bytes=tried,
            capacity_bytes=capacity,
            free_bytes=free,
            allocated_bytes=allocated,
            reserved_unallocated_bytes=unallocated,
        )
    )
    short = numbers.has("short_without_fragmentation")
    servable = numbers.has("defragmentation_major") or numbers.has("defragmentation_minor")
    assert short + servable == (not numbers.has("impossible_request"))
    if short:
        assert numbers.shortfall is not None
        assert numbers.shortfall > 0
