"""Allocator settings: the user's own are kept, ours are merged in, and what is active is refused."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.core.fixes.environment import (
    join_settings,
    merge_allocator_settings,
    split_settings,
    why_not_expandable,
)
from oomscope.errors import FixError

OLD, NEW = "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"
EXPANDABLE = {"expandable_segments": "True"}


def test_both_names_are_set_from_torch_2_9_on():
    assert merge_allocator_settings({}, EXPANDABLE, (2, 8)) == {OLD: "expandable_segments:True"}
    assert merge_allocator_settings({}, EXPANDABLE, (2, 9)) == dict.fromkeys(
        (OLD, NEW), "expandable_segments:True"
    )


def test_the_user_s_settings_stay_first():
    env = {OLD: "roundup_power2_divisions:[256:1,512:2],garbage_collection_threshold:0.9"}
    merged = merge_allocator_settings(env, EXPANDABLE, (2, 8))
    assert merged[OLD] == f"{env[OLD]},expandable_segments:True"


def test_the_old_name_wins_over_the_new_one():
    env = {OLD: "garbage_collection_threshold:0.5", NEW: "garbage_collection_threshold:0.9"}
    assert "0.5" in merge_allocator_settings(env, EXPANDABLE, (2, 13))[OLD]


@pytest.mark.parametrize(
    ("value", "part"),
    [
        ("expandable_segments:True", "already active"),
        ("expandable_segments:False", "remove that setting first"),
        ("backend:cudaMallocAsync", "ignores expandable_segments"),
        ("max_split_size_mb:128", "max_split_size_mb"),
    ],
)
def test_why_expandable_segments_cannot_be_added(value, part):
    assert part in why_not_expandable({OLD: value})
    assert part in why_not_expandable({NEW: value})


def test_what_the_process_really_used_counts_more_than_the_variable():
    assert "already active" in why_not_expandable({}, "expandable_segments:True")


def test_another_platform_is_refused():
    assert "win32" in why_not_expandable({}, None, "win32")


def test_a_setting_that_is_there_is_never_replaced():
    with pytest.raises(FixError, match="set by the job itself"):
        merge_allocator_settings({OLD: "expandable_segments:False"}, EXPANDABLE, (2, 13))


keys = st.text("abcdefgh_", min_size=1, max_size=8)
values = st.one_of(st.text("0123456789.", min_size=1, max_size=6), st.just("[256:1,512:2,>:4]"))


@given(st.dictionaries(keys, values, max_size=5))
def test_splitting_is_the_inverse_of_joining(settings):
    assert split_settings(join_settings(settings)) == settings


@given(st.text(max_size=60))
def test_any_text_can_be_split(text):
    for key in split_settings(text):
        assert key
