"""The walk over what the script can reach: bounded, however large a container is."""

from __future__ import annotations

import collections
import sys
import tracemalloc
import types
import weakref
from typing import Any

import pytest

from oomscope.agent.reach import Walk

TORCH = types.SimpleNamespace(Tensor=type("Tensor", (), {}))


def paths_from(**names: Any) -> set[str]:
    """Paths of what is reached from a frame with these local variables."""
    frame = types.SimpleNamespace(
        f_code=types.SimpleNamespace(co_filename="train.py", co_name="train", co_flags=0),
        f_globals={},
        f_locals=names,
        f_lineno=7,
    )
    return {item.place.path for item in Walk(TORCH, [frame], lambda file: False)}


@pytest.mark.parametrize("kind", [list, tuple, collections.deque])
def test_the_ends_of_a_long_sequence_are_opened_and_keep_their_indices(kind: Any) -> None:
    found = paths_from(data=kind([[] for _ in range(1000)]))
    assert {"data", "data[0]", "data[63]", "data[936]", "data[999]"} <= found
    assert "data[64]" not in found
    assert "data[935]" not in found


def test_the_ends_of_a_long_dictionary_are_opened() -> None:
    found = paths_from(data={number: [] for number in range(1000)})
    assert {"data[0]", "data[63]", "data[936]", "data[999]"} <= found
    assert "data[64]" not in found


def test_a_long_container_is_not_copied() -> None:
    data = dict.fromkeys(range(300_000))
    names = {"data": data, "more": list(data), "members": set(data)}
    tracemalloc.start()
    try:
        paths_from(**names)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 200_000, "what the walk allocates does not grow with the container"


def test_locals_that_the_script_asked_for_stay_as_they_are() -> None:
    def train() -> dict[str, Any]:
        rate = [0.1]
        settings = locals()
        list(Walk(TORCH, [sys._getframe()], lambda file: False))
        assert rate
        return settings

    assert train()["rate"] == [0.1]


def test_locals_that_nobody_asked_for_are_not_kept_alive() -> None:
    class Big:
        pass

    def train() -> weakref.ref[Big]:
        value = Big()
        seen = weakref.ref(value)
        list(Walk(TORCH, [sys._getframe()], lambda file: False))
        del value
        return seen if seen() is None else pytest.fail("the look keeps it")

    train()
