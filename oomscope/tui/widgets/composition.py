"""Bars of what was in memory at the peak."""

from __future__ import annotations

from collections.abc import Sequence

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, fit, fit_left
from oomscope.views import wording
from oomscope.views.composition import Composition, Part

#: Smaller shares of the peak are not worth a line.
_LEAST = 0.0005


class CompositionBars(LineList):
    """By category on the left, by module below it."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._composition: Composition | None = None
        self._word = ""

    def show(self, composition: Composition | None, word: str) -> None:
        if (composition, word) != (self._composition, self._word):
            self._composition, self._word = composition, word
            self.invalidate()

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        found = self._composition
        if found is None:
            note = "The make-up of the peak is recorded on a simulated device and with --detail."
            return [], [Row([(note, "dim")])]
        when = f" at step {found.step}" if found.step is not None else ""
        phase = f", {found.phase}" if found.phase else ""
        head = f"peak {wording.size(found.peak_bytes)}{when}{phase}"
        rows = [Row([(head, "bold"), (f"  {self._word}", "dim")])]
        rows += _bars(found.categories, found.peak_bytes, width, "allocated")
        if found.modules:
            rows += [Row([("", "")]), Row([("by module", "bold")])]
            rows += _bars(found.modules, found.peak_bytes, width, "baseline", from_left=True)
        return [], rows


def _bars(parts: Sequence[Part], total: int, width: int, style: str, *, from_left: bool = False) -> list[Row]:
    name_cells = min(24, max(12, width // 3))
    room = max(6, width - name_cells - 18)
    rows = []
    shown = [part for part in parts if part.size_bytes >= total * _LEAST] or list(parts[:1])
    for part in shown:
        cells = round(part.size_bytes / max(1, total) * room)
        name = fit_left(part.name, name_cells - 1) if from_left else fit(part.name, name_cells - 1)
        rows.append(
            Row(
                [
                    (name + " ", ""),
                    ("█" * min(room, cells), style),
                    ("·" * max(0, room - cells), "free"),
                    (f"{wording.gib(part.size_bytes, 2):>8} GiB", "bold"),
                    (f"{part.size_bytes / max(1, total):>5.0%}", "dim"),
                ]
            )
        )
    return rows
