"""The parts of two peaks beside each other."""

from __future__ import annotations

from oomscope.views.composition import Composition, Part
from oomscope.views.movers import Mover, compare


def test_largest_change_first_and_missing_parts_count_as_nothing() -> None:
    before = Composition(
        40, 0, "backward", (Part("activations", 36), Part("parameters", 4)), (Part("head", 5),)
    )
    after = Composition(14, 5, "optimizer", (Part("parameters", 4), Part("optimizer state", 8)), ())
    found = compare("attempt 1", before, "attempt 2", after)
    assert found.categories == (
        Mover("activations", 36, 0),
        Mover("optimizer state", 0, 8),
        Mover("parameters", 4, 4),
    )
    assert [mover.change_bytes for mover in found.modules] == [-5]
