"""The what-if answer as rows and advice."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from oomscope.views import whatif

GIB = 1 << 30


def config(conf: str, peak: list[int], need: list[int] | None, retries: int, fits: bool) -> dict[str, Any]:
    return {
        "conf": conf, "peak_reserved_bytes": peak, "min_capacity_bytes": need, "retries": retries, "fits": fits,
    }  # fmt: skip


def answer(**changes: Any) -> dict[str, Any]:
    device: dict[str, Any] = {
        "device": 0,
        "live_peak_bytes": 38 * GIB,
        "capacity_bytes": 39 * GIB,
        "configs": [
            config("", [40 * GIB, 40 * GIB], [40 * GIB, 41 * GIB], 3, False),
            config("expandable_segments:True", [38 * GIB], None, 0, True),
        ],
        "recommended": "expandable_segments:True",
        "recorded": "",
        "reason": None,
        "notes": [],
    }
    return {"schema": "oomscope.whatif/1", "trusted": True, "devices": [{**device, **changes}]}


def read(**changes: Any) -> whatif.WhatIf:
    found = whatif.read(answer(**changes))
    assert found is not None
    return found


def test_rows() -> None:
    recorded, expandable = read().settings
    assert recorded.is_recorded
    assert recorded.name == "defaults"
    assert recorded.need is not None
    assert recorded.need.gib() == "40.00–41.00"
    assert recorded.peak is not None
    assert recorded.peak.gib() == "40.00"
    assert expandable.is_recommended
    assert expandable.need is None


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({}, "with PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True"),
        ({"recommended": None, "live_peak_bytes": 40 * GIB}, "live blocks alone exceed the card by 1.00 GiB"),
        ({"recommended": None}, "no setting makes it fit"),
        ({"recommended": None, "reason": "the history is cut"}, "the history is cut"),
    ],
)
def test_advice(changes: dict[str, Any], words: str) -> None:
    assert words in read(**changes).advice()


def test_nothing_is_predicted_without_an_exact_replay() -> None:
    untrusted = whatif.read({**answer(recommended=None), "trusted": False})
    assert untrusted is not None
    assert not untrusted.is_trusted
    assert "does not reproduce" in untrusted.advice()


KEYS = st.sampled_from(["device", "configs", "conf", "peak_reserved_bytes", "recorded"])
VALUES = st.recursive(
    st.none() | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(KEYS, inner, max_size=3),
)


@given(st.dictionaries(st.sampled_from(["devices", "trusted"]), VALUES))
def test_any_answer_can_be_read(data: dict[str, Any]) -> None:
    found = whatif.read(data)
    if found is not None:
        found.advice()


def test_snapshot_of_the_oom_comes_first(tmp_path: Path) -> None:
    folder = tmp_path / "attempts" / "001" / "snapshots"
    folder.mkdir(parents=True)
    assert whatif.snapshot_of(tmp_path, 1, 0) is None
    for name in (
        "r00000-step000003-oom.pickle",
        "r00000-step000009-asked.pickle",
        "r00001-step000004-oom.pickle",
        "r00000-step000003-oom.pickle.json",
    ):
        (folder / name).touch()
    assert whatif.snapshot_of(tmp_path, 1, 0) == folder / "r00000-step000003-oom.pickle"
    assert whatif.snapshot_of(tmp_path, 1, None) == folder / "r00001-step000004-oom.pickle"
