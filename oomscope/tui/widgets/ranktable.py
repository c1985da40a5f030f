"""The rank table: numbers, a stacked bar of the card, and one word on how each rank is doing; or a line per node."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from textual.geometry import Size

from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, fit, pad
from oomscope.tui.widgets.timeline_area import EIGHTHS
from oomscope.views import wording
from oomscope.views.ranks import NodeRow, RankRow, by_node, ordered

#: From this many ranks on the table starts sorted by headroom, so that what matters is in view.
MANY = 16

_SEVERITY_STYLES = {"error": "error", "warn": "warn", "ok": "ok", "info": "dim"}
#: Eighths of the usable card at the peak of a rank, one cell each.
_HEAT = EIGHTHS[1:]
#: Styles of areas: on the cursor's row they are not reversed, which would turn the heights round.
_HEAT_STYLES = {"error": "over", "warn": "inactive"}
_NODE = "node:"


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
        self.reverse = False
        self.grouped = False
        """One line per node; `unfolded` nodes show their ranks below."""
        self.unfolded: set[str] = set()
        self.limit = 16
        """Most lines that the table takes of the screen."""

    def show(self, ranks: Sequence[RankRow]) -> None:
        if tuple(ranks) == self._ranks:
            return
        changed = len(ranks) != len(self._ranks)
        self._ranks = tuple(ranks)
        self.renew(layout=changed)

    def renew(self, *, layout: bool = True) -> None:
        """The ranks, their order or their grouping changed."""
        self.invalidate()
        if layout:
            self.refresh(layout=True)

    def point_at(self, rank: int) -> None:
        """Put the cursor on `rank`, or on its node where that is folded."""
        if not self.grouped:
            self.select(str(rank), quiet=True)
            return
        node = next((n for n in self._hosts() if any(row.rank == rank for row in n.ranks)), None)
        if node is not None and self.cursor_key != _NODE + node.name:
            self.select(str(rank) if node.name in self.unfolded else _NODE + node.name, quiet=True)

    def rank_of(self, key: str) -> int | None:
        """The rank that a line stands for: of a node the one to look at first."""
        if not key.startswith(_NODE):
            return int(key) if key else None
        return next((n.worst.rank for n in self._hosts() if _NODE + n.name == key), None)

    def fold(self) -> bool:
        """Show or hide the ranks of the node under the cursor; False where there is none."""
        node = next((n for n in self._hosts() if self.cursor_key in _keys(n)), None)
        if not self.grouped or node is None:
            return False
        self.unfolded ^= {node.name}
        self.cursor_key = _NODE + node.name
        self.renew()
        return True

    def _hosts(self) -> list[NodeRow]:
        return by_node(self._ranks, self.order or "rank", reverse=self.reverse)

    @property
    def shown_order(self) -> str:
        """The order in force: the user's, else by rank for few and by headroom for many ranks."""
        return self.order or ("rank" if len(self._ranks) <= MANY else "headroom")

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        lines = len(self.build(width)[1]) if self.grouped and width > 0 else len(self._ranks)
        return min(max(1, lines), self.limit) + 1

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        if not self._ranks:
            note = "no rank has reported yet; a job shows up here once it has imported torch"
            return [[("rank", "heading")]], [Row([(note, "dim")])]
        if self.grouped:
            return self._build_nodes(width)
        head, make = self._columns(width)
        return [head], [make(row) for row in ordered(self._ranks, self.shown_order, reverse=self.reverse)]

    def _columns(self, width: int) -> tuple[Sequence[Span], Callable[[RankRow], Row]]:
        """The heading and what makes a rank's line."""
        if not any(row.on_device for row in self._ranks):
            return _host_head(width), lambda row: Row(
                _host_line(row, width, self.cursor_key == str(row.rank)), str(row.rank)
            )
        # A simulated card has no temperature: the columns are there for real ones.
        driver = width >= 120 and any(row.on_device and not row.simulated for row in self._ranks)
        return _device_head(width, driver), lambda row: Row(
            _device_line(row, width, self.cursor_key == str(row.rank), driver), str(row.rank)
        )

    def _build_nodes(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        nodes = self._hosts()
        strip = max(5, min(max(len(node.ranks) for node in nodes), width - _node_fixed(width)))
        _, make = self._columns(width)
        rows: list[Row] = []
        for node in nodes:
            unfolded = node.name in self.unfolded
            key = _NODE + node.name
            rows.append(Row(_node_line(node, strip, key == self.cursor_key, unfolded, width), key))
            rows += [make(row) for row in node.ranks] if unfolded else []
        return [_node_head(strip, width)], rows


def _keys(node: NodeRow) -> set[str]:
    return {_NODE + node.name, *(str(row.rank) for row in node.ranks)}


def _node_fixed(width: int) -> int:
    """Cells of a node's line beside the heat strip."""
    return 2 + 14 + 6 + 10 + 7 + 9 + 2 + 10 + (16 if width >= 100 else 0)


def _node_head(strip: int, width: int) -> list[Span]:
    head = f"   {'node':<13}{'ranks':>6}{'free GiB':>10}{'worst':>7}"
    head += f"{'alloc/resv GiB':>16}" if width >= 100 else ""
    return [(f"{head}{'Δ/step':>9}  {fit('peaks', strip)} status", "heading")]


def _node_line(node: NodeRow, strip: int, selected: bool, unfolded: bool, width: int) -> list[Span]:
    """A host: its ranks, the least headroom, the rank to look at first, and the peak of each as a height."""
    worst = node.worst
    heat: list[Span] = [
        (_heat(row), _HEAT_STYLES.get(row.severity, "allocated")) for row in node.ranks[:strip]
    ]
    held = f"{wording.gib(worst.used_bytes)}/{wording.gib(worst.reserved_bytes):>4}".rjust(16)
    return [
        (f"{'›' if selected else ' '}{'▾' if unfolded else '▸'} ", "bold" if selected else "dim"),
        (fit(node.name, 13), "bold"),
        (f"{len(node.ranks):>6}{wording.gib(node.headroom_bytes):>10}{worst.rank:>7}", ""),
        (held if width >= 100 else "", ""),
        (f"{wording.per_step(worst.change_per_step):>9}  ", "error" if worst.is_growing else "dim"),
        *heat,
        (" " * (strip - len(heat)), ""),
        (f" {worst.status:<9.9}", _SEVERITY_STYLES[worst.severity]),
    ]


def _heat(row: RankRow) -> str:
    """The peak as a share of what the allocator can get; "·" when unknown."""
    usable, peak = row.usable_bytes, row.peak_bytes
    if not usable or peak is None:
        return "·"
    return _HEAT[max(0, min(7, int(peak / usable * 8)))]


def _bar_width(width: int, fixed: int) -> int:
    return max(6, width - fixed)


_DEVICE_FIXED = 5 + 14 + 7 + 6 + 8 + 1 + 1 + 9
_WIDE_EXTRA = 7 + 8 + 11
_DRIVER_EXTRA = 6 + 4 + 5


def _is_wide(width: int) -> bool:
    return width >= 120


def _device_fixed(width: int, driver: bool) -> int:
    return _DEVICE_FIXED + (_WIDE_EXTRA if _is_wide(width) else 0) + (_DRIVER_EXTRA if driver else 0)


def _device_head(width: int, driver: bool) -> list[Span]:
    bar = _bar_width(width, _device_fixed(width, driver))
    head = f"{'rank':>4} {'alloc/resv GiB':>14}{'peak':>7}{'idle':>6}{'Δ/step':>8}"
    if _is_wide(width):
        head += f"{'step':>7}{'loss':>8} {'phase':<10}"
    if driver:
        head += f"{'util':>6}{'°C':>4}{'W':>5}"
    return [(head + " ", "heading"), *pad(_legend(bar), bar), (" status", "heading")]


def _legend(room: int) -> list[Span]:
    long = room >= 48
    words = ("allocated", "inactive", "free", "not PyTorch") if long else ("alloc", "inact", "free", "other")
    out: list[Span] = []
    gap = " " if room >= 32 else ""
    for glyph, style, word in zip("█▒·░", ("allocated", "inactive", "free", "other"), words, strict=True):
        out += [(glyph, style), (f"{gap}{word}{'  ' if long else ' '}", "dim")]
    return out


def _device_line(row: RankRow, width: int, selected: bool, driver: bool) -> list[Span]:
    wide = _is_wide(width)
    bar = _bar_width(width, _device_fixed(width, driver))
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
    if driver:
        line.append((_driver_cells(row), ""))
    return [
        *line,
        (" ", ""),
        *stacked_bar(row, bar),
        (f" {row.status:<9.9}", _SEVERITY_STYLES[row.severity]),
    ]


def _driver_cells(row: RankRow) -> str:
    """Utilisation, temperature and power as the driver last gave them."""
    gpu = row.gpu_reading
    util, heat, power = (gpu.utilization_pct, gpu.temperature_c, gpu.power_w) if gpu else (None,) * 3
    shown = ["–" if value is None else f"{value:.0f}" for value in (util, heat, power)]
    return f"{shown[0] + ('%' if util is not None else ''):>6}{shown[1]:>4}{shown[2]:>5}"


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
