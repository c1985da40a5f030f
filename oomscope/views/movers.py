"""What changed between the peaks of two attempts, part by part, the largest change first."""

from __future__ import annotations

from dataclasses import dataclass

from oomscope.views.composition import Composition, Part


@dataclass(frozen=True)
class Mover:
    """A category or module at two peaks. Sizes in bytes."""

    name: str
    before_bytes: int
    after_bytes: int

    @property
    def change_bytes(self) -> int:
        return self.after_bytes - self.before_bytes


@dataclass(frozen=True)
class Movers:
    """The parts of two peaks beside each other."""

    before: str
    """What the first peak is of: "attempt 1"."""
    after: str
    categories: tuple[Mover, ...]
    modules: tuple[Mover, ...]


def compare(before: str, first: Composition, after: str, second: Composition) -> Movers:
    """The parts of `first` and `second`; what only one of them has counts as 0 in the other."""
    return Movers(
        before,
        after,
        _pairs(first.categories, second.categories),
        _pairs(first.modules, second.modules),
    )


def _pairs(before: tuple[Part, ...], after: tuple[Part, ...]) -> tuple[Mover, ...]:
    old = {part.name: part.size_bytes for part in before}
    new = {part.name: part.size_bytes for part in after}
    found = [Mover(name, old.get(name, 0), new.get(name, 0)) for name in {**old, **new}]
    return tuple(sorted(found, key=lambda mover: -abs(mover.change_bytes)))
