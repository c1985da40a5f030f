"""The peak of each phase of a step for one rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from textual.geometry import Size

from oomscope.protocol.records import PHASES
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, wrap
from oomscope.views import wording
from oomscope.views.ranks import RankRow


class PhaseBars(LineList):
    """One bar per phase against the usable capacity."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._row: RankRow | None = None
        self._peaks: Mapping[str, int] = {}

    def show(self, row: RankRow | None, peaks: Mapping[str, int]) -> None:
        if row != self._row or peaks != self._peaks:
            self._row, self._peaks = row, peaks
            self.invalidate()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        head, rows = self.build(max(1, width))
        return len(head) + len(rows)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        row = self._row
        if row is None or not self._peaks:
            note = "They are recorded with oomscope run --detail, on a simulated device, and in every rerun."
            lines = [Row([(" " + line, "dim")]) for line in wrap(note, max(20, width - 2))]
            return [], [Row([(" No peaks by phase for this rank.", "bold")]), *lines]
        top = max(row.usable_bytes or 0, *self._peaks.values(), 1)
        room = max(8, width - 24)
        head: list[Span] = [
            (f" rank {row.rank}  highest allocated bytes by phase", "bold"),
            (f"  {wording.kind_of_number(row.simulated)}", "dim"),
        ]
        known = [p for p in PHASES if p in self._peaks] + [p for p in self._peaks if p not in PHASES]
        highest = max(self._peaks.values())
        rows = []
        for phase in known:
            value = self._peaks[phase]
            cells = round(value / top * room)
            rows.append(
                Row(
                    [
                        (f" {phase:<10.10} ", "bold" if value == highest else ""),
                        ("█" * cells, "allocated"),
                        ("·" * (room - cells), "free"),
                        (f" {wording.gib(value):>6} GiB", "bold" if value == highest else ""),
                    ]
                )
            )
        return [head], rows
