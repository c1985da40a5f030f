"""One line that names the view on the left and what narrows it on the right."""

from __future__ import annotations

from collections.abc import Sequence

from oomscope.tui.widgets.frame import OneLine
from oomscope.tui.widgets.spans import Span, columns


class ViewLine(OneLine):
    """Which view is shown, and what narrows it."""

    def __init__(self) -> None:
        super().__init__()
        self._left: Sequence[Span] = ()
        self._right: Sequence[Span] = ()

    def show(self, left: Sequence[Span], right: Sequence[Span]) -> None:
        self._left, self._right = left, right
        self.refresh()

    def spans(self, width: int) -> Sequence[Span]:
        return columns(self._left, self._right, width, "bar")
