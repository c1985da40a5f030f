"""The rank table: numbers, a stacked bar of the card, and one word on how each rank is doing."""

from __future__ import annotations

from collections.abc import Sequence

from textual.geometry import Size

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, pad
from oomscope.views import wording
from oomscope.views.ranks import RankRow, ordered

#: From this many ranks on the table starts sorted by headroom, so that what matters is in view.
MANY = 16

_SEVERITY_STYLES = {"error": "error", "warn": "warn", "ok": "ok", "info": "dim"}


def stacked_bar(row: RankRow, width: int) -> list[Span]:
    """Allocated █, inactive ▒, free ·, not PyTorch's ░, in exactly `width` cells.

    Edges are rounded, not parts, so the parts always add up; a part above zero may still be less than a cell.
    """
    capacity = row.capacity_bytes or 0
    if capacity <= 0 or row.used_bytes is None:
        return [(" " * width, "")]
    inactive = max(0, (row.reserved_bytes or row.used_bytes) - row.used_bytes)
    edges, total = [0], 0
    for part in (row.used_bytes, inactive):
        total += part
        edges.append(min(width, round(total / capacity * width)))
    other = min(width - edges[-1], round(row.other_bytes / capacity * width))
    return [
        ("█" * edges[1], "allocated"),
        ("▒" * (edges[2] - edges[1]), "inactive"),
        ("·" * (width - edges[2] - other), "free"),
        ("░" * other, "other"),
    ]


class RankTable(LineList):
    """One line per rank under a fixed heading."""

    DEFAULT_CSS = """
    RankTable { height: auto; min-height: 2; }
    """

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._ranks: tuple[RankRow, ...] = ()
        self.order = ""
        self.limit = 16
        """Most lines that the table takes of the screen."""

    def show(self, ranks: Sequence[RankRow]) -> None:
        if tuple(ranks) == self._ranks:
            return
        changed = len(ranks) != len(self._ranks)
        self._ranks = tuple(ranks)
        self.invalidate()
        if changed:
            self.refresh(layout=True)

    @property
    def shown_order(self) -> str:
        """The order in force: the user's, else by rank for few and by headroom for many ranks."""
        return self.order or ("rank" if len(self._ranks) <= MANY else "headroom")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        return min(max(1, len(self._ranks)), self.limit) + 1

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        if not self._ranks:
            note = "no rank has reported yet; a job shows up here once it has imported torch"
            return [[("rank", "heading")]], [Row([(note, "dim")])]
        rows = ordered(self._ranks, self.shown_order)
        on_device = any(row.on_device for row in rows)
        make = _device_line if on_device else _host_line
        head = _device_head(width) if on_device else _host_head(width)
        return [head], [Row(make(row, width, row.rank == self._rank), str(row.rank)) for row in rows]

    @property
    def _rank(self) -> int:
        return int(self.cursor_key) if self.cursor_key else -1


def _bar_width(width: int, fixed: int) -> int:
    return max(6, width - fixed)


_DEVICE_FIXED = 5 + 14 + 7 + 6 + 8 + 1 + 1 + 9
_WIDE_EXTRA = 7 + 8 + 11


def _is_wide(width: int) -> bool:
    return width >= 120


def _device_head(width: int) -> list[Span]:
    wide = _is_wide(width)
    bar = _bar_width(width, _DEVICE_FIXED + (_WIDE_EXTRA if wide else 0))
    head = f"{'rank':>4} {'alloc/resv GiB':>14}{'peak':>7}{'idle':>6}{'Δ/step':>8}"
    if wide:
        head += f"{'step':>7}{'loss':>8} {'phase':<10}"
    return [(head + " ", "heading"), *pad(_legend(bar), bar), (" status", "heading")]


def _legend(room: int) -> list[Span]:
    long = room >= 48
    words = ("allocated", "inactive", "free", "not PyTorch") if long else ("alloc", "inact", "free", "other")
    out: list[Span] = []
    gap = " " if room >= 32 else ""
    for glyph, style, word in zip("█▒·░", ("allocated", "inactive", "free", "other"), words, strict=True):
        out += [(glyph, style), (f"{gap}{word}{'  ' if long else ' '}", "dim")]
    return out


def _device_line(row: RankRow, width: int, selected: bool) -> list[Span]:
    wide = _is_wide(width)
    bar = _bar_width(width, _DEVICE_FIXED + (_WIDE_EXTRA if wide else 0))
    rate = row.change_per_step
    line: list[Span] = [
        (f"{'›' if selected else ' '}{row.rank:>3} ", "bold" if selected else ""),
        (f"{wording.gib(row.used_bytes)}/{wording.gib(row.reserved_bytes):>4}".rjust(14), ""),
        (f"{wording.gib(row.peak_bytes):>7}", ""),
        (f"{wording.percent(row.idle_share):>6}", "warn" if row.is_fragmented else "dim"),
        (f"{wording.per_step(rate):>8}", "error" if row.is_growing else "dim"),
    ]
    if wide:
        line += [
            (f"{'–' if row.step is None else row.step:>7}", ""),
            (f"{'–' if row.loss is None else f'{row.loss:.4g}':>8} {row.phase:<10.10}", "dim"),
        ]
    return [
        *line,
        (" ", ""),
        *stacked_bar(row, bar),
        (f" {row.status:<9.9}", _SEVERITY_STYLES[row.severity]),
    ]


_HOST_FIXED = 5 + 10 + 10 + 9 + 7 + 9 + 1 + 1 + 9


def _host_head(width: int) -> list[Span]:
    bar = _bar_width(width, _HOST_FIXED)
    head = f"{'rank':>4} {'RSS GiB':>9} {'peak GiB':>9} {'Δ/step':>8}{'step':>7}{'loss':>9} "
    label = "host memory of this rank" if bar >= 26 else "host memory"
    return [(head, "heading"), (f"{label[:bar]:<{bar}}", "dim"), (" status", "heading")]


def _host_line(row: RankRow, width: int, selected: bool) -> list[Span]:
    bar = _bar_width(width, _HOST_FIXED)
    rate = row.change_per_step
    return [
        (f"{'›' if selected else ' '}{row.rank:>3} ", "bold" if selected else ""),
        (f"{wording.gib(row.used_bytes, 2):>9} {wording.gib(row.peak_bytes, 2):>9} ", ""),
        (f"{wording.per_step(rate):>8}", "error" if row.is_growing else "dim"),
        (f"{'–' if row.step is None else row.step:>7}", ""),
        (f"{'–' if row.loss is None else f'{row.loss:.5g}':>9} ", "dim"),
        *stacked_bar(row, bar),
        (f" {row.status:<9.9}", _SEVERITY_STYLES[row.severity]),
    ]
