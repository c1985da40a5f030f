"""The GPUs of a machine, one line each, and the last minutes of one of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from oomscope.tui.widgets.frame import OneLine
from oomscope.tui.widgets.lines import LineList
from oomscope.tui.widgets.spans import Row, Span, clip
from oomscope.tui.widgets.timeline_area import EIGHTHS
from oomscope.units import GIB
from oomscope.views.machine import GpuRow
from oomscope.views.machine_text import bar, gpu_name, power_text, slower, value

#: Widths from which the tables of a machine have their further columns, and a history in each line.
WIDE, _SPARKS = 110, 130


class GpuList(LineList):
    """One line per GPU or MIG instance."""

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self.gpus: tuple[GpuRow, ...] = ()
        self.loads: Mapping[str, Sequence[float]] = {}

    def show(self, gpus: Sequence[GpuRow], loads: Mapping[str, Sequence[float]]) -> None:
        """`loads`: the last utilisations of each GPU, 0 to 1, newest last."""
        self.gpus = tuple(gpus)
        self.loads = loads
        self.styles.height = min(len(gpus) + 1, max(3, self.app.size.height // 2 - 2))
        self.invalidate()

    @property
    def current(self) -> GpuRow | None:
        return next((row for row in self.gpus if row.uuid == self.cursor_key), None)

    def build(self, width: int) -> tuple[list[Sequence[Span]], list[Row]]:
        wide = width >= WIDE
        spark = min(40, (width - 96) // 2) if width >= _SPARKS else 0
        name = 20 if wide else 13
        cells = max(10, width - name - (76 if wide else 53) - (spark + 2 if spark else 0))
        head = f" {'gpu':<5}{'name':<{name}}{'util':>5}  " + (
            f"{'util, last readings':<{spark}}  " if spark else ""
        )
        head += f"{'memory':<{cells}}{'GiB':>11}{'°C':>5}{'W':>9}"
        head += f"{'MHz':>6}{'ECC':>5}  state" if wide else "  state"
        return [[(head[:width], "heading")]], [self._line(row, wide, name, spark, cells) for row in self.gpus]

    def _line(self, row: GpuRow, wide: bool, name: int, spark: int, cells: int) -> Row:
        record = row.record
        used = "–" if row.used_bytes is None else f"{row.used_bytes / GIB:.1f}"
        spans: list[Span] = [
            ("›" if row.uuid == self.cursor_key else " ", "bold"),
            (f"{row.label:<5}", "bold"),
            (f"{clip(gpu_name(row), name - 1):<{name}}", ""),
            (f"{value(record.get('utilization_pct'), '%'):>5}  ", ""),
        ]
        if spark:
            spans.append((f"{sparkline(self.loads.get(row.uuid, ()), spark):>{spark}}  ", "dim"))
        spans += [
            *bar(row, cells),
            (f"{used + '/' + format(row.total_bytes / GIB, '.0f'):>11}", "bold"),
            (f"{value(record.get('temperature_c')):>5}", "warn" if _is_hot(row) else ""),
            (f"{power_text(record):>9}", ""),
        ]
        if wide:
            errors = record.get("ecc_uncorrected")
            spans.append((f"{value(record.get('sm_clock_mhz')):>6}", ""))
            spans.append((f"{value(errors):>5}", "warn" if errors else ""))
        return Row([*spans, ("  ", ""), _state_span(row)], row.uuid)


def sparkline(shares: Sequence[float], width: int) -> str:
    """The last `width` shares of one, a column each."""
    return "".join(EIGHTHS[min(8, max(0, round(share * 8)))] for share in list(shares)[-width:])


def _is_hot(row: GpuRow) -> bool:
    return bool({"hw_thermal", "sw_thermal", "hw_slowdown"} & set(row.record.get("throttle", ())))


def _state_span(row: GpuRow) -> Span:
    if row.state != "ok":
        return f"▲ {row.state}", "error"
    if row.stale:
        return "! stale", "warn"
    if row.warnings:
        return f"! {row.warnings[0]}", "warn"
    return slower(row.record) or "ok", "dim"


class GpuHistory(OneLine):
    """The selected GPU's utilisation or memory over the last minutes, one column a reading."""

    DEFAULT_CSS = "GpuHistory { height: 1; width: 1fr; }"

    def __init__(self, label: str, *, id: str) -> None:
        super().__init__(id=id)
        self._label, self._now = label, ""
        self._shares: tuple[float, ...] = ()

    def show(self, shares: Sequence[float], now: str) -> None:
        self._shares, self._now = tuple(shares), now
        self.refresh()

    def spans(self, width: int) -> Sequence[Span]:
        room = max(0, width - len(self._label) - 14)
        return [
            (f" {self._label} ", "bar-dim"),
            (f"{sparkline(self._shares, room):>{room}}", "bar"),
            (f" {self._now:>11}", "bar-bold"),
        ]
