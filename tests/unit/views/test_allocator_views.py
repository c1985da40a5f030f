"""Words for ranges, and advice that follows from the table."""

from __future__ import annotations

import pytest

from oomscope.core.allocator.autopsy import Autopsy, LiveBlock
from oomscope.core.allocator.measures import OomMeasures
from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.whatif import Assessment, ConfigAssessment
from oomscope.core.snapshot.columns import Frame, StackTable
from oomscope.units import GIB, MIB
from oomscope.views.allocator import (
    config_words,
    failure_json,
    failure_lines,
    place_words,
    range_words,
    whatif_advice,
    whatif_rows,
)


@pytest.mark.parametrize(
    ("low", "high", "words"),
    [
        (GIB, GIB, "1.00 GiB"),
        (GIB, GIB + 1, "1.00 GiB"),
        (GIB, 2 * GIB, "1.00 to 2.00 GiB"),
        (900 * MIB, GIB, "900.00 MiB to 1.00 GiB"),
    ],
)
def test_ranges(low: int, high: int, words: str) -> None:
    assert range_words(low, high) == words


def test_no_settings_are_the_defaults() -> None:
    assert config_words(AllocatorConfig()) == "defaults"


def test_too_close_to_call() -> None:
    entries = [
        ConfigAssessment(AllocatorConfig(), (1, 2), (3, 4), 0, None, models=4),
        ConfigAssessment(AllocatorConfig.parse("max_split_size_mb:64"), (1, 2), None, 3, False, models=4),
    ]
    found = Assessment(0, True, None, capacity_bytes=4, recorded=AllocatorConfig(), configs=entries)
    assert "too close to call" in whatif_advice(found)
    first, second = whatif_rows(found)
    assert first.is_recorded
    assert first.fits == "not sure"
    assert second.cells[2:] == ("not searched", "3", "no")


def _failure(**changes: object) -> OomMeasures:
    totals = dict.fromkeys(
        (
            "reserved_bytes", "allocated_bytes", "active_bytes", "requested_bytes", "pending_free_bytes",
            "rounding_bytes", "free_bytes", "free_whole_segments_bytes", "free_unmappable_bytes",
            "stranded_bytes", "largest_free_bytes",
        ),
        0,
    )  # fmt: skip
    return OomMeasures(**totals, **changes)  # type: ignore[arg-type]


def test_blocks_in_the_way_that_are_old_or_unknown() -> None:
    stacks = StackTable.from_lists(
        [Frame("torch/nn/functional.py", 3, "relu"), Frame("??", 0, "aten::relu")], [(1, 0), (1,)]
    )
    blocks = tuple(LiveBlock(0, MIB, MIB, False, None, stack, None) for stack in (0, 1, -1, -1, -1, -1))
    found = _failure(request_bytes=GIB, autopsy=Autopsy("stretch", blocks))
    lines = failure_lines(found, stacks)
    assert lines[1] == "Fewest blocks in its way: 6, together 6.00 MiB."
    assert lines[2] == "  1.00 MiB  relu, torch/nn/functional.py:3, older than the history"
    assert lines[3] == "  1.00 MiB  stack unknown, older than the history"
    assert len(lines) == 2 + 5
    assert place_words(stacks, -1) is None
    entry = failure_json(found, stacks)
    assert entry is not None
    assert len(entry["in_the_way"]) == 6  # type: ignore[arg-type]


def test_a_failure_without_an_explanation() -> None:
    stacks = StackTable.from_lists([], [])
    assert len(failure_lines(_failure(), stacks)) == 1
    assert failure_json(None, stacks) is None
