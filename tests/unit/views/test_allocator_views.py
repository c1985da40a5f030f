"""Words for ranges, and advice that follows from the table."""

from __future__ import annotations

import pytest

from oomscope.core.allocator.model import AllocatorConfig
from oomscope.core.allocator.whatif import Assessment, ConfigAssessment
from oomscope.units import GIB, MIB
from oomscope.views.allocator import config_words, range_words, whatif_advice, whatif_rows


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
