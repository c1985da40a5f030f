"""The allocations that are live at the cursor, sorted and filtered; any number of them."""

from __future__ import annotations

from collections.abc import Sequence

from oomscope.core.snapshot.categories import Category
from oomscope.tui.widgets.categories import SHORT, STYLES
from oomscope.tui.widgets.spans import Span, clip, columns
from oomscope.tui.widgets.virtual import VirtualList
from oomscope.views.snapshot_picture import Painter, Picture


class Allocations(VirtualList):
    """One line per allocation: size, age, step, category, state, code."""

    def __init__(self, *, id: str | None = None, classes: str | None = None) -> None:
        super().__init__(id=id, classes=classes)
        self._picture: Picture | None = None
        self._painter: Painter | None = None
        self._steps: list[int] = []

    def show(self, painter: Painter, picture: Picture) -> None:
        """Show other allocations; the cursor stays on the same one if it is still there."""
        kept = self.allocation
        self._painter, self._picture = painter, picture
        if kept is not None:
            found = (picture.allocations == kept).nonzero()[0]
            self.cursor = int(found[0]) if len(found) else 0
        self.renew()

    @property
    def allocation(self) -> int | None:
        """Row in `Lifetimes` of the selected allocation."""
        if self._picture is None or not 0 <= self.cursor < len(self._picture.allocations):
            return None
        return int(self._picture.allocations[self.cursor])

    def select_allocation(self, allocation: int, *, quiet: bool = False) -> bool:
        """Put the cursor on an allocation, `quiet` without telling anybody; False when it is not in the list."""
        if self._picture is None:
            return False
        found = (self._picture.allocations == allocation).nonzero()[0]
        if not len(found):
            return False
        self.put_cursor(int(found[0]), quiet=quiet)
        return True

    def count(self) -> int:
        return 0 if self._picture is None else len(self._picture.allocations)

    def header(self, width: int) -> Sequence[Span]:
        picture = self._picture
        if picture is None or self._painter is None:
            return []
        wish = picture.wish
        arrow = "▲" if wish.reverse else "▼"

        def named(name: str, text: str) -> str:
            return f"{text}{arrow}" if wish.order == name else text

        left = (
            f" {named('size', 'size MiB'):>11} {named('age', 'born'):>11} {'step':>5} "
            f"{named('category', 'for'):<9} {named('code', 'code')}"
        )
        total = int(self._painter.analysis.alive(wish.row).sum())
        right = f"{self.count():,} of {total:,} " if self.count() != total else f"{total:,} "
        if wish.order == "address":
            right = f"by address{arrow}  {right}"
        return columns([(left, "heading")], [(right, "dim")], width)

    def line(self, index: int, width: int, selected: bool) -> Sequence[Span]:
        if self._painter is None or self._picture is None:
            return []
        analysis = self._painter.analysis
        lives = analysis.lives
        number = int(self._picture.allocations[index])
        born = int(lives.birth[number])
        category = Category(int(analysis.category[number]))
        when = f"{born + analysis.device.skipped_events:,}" if born >= 0 else "before"
        step = str(int(analysis.steps.rows.searchsorted(born, side="right"))) if born >= 0 else "-"
        if analysis.steps.source == "none":
            step = "-"
        in_way = number in self._picture.segments.in_the_way
        waits = born >= 0 and lives.release[number] <= self._picture.wish.row
        label = self._painter.label(int(lives.stack[number]))
        room = max(8, width - 41)
        return [
            ("›" if selected else " ", "key"),
            (f"{lives.size[number] / (1 << 20):>11,.2f} {when:>11} {step:>5} ", ""),
            (f"{SHORT[category]:<9} ", "" if selected else STYLES[category]),
            ("▲ in the way: " if in_way else "", "error"),
            (clip(("freed, in use: " if waits else "") + label, room - (14 if in_way else 0)), ""),
        ]
